# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of build/sm90 compile for all their architectures, without spills or warnings;
and the tools that see to it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BUILD = REPO / "build" / "sm90"
LAUNCHER = REPO / "cmake" / "keep_ptxas.sh"

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_80'
ptxas info    : Function properties for _Z4copyPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 1 barriers, 4096 bytes smem, 368 bytes cmem[0]
ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_100'
ptxas info    : Function properties for _Z4copyPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
SPILLING = CLEAN.replace(
    "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
    "24 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads",
    1,
)
HARMLESS = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 12 by compiler\n"
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to non wgmma instructions in function '_Z4copyPf'\n"
)
WARNING = "ptxas warning : Value of threads per SM for entry _Z4copyPf is out of range\n"


def write_build(folder: Path, logs: dict[str, str | None]) -> None:
    """A build folder with one object for each log; None: an object that was not built."""
    commands = []
    for name, log in logs.items():
        source = REPO / "src" / "kernels" / name
        archs = "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_100,code=[sm_100]"
        command = f"nvcc {archs} -c {source} -o {name}.o"
        commands.append({"file": str(source), "command": command})
        if log is not None:
            (folder / f"{name}.o.ptxas").write_text(log)
    test = {"file": str(REPO / "tests/device/a.cu"), "command": "nvcc -c a.cu -o a.o"}
    (folder / "compile_commands.json").write_text(json.dumps([*commands, test]))


def check(build: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPO / "tools" / "check_ptxas.py", build],
        capture_output=True,
        text=True,
        check=False,
    )


def test_clean_output_passes_and_fills_the_table(tmp_path: Path) -> None:
    write_build(tmp_path, {"a.cu": CLEAN + HARMLESS, "b.cu": CLEAN.replace("4copy", "4move")})
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (
        0, "ptxas: 4 kernels without spills or warnings\n"
    ), done.stderr  # fmt: skip
    lines = (tmp_path / "kernels.txt").read_text().splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["copy", "sm_100", "40", "0", "0", "0"],
        ["copy", "sm_80", "34", "4096", "0", "0"],
    ]


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (SPILLING, "_Z4copyPf spills 48 bytes on sm_80"),
        (CLEAN + SERIALISED, "(C7510) Potential Performance Loss"),
        (CLEAN + SERIALISED.replace("C7510", "C7515"), "(C7515) Potential Performance Loss"),
        (CLEAN + WARNING, "ptxas warning"),
        (None, "not compiled"),
        (CLEAN.replace("sm_100", "sm_80"), "not compiled for sm_100"),
    ],
    ids=["spill", "serialised", "wgmma apart", "warning", "not built", "one architecture"],
)
def test_one_bad_file_fails_and_is_named(tmp_path: Path, log: str | None, complaint: str) -> None:
    write_build(tmp_path, {"a.cu": CLEAN, "b.cu": log})
    done = check(tmp_path)
    assert done.returncode == 1
    assert "b.cu" in done.stdout
    assert complaint in done.stdout
    assert "a.cu" not in done.stdout


def fake_compiler(folder: Path, status: int) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{CLEAN}warning #1: look\nEND\nexit {status}\n")
    path.chmod(0o755)
    return path


def test_launcher_keeps_the_output_of_ptxas_and_passes_on_the_rest(tmp_path: Path) -> None:
    command = [LAUNCHER, fake_compiler(tmp_path, 0), "-c", "a.cu", "-o", tmp_path / "a.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "warning #1: look\n")
    assert CLEAN in (tmp_path / "a.o.ptxas").read_text()


def test_launcher_forgets_the_kernels_of_a_failed_compile(tmp_path: Path) -> None:
    (tmp_path / "a.o.ptxas").write_text(CLEAN)
    command = [LAUNCHER, fake_compiler(tmp_path, 3), "-c", "a.cu", "-o", tmp_path / "a.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert not (tmp_path / "a.o.ptxas").exists()


@pytest.mark.skipif(
    shutil.which("nvcc", path="/usr/local/cuda/bin:" + (os.environ["PATH"])) is None,
    reason="nvcc was not found: the CUDA kernels are not compiled here",
)
def test_kernels_of_this_build_are_clean() -> None:
    assert BUILD.is_dir(), "make setup builds the CUDA kernels where nvcc is found"
    done = check(BUILD)
    assert done.returncode == 0, done.stdout + done.stderr
