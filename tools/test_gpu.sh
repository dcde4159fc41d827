#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of the CUDA kernels, on a machine with an H100 or H200 and compute-sanitizer. Needs a
# python3 with PyTorch and pytest, and either nvcc, CMake, ninja and GoogleTest, or a build folder
# without CMakeCache.txt that holds what was built elsewhere: bin/*_test, bin/lce_example,
# lib/libikbo_ops.so, bin/ikbo-replay and, in lib, what that links besides PyTorch. No network.
# ikbo-replay needs libzip, simdjson, xxHash, OpenSSL and CLI11; without it tests of packages fail.
# usage: tools/test_gpu.sh [BUILD_FOLDER]     build/sm90 when none is named
# IKBO_OPS_LIBRARY=... names another operator library for the Python tests, IKBO_REPLAY=... another
# ikbo-replay; LOGS=... keeps the logs.
set -euo pipefail
cd "$(dirname "$0")/.."

absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
BUILD=$(absolute "${1:-build/sm90}")
PYTHON=python3
[ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
LOGS=${LOGS:-$(mktemp -d)}
SANITIZERS="memcheck racecheck synccheck initcheck"
# What is small enough to run ten to a hundred times slower.
SMALL='Small*'
TIMEOUT=${TIMEOUT:-280}

build() {
  # GNU's compilers by name: a CXX that links libstdc++ statically breaks compiled packages.
  export CC=/usr/bin/gcc CXX=/usr/bin/g++ CUDAHOSTCXX=/usr/bin/g++
  if [ -d "$BUILD" ] && [ ! -f "$BUILD/CMakeCache.txt" ]; then return; fi
  printf '\n== C++ build (%s)\n' "$BUILD"
  cmake --preset sm90 -B "$BUILD" --log-level=NOTICE -DIKBO_BUILD_RUNTIME=OFF \
    -DIKBO_RANDOM_DELAYS=ON \
    -DPython3_EXECUTABLE="$(command -v $PYTHON)"
  cmake --build "$BUILD"
  cmake --install "$BUILD" --prefix "$BUILD/installed" >/dev/null
  cmake -G Ninja -S examples/cpp -B "$BUILD/example" --log-level=NOTICE \
    -DCMAKE_PREFIX_PATH="$BUILD/installed"
  cmake --build "$BUILD/example"
  cp "$BUILD/example/lce_example" "$BUILD/bin/"
  build_replay
}

# ikbo-replay, which is built without CUDA.
build_replay() {
  if ! pkg-config --exists --print-errors libzip simdjson libxxhash CLI11 libcrypto; then
    echo 'test-gpu: ikbo-replay is not built; the tests that replay packages fail' >&2
    return
  fi
  cmake --preset cpu -B "$BUILD/replay" --log-level=NOTICE -DIKBO_BUILD_OPS=OFF \
    -DIKBO_BUILD_TESTS=OFF -DPython3_EXECUTABLE="$(command -v $PYTHON)"
  cmake --build "$BUILD/replay" --target ikbo-replay
  cp "$BUILD/replay/bin/ikbo-replay" "$BUILD/bin/"
}

# start NAME COMMAND...: runs it beside others, output to LOGS/NAME. Not beside all: they share the
# GPU in turns. The longest come first.
AT_ONCE=$(nproc)
jobs=()
start() {
  local name=$1
  shift
  while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do wait -n || true; done
  (
    status=0
    timeout "$TIMEOUT" "$@" >"$LOGS/$name" 2>&1 || status=$?
    echo $status >"$LOGS/$name.status"
  ) &
  jobs+=("$name")
}

SECONDS=0
build
IKBO_OPS_LIBRARY=$(absolute "${IKBO_OPS_LIBRARY:-$BUILD/lib/libikbo_ops.so}")
# A test that finds none where this names one fails.
IKBO_REPLAY=$(absolute "${IKBO_REPLAY:-$BUILD/bin/ikbo-replay}")
export IKBO_OPS_LIBRARY IKBO_REPLAY
export PYTHONPATH=$PWD/python
# For an ikbo-replay that was built elsewhere; one from here knows where its libraries are.
TORCH=$($PYTHON -c "import importlib.util as u; print(u.find_spec('torch').origin)")
export LD_LIBRARY_PATH=$BUILD/lib:${TORCH%/*}/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

printf '\n== GPU tests (logs in %s)\n' "$LOGS"
# References are computed on the CPU, by all threads of a process that it does not share.
pytest() { OMP_NUM_THREADS=2 start "$1" $PYTHON -m pytest -q -rs -p no:cacheprovider "${@:2}"; }
# Without one the tests below would be skipped.
start a-gpu-for-pytorch $PYTHON -c "import torch; torch.zeros(1, device='cuda')"
pytest python-packages tests/e2e/test_generated_code.py -k on_the_gpu
pytest replayed-package tests/e2e/test_cuda_package.py -k on_the_gpu
for file in tests/ops/test_*cuda*.py; do
  name=${file##*/test_}
  pytest "python-${name%.py}" "$file"
done
pytest python-composite tests/ops/test_composite.py::test_on_cuda
for test in bmm bmm_delays expand index_check lce lce_delays lce_generic lce_values linear \
  linear_delays linear_values pipeline self_target_attention self_target_attention_delays \
  target_attention target_attention_delays target_attention_generic; do
  start "${test}_test" "$BUILD/bin/${test}_test" --gtest_brief=1
done
start lce_example "$BUILD/bin/lce_example"
# Racecheck looks at what wgmma reads where it is told to, in versions that can.
racecheck_options=()
case $(compute-sanitizer --help 2>&1 || true) in
  *--check-warpgroup-mma*) racecheck_options=(--check-warpgroup-mma yes) ;;
  *) echo 'test-gpu: compute-sanitizer has no --check-warpgroup-mma: racecheck leaves wgmma out' ;;
esac
for test in bmm expand lce lce_generic linear self_target_attention target_attention \
  target_attention_generic; do
  # GoogleTest is content with a filter that matches nothing.
  small=$("$BUILD/bin/${test}_test" --gtest_list_tests --gtest_filter="$SMALL" | grep '^  ' || true)
  [ -n "$small" ] || start "$test-has-no-small-case" false
  for tool in $SANITIZERS; do
    options=()
    [ "$tool" != racecheck ] || options=("${racecheck_options[@]}")
    start "$test-$tool" compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 \
      "$BUILD/bin/${test}_test" --gtest_brief=1 --gtest_filter="$SMALL"
  done
done
wait

failed=()
for name in "${jobs[@]}"; do
  status=$(cat "$LOGS/$name.status")
  [ "$status" = 0 ] || failed+=("$name")
  printf '%-36s %s  %s\n' "$name" "$([ "$status" = 0 ] && echo ok || echo "FAILED ($status)")" \
    "$(grep -v '^$' "$LOGS/$name" | tail -1 | cut -c1-90)"
done
for name in "${failed[@]}"; do
  printf '\n== %s\n' "$name"
  tail -40 "$LOGS/$name"
done
printf '\ntest-gpu: %d passed, %d failed in %d s%s\n' $((${#jobs[@]} - ${#failed[@]})) \
  ${#failed[@]} $SECONDS "${failed[*]:+: ${failed[*]}}"
[ ${#failed[@]} = 0 ]
