#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set-up on Debian 12 or Ubuntu 24.04 (x86-64). Steps, each skipped when there is nothing to do:
#   system   packages of requirements/system.txt and, on Debian, system-debian.txt, with apt-get
#   venv     .venv with the packages of requirements/dev.txt, and ikbo itself from python/
#   cpu      the C++ build, build/cpu
#   cuda     the CUDA kernels, build/sm90, where nvcc is found
#   sanitize the C++ build of runtime, server and fuzz targets under ASan and UBSan, build/sanitize
#   sanitize-thread  the C++ build of runtime and server under TSan, build/sanitize-thread
#   sanitize-replay  ikbo-replay under both, with PyTorch, build/sanitize-replay
# usage: tools/setup.sh [STEP...]     system, venv, cpu and cuda when none is named
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=.venv
VENV_STAMP=$VENV/.ikbo-requirements
VENV_MIN_GIB=7  # PyTorch with the CUDA libraries of PyPI's build, 4.7 GB, and the downloads

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf '\nsetup: %s\n' "$1" >&2
  shift
  for line in "$@"; do printf '       %s\n' "$line" >&2; done
  exit 1
}

missing_packages() {
  local package lists=(requirements/system.txt)
  ! grep -qs '^ID=debian$' /etc/os-release || lists+=(requirements/system-debian.txt)
  grep -hv '^#' "${lists[@]}" | while read -r package; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || echo "$package"
  done
}

step_system() {
  if ! command -v apt-get >/dev/null; then
    fail "no apt-get here: Debian 12 and Ubuntu 24.04 are supported" \
      "elsewhere install what requirements/system.txt lists, then: tools/setup.sh venv cpu cuda"
  fi
  local packages
  packages=$(missing_packages | tr '\n' ' ')
  [ -n "$packages" ] || return 0
  say "system packages: $packages"
  local as_root=
  if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null || { [ -t 0 ] && command -v sudo >/dev/null; }; then
      as_root=sudo
    else
      fail "system packages are missing and this user is not root; run this, then call again:" \
        "apt-get update && apt-get install -y --no-install-recommends $packages"
    fi
  fi
  # shellcheck disable=SC2086  # a list of words
  if ! $as_root apt-get update -q || ! $as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends $packages; then
    fail "apt-get failed, see above" "check the network and the package sources, then call again"
  fi
}

check_python() {
  command -v "$PYTHON" >/dev/null ||
    fail "$PYTHON not found" "name another: PYTHON=/path/to/python3"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Python 3.10 or newer is needed; $PYTHON is $("$PYTHON" -V 2>&1)" \
      "name another: PYTHON=/path/to/python3"
}

venv_works() { $VENV/bin/python -c 'import sys' 2>/dev/null; }

step_venv() {
  local wanted
  wanted=$(cat requirements/*.txt | sha256sum | cut -d' ' -f1)
  if [ "$(cat $VENV_STAMP 2>/dev/null)" = "$wanted" ] && venv_works; then
    return 0
  fi
  check_python
  say ".venv: PyTorch and the tools of requirements/dev.txt (some GB, a few minutes)"
  if ! venv_works; then
    local free_gib
    free_gib=$(df --output=avail -BG . | tail -1 | tr -dc 0-9)
    [ "$free_gib" -ge $VENV_MIN_GIB ] ||
      fail "$PWD has $free_gib GiB free; .venv needs $VENV_MIN_GIB GiB" "make room, then call again"
    "$PYTHON" -m venv --clear $VENV ||
      fail "could not make .venv" "is python3-venv there? then: rm -rf .venv, and call again"
  fi
  local constraints=requirements/constraints-py311.txt
  ! $VENV/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))' ||
    constraints=requirements/constraints-py310.txt
  $VENV/bin/python -m pip install --disable-pip-version-check \
    -r requirements/dev.txt -c $constraints ||
    fail "pip failed, see above" "check the network to PyPI, then call again" \
      "if packages conflict with older ones in there: rm -rf .venv"
  install_development_links
  echo "$wanted" >$VENV_STAMP
}

# `import ikbo` and the command `ikbo` from the working tree: no build step stands between.
install_development_links() {
  local site
  site=$($VENV/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$PWD/python" >"$site/ikbo-dev.pth"
  printf '#!/bin/sh\nexec "%s" -m ikbo "$@"\n' "$PWD/$VENV/bin/python" >$VENV/bin/ikbo
  chmod +x $VENV/bin/ikbo
}

# build_preset NAME [CMAKE_OPTION...]
build_preset() {
  local preset=$1
  say "C++ build, preset $preset (build/$preset)"
  { cmake --preset "$preset" --log-level=NOTICE "${@:2}" && cmake --build --preset "$preset"; } ||
    fail "the C++ build failed, see the first error above" \
      "after a change of compiler or PyTorch: rm -rf build/$preset, and call again"
}

step_cpu() { build_preset cpu; }

step_cuda() {
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    # Operators and CUDA kernels; `import ikbo` prefers this library. The runtime is build/cpu's.
    build_preset sm90 -DIKBO_BUILD_RUNTIME=OFF
  else
    echo "CUDA kernels are not built: nvcc was not found"
  fi
}

step_sanitize() { build_preset sanitize; }

step_sanitize-thread() { build_preset sanitize-thread; }

step_sanitize-replay() { build_preset sanitize-replay; }

[ $# -gt 0 ] || set -- system venv cpu cuda
for step in "$@"; do
  case $step in
    system | venv | cpu | cuda | sanitize | sanitize-thread | sanitize-replay) "step_$step" ;;
    *) fail "unknown step '$step'" \
      "steps: system venv cpu cuda sanitize sanitize-thread sanitize-replay" ;;
  esac
done
