# SPDX-License-Identifier: Apache-2.0
"""`tools/gpu_serve.sh`: its archive is all that a machine with PyTorch alone lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).resolve().parents[1]
TORCH_LIBRARIES = SITE / "torch" / "lib"
# Of the C and C++ run-time, which are the machine's own.
RUN_TIME = {
    f"lib{name}.so"
    for name in ("c", "m", "dl", "rt", "pthread", "resolv", "util", "stdc++", "gcc_s")
}
ABSENT = ("tritonclient", "pandas", "matplotlib", "torchrec", "kserve", "ray")


def gpu_serve(archive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(REPO / "tools/gpu_serve.sh"), *arguments],
        env=os.environ | {"ARCHIVE": str(archive)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the operators of the `cpu` preset: those with CUDA kernels need nvcc."""
    path = tmp_path_factory.mktemp("gpu") / "packed.tgz"
    done = gpu_serve(path, "pack", "build/cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{path}: ")
    return path


def alone(folder: Path, *command: str) -> str:
    """What a command prints that has PyTorch and the folder, and no library path besides."""
    path = f"{folder / 'lib'}:{TORCH_LIBRARIES}"
    done = subprocess.run(
        command, env={"LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_archive_holds_every_library(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path)
    found = 0
    for file in [*(tmp_path / "bin").iterdir(), *(tmp_path / "lib").iterdir()]:
        for line in alone(tmp_path, "/usr/bin/ldd", str(file)).splitlines():
            if "=>" not in line:
                continue
            name, path = line.split()[0], Path(line.split()[2])
            if name.partition(".so")[0] + ".so" in RUN_TIME:
                continue
            found += 1
            own = path.is_relative_to(tmp_path)
            assert own or path.resolve().is_relative_to(SITE), f"{file.name}: {line.strip()}"
    assert found > 0
    assert "ikbo-server" in alone(tmp_path, str(tmp_path / "bin/ikbo-server"), "--help")
    assert "ikbo-load" in alone(tmp_path, str(tmp_path / "bin/ikbo-load"), "--help")


def test_run_starts_the_benchmark_with_what_was_unpacked(archive: Path) -> None:
    done = gpu_serve(archive, "run", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python -m bench.bench_serve")
    assert (archive.with_suffix("") / "bin/ikbo-server").is_file()


def test_the_benchmark_needs_no_package_that_a_gpu_machine_lacks() -> None:
    refusal = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"
    modules = "bench.bench_serve, bench.serve.late_ranking, bench.serve.graphs"
    done = subprocess.run(
        [sys.executable, "-c", f"{refusal}; import {modules}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_says_what_is_missing(tmp_path: Path) -> None:
    for arguments, part in (
        (["pack", "build/absent"], "build/absent/lib/libikbo_ops.so must be built"),
        (["run"], "packed.tgz must be here"),
        ([], "pack or run must be named; got ''"),
    ):
        done = gpu_serve(tmp_path / "packed.tgz", *arguments)
        assert done.returncode == 1
        assert part in done.stderr, done.stderr
