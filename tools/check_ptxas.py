# SPDX-License-Identifier: Apache-2.0
"""Checks what ptxas said of the CUDA kernels of a build: all architectures, no spills or warnings.

The build keeps ptxas' output beside each object (cmake/keep_ptxas.sh). Writes a table of registers,
shared memory and spills of every kernel to BUILD/kernels.txt. usage: tools/check_ptxas.py BUILD
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# setmaxnreg ignored; wgmma serialised, for one of several reasons.
LOSSES = ("C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515", "C7602")

COMPILING = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>sm_\w+)'")
SPILLS = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers")
SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
ASKED_FOR = re.compile(r"\bsm_\w+")  # in the compile command


@dataclass
class Kernel:
    """What ptxas said of one kernel on one architecture; sizes in bytes."""

    name: str
    arch: str
    registers: int = 0
    shared: int = 0  # static
    stack: int = 0
    spills: int = 0  # stores and loads


def parse(text: str) -> tuple[list[Kernel], list[str]]:
    """The kernels, and the lines that tell of lost performance or warn."""
    kernels: list[Kernel] = []
    complaints = []
    for line in text.splitlines():
        if match := COMPILING.search(line):
            kernels.append(Kernel(match["name"], match["arch"]))
        elif match := SPILLS.search(line):
            kernels[-1].stack = int(match["stack"])
            kernels[-1].spills = int(match["stores"]) + int(match["loads"])
        elif match := USED.search(line):
            kernels[-1].registers = int(match["registers"])
            if shared := SHARED.search(line):
                kernels[-1].shared = int(shared["bytes"])
        if line.startswith("ptxas warning") or any(f"({code})" in line for code in LOSSES):
            complaints.append(line)
    return kernels, complaints


def cuda_objects(build: Path) -> list[tuple[Path, Path, set[str]]]:
    """Source, object and architectures of the kernels that the build compiles."""
    kernels = Path(__file__).resolve().parent.parent / "src" / "kernels"
    objects = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.suffix == ".cu" and kernels in source.parents:
            command = shlex.split(entry["command"])
            options = " ".join(option for option in command if option.startswith("-gencode"))
            archs = set(ASKED_FOR.findall(options))
            objects.append((source, build / command[command.index("-o") + 1], archs))
    return sorted(objects)


def demangled(names: list[str]) -> list[str]:
    """The names as C++ spells them, without parameters and namespaces."""
    text = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [re.sub(r"\w+::|\(anonymous namespace\)::", "", line) for line in text.splitlines()]


def table(kernels: list[Kernel]) -> str:
    """One line a kernel and architecture, by name."""
    names = demangled([kernel.name for kernel in kernels])
    rows = sorted(
        (name, k.arch, k.registers, k.shared, k.stack, k.spills)
        for name, k in zip(names, kernels, strict=True)
    )
    head = ("kernel", "arch", "registers", "static smem", "stack", "spills")
    width = max(len(name) for name, *_ in [head, *rows])
    return "\n".join(
        f"{name:{width}}  {arch:8} {registers:>9} {shared:>11} {stack:>5} {spills:>6}"
        for name, arch, registers, shared, stack, spills in [head, *rows]
    )


def check(build: Path) -> tuple[list[Kernel], list[str]]:
    """Every kernel of the build, and what is wrong, one line each."""
    kernels: list[Kernel] = []
    violations = []
    for source, obj, archs in cuda_objects(build):
        log = obj.with_name(f"{obj.name}.ptxas")
        if not log.is_file():
            violations.append(f"{source}: not compiled in {build}: no {log.name}; build it first")
            continue
        found, complaints = parse(log.read_text())
        kernels += found
        if found and (missing := sorted(archs - {kernel.arch for kernel in found})):
            violations.append(f"{source}: not compiled for {', '.join(missing)}; build it again")
        violations += [f"{source}: {line}" for line in complaints]
        violations += [
            f"{source}: {kernel.name} spills {kernel.spills} bytes on {kernel.arch}"
            for kernel in found
            if kernel.spills
        ]
    return kernels, violations


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    kernels, violations = check(build)
    if kernels:
        (build / "kernels.txt").write_text(table(kernels) + "\n")
    print("\n".join(violations) or f"ptxas: {len(kernels)} kernels without spills or warnings")
    return 1 if violations or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
