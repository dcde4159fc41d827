#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The built libikbo_ops.so under another PyTorch: its own virtual environment, the operator tests.
# usage: tools/test_torch.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-}
if [ -z "$version" ]; then
  echo "test-torch: name a version: make test-torch TORCH=2.15.0" >&2
  exit 1
fi
venv=build/torch-$version
installed=$("$venv/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
if [ "${installed%%+*}" != "$version" ]; then
  printf '\n== PyTorch %s into %s (some GB)\n' "$version" "$venv"
  .venv/bin/python -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check "torch==$version" \
    numpy pytest==9.2.0 pytest-timeout==2.4.0
fi
printf '\n== operator tests under PyTorch %s\n' "$version"
IKBO_OPS_LIBRARY=$PWD/build/cpu/lib/libikbo_ops.so PYTHONPATH=$PWD/python \
  "$venv/bin/python" -m pytest -q tests/ops tests/nn \
  --ignore tests/ops/test_new_op.py # a generator of sources: needs the linters, not PyTorch
