# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over the sources that the CPU build compiles, all cores at once."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpu"
# PyTorch's full C++ headers take clang-tidy minutes per file, and the tests' gtest macros hide more
# than the checks find there.
SKIPPED = (
    "src/runtime/executor_aoti.cpp",
    "src/runtime/executor_gpu.cpp",
    "src/runtime/gpu_staging.cpp",
    "src/runtime/cuda/",
    "tests/",
)


def compiled_sources() -> list[str]:
    """The project's own sources in the compilation database, relative to the root."""
    database = BUILD / "compile_commands.json"
    if not database.is_file():
        sys.exit(f"clang-tidy: {database.relative_to(ROOT)} is missing; run `make setup` first")
    names = {Path(entry["file"]) for entry in json.loads(database.read_text())}
    inside = sorted(str(name.relative_to(ROOT)) for name in names if name.is_relative_to(ROOT))
    return [name for name in inside if not name.startswith(("build/", *SKIPPED))]


def tidy(name: str) -> tuple[str, int, str]:
    command = [
        str(Path(sys.executable).parent / "clang-tidy"),
        "--quiet",
        "-p",
        str(BUILD),
        "--extra-arg=-Wno-unknown-warning-option",
        "--extra-arg=-Wno-deprecated-declarations",  # the standard library's own templates
        name,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return name, done.returncode, done.stdout + (done.stderr if done.returncode else "")


def main() -> int:
    names = compiled_sources()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, status, text in pool.map(tidy, names):
            if status:
                failed += 1
                print(f"{name}:\n{text}")
    print(f"clang-tidy: {len(names)} files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
