#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a CUDA compile command and keeps what ptxas says of each kernel in OBJECT.ptxas, which
# tools/check_ptxas.py reads; all else that the command says on standard error goes through.
# usage: keep_ptxas.sh COMMAND...
object=""
previous=""
for argument in "$@"; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
log=$object.ptxas
"$@" 2>"$log.new"
status=$?
grep -vE '^(ptxas info|    [0-9]+ bytes stack frame|$)' "$log.new" >&2
if [ $status -eq 0 ]; then mv "$log.new" "$log"; else rm -f "$log.new" "$log"; fi
exit $status
