# SPDX-License-Identifier: Apache-2.0
"""The files that the figures of a GPU benchmark depend on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ikbo.testing import bench

# What the files of an operator include for other devices and for debugging.
NEVER_TIMED = (
    "src/cpu/",
    "src/kernels/host/index_check.cu",
    "src/torch_ops/attention_cpu",
    "src/torch_ops/composite",
)
# Of every GPU benchmark.
TIMING = ("python/ikbo/testing/bench_cuda.py", "python/ikbo/testing/cost.py")

_INCLUDE = re.compile(r'^ *#include "([^"]+)"', re.MULTILINE)


def cuda_sources(
    op: str, *others: str, kernels: Sequence[str] = ("**/*",), without: Sequence[str] = ()
) -> list[str]:
    """Globs and files for ``write_results``: all that a call of an operator on a GPU runs through.

    Kernels, their selection and launch, the operator's C++ and Python, and what those include.

    Args:
        op: its name.
        others: globs of what else the figures depend on: the benchmark, its peers.
        kernels: which files of ``src/kernels/<op>`` run in the benchmark, as globs.
        without: beginnings of paths that the benchmark's calls do not run through.

    Errors:
        FileNotFoundError: a glob that matches nothing, an include that names no file.
    """
    roots = [f"src/kernels/{op}/{pattern}" for pattern in kernels]
    roots += [f"src/torch_ops/{op}.cpp", f"python/ikbo/_{op}.py", *others]
    return with_includes(roots, without)


def with_includes(roots: Iterable[str], without: Sequence[str] = ()) -> list[str]:
    """The globs ``roots``, and what their files include, directly or not, as files.

    A header brings the source that implements it along: the one beside it of the same name; of a
    public header, the one in ``src/kernels/host``.

    Args:
        roots: globs relative to the repository.
        without: beginnings of paths that are left out besides ``NEVER_TIMED``.
    """
    roots = list(roots)
    named = set(bench.source_files(roots))
    found = set(named)
    waiting = sorted(named)
    while waiting:
        for path in files_behind(waiting.pop()):
            if path not in found and not _name(path).startswith((*NEVER_TIMED, *without)):
                found.add(path)
                waiting.append(path)
    return sorted({*roots, *map(_name, found - named)})


def files_behind(path: Path) -> Iterator[Path]:
    """The headers of the repository that a C++ or CUDA file includes, and their implementations.

    Errors:
        FileNotFoundError: an include that names no file.
    """
    if path.suffix not in (".cpp", ".cu", ".cuh", ".h"):
        return
    for name in _INCLUDE.findall(path.read_text()):
        folders = (bench.REPOSITORY / "src", bench.REPOSITORY / "include")
        header = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if header is None:
            raise FileNotFoundError(f'{_name(path)}: #include "{name}" must name a file')
        yield header
        host = bench.REPOSITORY / "src" / "kernels" / "host" / header.name
        for source in (header, host) if folders[1] in header.parents else (header,):
            for suffix in (".cpp", ".cu"):
                if (implementation := source.with_suffix(suffix)).is_file():
                    yield implementation


def _name(path: Path) -> str:
    return path.relative_to(bench.REPOSITORY).as_posix()
