#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench.bench_serve on a GPU machine that has PyTorch but lacks the server's libraries.
#   pack [BUILD_FOLDER]  here, where build/cpu is: server, load generator and runtime from there,
#       libikbo_ops.so with the CUDA kernels from BUILD_FOLDER (build/sm90 when none is named), and
#       every library that these need and PyTorch does not bring, into build/gpu-serve.tgz. Fails
#       when they would find a library elsewhere.
#   run [ARG...]  there, with a checkout and that archive in its build/: unpacks it and measures;
#       ARG... are those of bench.bench_serve
# usage: tools/gpu_serve.sh pack|run [...]
# ARCHIVE=... names another archive than build/gpu-serve.tgz; it is unpacked beside itself.
set -euo pipefail
cd "$(dirname "$0")/.."

ARCHIVE=$(realpath -m "${ARCHIVE:-build/gpu-serve.tgz}")
PYTHON=python3
[ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python

fail() {
  printf 'gpu_serve: %s\n' "$1" >&2
  exit 1
}

torch_folder() {
  local origin
  origin=$($PYTHON -c "import importlib.util as u; print(u.find_spec('torch').origin)")
  dirname "$origin"
}

# Which libraries every machine has with its compiler: they must be the machine's own.
is_of_run_time() {
  case $1 in
    linux-vdso.so.* | ld-linux-x86-64.so.* | libc.so.* | libm.so.* | libdl.so.* | librt.so.* | \
      libpthread.so.* | libresolv.so.* | libutil.so.* | libstdc++.so.* | libgcc_s.so.*) ;;
    *) return 1 ;;
  esac
}

# What PyTorch's wheels bring, its own libraries and those of CUDA.
is_of_torch() {
  local packages
  packages=$(realpath "$TORCH/..")
  case $(realpath -m "$1") in
    "$packages"/torch/lib/* | "$packages"/nvidia/*) ;;
    *) return 1 ;;
  esac
}

# Lines "NAME PATH" of what FOLDER's binaries load; PATH is "missing" where there is none.
loaded_by() {
  local file
  for file in "$1"/bin/* "$1"/lib/*; do
    env -i LD_LIBRARY_PATH="$1/lib:$TORCH/lib" ldd "$file"
  done | awk '$2 == "=>" { print $1, ($3 == "not" ? "missing" : $3) }' | sort -u
}

# Lines as above of what is neither in FOLDER nor on every such machine.
foreign_to() {
  local name path
  loaded_by "$1" | while read -r name path; do
    is_of_run_time "$name" || is_of_torch "$path" || [ "${path#"$1"/}" != "$path" ] ||
      echo "$name $path"
  done
}

pack() {
  local cuda=${1:-build/sm90} tree name path found
  tree=$(mktemp -d)
  # shellcheck disable=SC2064  # now: it is no variable any more at the end
  trap "rm -rf '$tree'" EXIT
  mkdir "$tree/bin" "$tree/lib"
  for path in build/cpu/bin/ikbo-server build/cpu/lib/libikbo.so "$cuda/lib/libikbo_ops.so"; do
    [ -e "$path" ] || fail "$path must be built; \`make build\` does it, and the CUDA kernels too \
where nvcc is found"
  done
  cp build/cpu/bin/ikbo-{server,load} "$tree/bin/"
  cp -P build/cpu/lib/libikbo{,_runtime,_cuda_graphs}.so* "$cuda/lib/libikbo_ops.so" "$tree/lib/"
  foreign_to "$tree" | while read -r name path; do
    [ "$path" != missing ] || fail "$name is needed and not found"
    cp -L "$path" "$tree/lib/$name"
  done
  strip --strip-unneeded "$tree"/bin/* "$tree"/lib/*
  found=$(foreign_to "$tree")
  [ -z "$found" ] || fail "the archive must hold every library; elsewhere are:"$'\n'"$found"
  tar -czf "$ARCHIVE" -C "$tree" bin lib
  echo "$ARCHIVE: $(($(stat -c %s "$ARCHIVE") >> 20)) MiB"
}

run() {
  local folder=${ARCHIVE%.tgz} missing
  [ -f "$ARCHIVE" ] || fail "$ARCHIVE must be here; \`tools/gpu_serve.sh pack\` makes it"
  rm -rf "$folder"
  mkdir -p "$folder"
  tar -xzf "$ARCHIVE" -C "$folder"
  missing=$(loaded_by "$folder" | grep ' missing$' || true)
  # No end: what PyTorch misses it may never load.
  [ -z "$missing" ] || printf 'gpu_serve: not found here:\n%s\n' "$missing" >&2
  # GNU's compilers by name: a CXX that links libstdc++ statically breaks compiled packages.
  export CC=/usr/bin/gcc CXX=/usr/bin/g++
  export IKBO_SERVER=$folder/bin/ikbo-server IKBO_C_LIBRARY=$folder/lib/libikbo.so
  export IKBO_OPS_LIBRARY=$folder/lib/libikbo_ops.so PYTHONPATH=$PWD/python
  export LD_LIBRARY_PATH=$folder/lib:$TORCH/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  exec $PYTHON -m bench.bench_serve --device cuda "$@"
}

TORCH=$(torch_folder)
case ${1:-} in
  pack | run) "$@" ;;
  *) fail "pack or run must be named; got '${1:-}'" ;;
esac
