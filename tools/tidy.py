# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over the sources that the CPU build compiles, all cores at once.

A file that was clean is not looked at again as long as nothing of it changes: its preprocessed text
with comments, the checks and clang-tidy itself. ~/.cache/ikbo-tidy remembers.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpu"
CLANG_TIDY = Path(sys.executable).parent / "clang-tidy"
CLEAN = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikbo-tidy"
REMEMBERED_SECONDS = 30 * 24 * 3600
# PyTorch's full C++ headers take clang-tidy minutes per file, and the tests' gtest macros hide more
# than the checks find there.
SKIPPED = (
    "src/runtime/executor_aoti.cpp",
    "src/runtime/executor_gpu.cpp",
    "src/runtime/gpu_staging.cpp",
    "src/runtime/cuda/",
    "tests/",
)


def compile_commands() -> dict[str, str]:
    """The project's own sources in the compilation database, relative to the root."""
    database = BUILD / "compile_commands.json"
    if not database.is_file():
        sys.exit(f"clang-tidy: {database.relative_to(ROOT)} is missing; run `make setup` first")
    commands = {Path(e["file"]): e["command"] for e in json.loads(database.read_text())}
    inside = {str(p.relative_to(ROOT)): c for p, c in commands.items() if p.is_relative_to(ROOT)}
    return {n: c for n, c in sorted(inside.items()) if not n.startswith(("build/", *SKIPPED))}


def state_of(name: str, command: str, checks: bytes) -> str:
    """Of all that clang-tidy's findings depend on; of this folder's own path they do not."""
    words = shlex.split(command)
    words[words.index("-o") : words.index("-o") + 2] = ["-E", "-P", "-CC", "-o", "-"]
    done = subprocess.run(words, cwd=BUILD, capture_output=True, check=False)
    text = " ".join(words).encode() + b"\0" + done.stdout
    return hashlib.sha256(
        checks + text.replace(str(ROOT).encode(), b"") + name.encode()
    ).hexdigest()


def tidy(name: str, compiled_by: str, checks: bytes) -> tuple[str, int, str]:
    clean = CLEAN / state_of(name, compiled_by, checks)
    if clean.exists():
        clean.touch()
        return name, 0, ""
    command = [
        str(CLANG_TIDY),
        "--quiet",
        "-p",
        str(BUILD),
        "--extra-arg=-Wno-unknown-warning-option",
        "--extra-arg=-Wno-deprecated-declarations",  # the standard library's own templates
        name,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.returncode:
        clean.touch()
    return name, done.returncode, done.stdout + (done.stderr if done.returncode else "")


def main() -> int:
    commands = compile_commands()
    version = subprocess.run([str(CLANG_TIDY), "--version"], capture_output=True, check=True)
    checks = version.stdout + (ROOT / ".clang-tidy").read_bytes() + Path(__file__).read_bytes()
    CLEAN.mkdir(parents=True, exist_ok=True)
    for old in CLEAN.iterdir():
        if time.time() - old.stat().st_mtime > REMEMBERED_SECONDS:
            old.unlink()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(tidy, name, command, checks) for name, command in commands.items()]
        for name, status, text in (job.result() for job in jobs):
            if status:
                failed += 1
                print(f"{name}:\n{text}")
    print(f"clang-tidy: {len(commands)} files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
