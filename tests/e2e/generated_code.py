# SPDX-License-Identifier: Apache-2.0
"""Reads the code that Inductor generated for a package: what runs per user, what per candidate."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ikbo._archive import read_manifest

_FUNCTION = re.compile(
    r'^extern "C"\s+void\s+(?P<name>cpp_fused\w*)\((?P<parameters>[^)]*)\)\n\{', re.M
)
_TRITON = re.compile(
    r"void call_(?P<name>triton_\w+)\(.*?@triton\.jit(?P<code>.*?)\'\'\', device_str", re.DOTALL
)
_LOOP = re.compile(r"\bfor\s*\(int64_t \w+=[^;]*; \w+<(?P<bound>[^;]*);")
_INPUT = re.compile(r"auto (?P<name>\w+) = std::move\(inputs\[(?P<position>\d+)\]\);")
_BATCH = re.compile(r"int64_t (?P<symbol>\w+) = (?P<input>\w+)_size\[0\];")


@dataclass(frozen=True)
class GeneratedCode:
    """The code inside loops, or in kernels launched, over U and over B."""

    user: str
    candidate: str


def read_code(package: Path) -> GeneratedCode:
    with zipfile.ZipFile(package) as archive:

        def source(suffix: str) -> str:
            names = [name for name in archive.namelist() if name.endswith(suffix)]
            return "\n".join(archive.read(name).decode() for name in names)

        kernels, wrapper = source(".kernel.cpp"), source(".wrapper.cpp")
    run = wrapper.rindex("::run_impl(")
    calls = wrapper[run:]
    batches = _batches(package, calls)
    inside: dict[str, list[str]] = {"U": [], "B": []}
    pieces = [*_cpp_lines(kernels, calls, batches), *_triton_kernels(wrapper[:run], calls, batches)]
    for text, letters in pieces:
        for letter in letters:
            inside[letter].append(text)
    return GeneratedCode("\n".join(inside["U"]), "\n".join(inside["B"]))


def _cpp_lines(kernels: str, calls: str, batches: dict[str, str]) -> Iterator[tuple[str, set[str]]]:
    """Each line of the C++ kernels with the batches of the loops around it."""
    for function in _FUNCTION.finditer(kernels):
        body = kernels[function.end() : kernels.index("\n}", function.end())]
        sizes = _sizes(function["name"], function["parameters"], calls, batches)
        yield from _lines(body, sizes)


def _triton_kernels(
    wrapper: str, calls: str, batches: dict[str, str]
) -> Iterator[tuple[str, set[str]]]:
    """Each Triton kernel, which the wrapper quotes, with the batches of the sizes it runs over."""
    for kernel in _TRITON.finditer(wrapper):
        name = kernel["name"]
        for call in re.finditer(rf"\bcall_{name}\((?P<arguments>.*)\);", calls):
            size = re.search(rf"\b{name}_xnumel = (?P<value>[^;]*);", calls[: call.start()])
            words = re.findall(r"\w+", call["arguments"] + " " + (size["value"] if size else ""))
            yield kernel["code"], {batches[word] for word in words if word in batches}


def _batches(package: Path, calls: str) -> dict[str, str]:
    """Size variable of the wrapper to U or B, by the role of the input whose batch it is."""
    roles = [spec.role for spec in read_manifest(package).inputs]
    positions = {match["name"]: int(match["position"]) for match in _INPUT.finditer(calls)}
    batches = {
        match["symbol"]: "U" if roles[positions[match["input"]]] == "user" else "B"
        for match in _BATCH.finditer(calls)
    }
    assert set(batches.values()) == {"U", "B"}, f"{package}: batch sizes not found; got {batches}"
    return batches


def _sizes(name: str, parameters: str, calls: str, batches: dict[str, str]) -> dict[str, str]:
    """Size parameter of a kernel to U or B, from the call of it."""
    call = re.search(rf"\b{name}\((?P<arguments>.*)\);", calls)
    assert call is not None, f"{name} is never called"
    arguments = call["arguments"].split(", ")
    names = [parameter.split()[-1] for parameter in parameters.split(",")]
    assert len(arguments) == len(names), f"{name}: {arguments} against {names}"
    return {
        parameter: batches[argument]
        for parameter, argument in zip(names, arguments, strict=True)
        if argument in batches
    }


def _lines(body: str, sizes: dict[str, str]) -> Iterator[tuple[str, set[str]]]:
    """Each line of a function with the batches of the loops around it."""
    loops: list[tuple[int, set[str]]] = []
    depth = 0
    pending: set[str] | None = None
    for line in body.splitlines():
        loop = _LOOP.search(line)
        if loop is not None:
            words = re.findall(r"\w+", loop["bound"])
            pending = {sizes[word] for word in words if word in sizes}
        for brace in re.findall(r"[{}]", line):
            if brace == "{":
                if pending is not None:
                    loops.append((depth, pending))
                    pending = None
                depth += 1
            else:
                depth -= 1
                if loops and loops[-1][0] == depth:
                    loops.pop()
        yield line, set().union(*(letters for _, letters in loops))
