#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs each fuzz target of build/sanitize, all at once, for SECONDS.
# usage: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?usage: tools/fuzz.sh SECONDS}
targets=(build/sanitize/bin/fuzz_*)
[ -x "${targets[0]}" ] || { echo "fuzz: no target in build/sanitize/bin" >&2; exit 1; }

printf '\n== fuzzing for %s s: %s\n' "$seconds" "${targets[*]##*/}"
pids=()
for target in "${targets[@]}"; do
  name=${target##*/}
  corpus=build/fuzz/$name  # kept between runs
  mkdir -p "$corpus"
  seeds=tests/fuzz/seeds/$name
  arguments=("$corpus")
  [ ! -d "$seeds" ] || arguments+=("$seeds")
  "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$name-" "${arguments[@]}" >"build/fuzz/$name.log" 2>&1 &
  pids+=($!)
done

status=0
for i in "${!pids[@]}"; do
  name=${targets[$i]##*/}
  if wait "${pids[$i]}"; then
    echo "$name: $(awk '/number_of_executed_units/ {print $2}' "build/fuzz/$name.log") runs, no finding"
  else
    status=1
    tail -n 60 "build/fuzz/$name.log"
    echo "$name: FAILED; log build/fuzz/$name.log, input build/fuzz/$name-*" >&2
  fi
done
exit $status
