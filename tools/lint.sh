#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All linters over the files that git knows; every one runs, then the script fails if one failed.
# usage: tools/lint.sh [--fix]     --fix: let the formatters rewrite instead
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin

cpp_files() { git ls-files '*.h' '*.cpp' '*.cu' '*.cuh'; }

if [ "${1:-}" = --fix ]; then
  cpp_files | xargs -r $bin/clang-format -i
  $bin/ruff format -q .
  $bin/ruff check -q --fix .
  exit
fi

failed=()
check() {
  local name=$1 start=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed+=("$name")
  echo "$name: $((SECONDS - start)) s"
}

clang_format() { cpp_files | xargs -r $bin/clang-format --dry-run --Werror; }

check layers $bin/python tools/check_layers.py
check sizes $bin/python tools/check_sizes.py
check clang-format clang_format
check 'ruff format' $bin/ruff format --check .
check 'ruff check' $bin/ruff check .
check mypy $bin/mypy
check clang-tidy $bin/python tools/tidy.py

if [ ${#failed[@]} -gt 0 ]; then
  printf '\nlint: failed: %s\n' "${failed[*]}" >&2
  echo 'lint: "make format" repairs what the formatters found' >&2
  exit 1
fi
printf '\nlint: all clean\n'
