# SPDX-License-Identifier: Apache-2.0
"""The kernels install without PyTorch, and the C++ example builds against what was installed.

The example runs on a machine with a GPU: `make test-gpu`.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BUILD = REPO / "build" / "sm90"

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc", path=f"/usr/local/cuda/bin:{os.environ['PATH']}") is None,
    reason="nvcc was not found: the CUDA kernels are not compiled here",
)


def succeed(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    for component in ("core", "kernels"):
        succeed("cmake", "--install", BUILD, "--prefix", folder, "--component", component)
    return folder


def test_nothing_of_pytorch_is_installed_with_the_kernels(prefix: Path) -> None:
    files = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    assert "lib/libikbo_kernels.a" in files
    assert "include/ikbo/lce.h" in files
    assert not [name for name in files if "torch" in name or "ikbo_ops" in name]


def test_example_builds_against_the_installed_kernels(prefix: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    succeed("cmake", "-G", "Ninja", "-S", REPO / "examples" / "cpp", "-B", build,
            f"-DCMAKE_PREFIX_PATH={prefix}")  # fmt: skip
    succeed("cmake", "--build", build)
    needed = succeed("readelf", "-d", build / "lce_example")
    assert "torch" not in needed
