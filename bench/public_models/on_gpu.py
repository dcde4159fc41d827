# SPDX-License-Identifier: Apache-2.0
"""Some of the public models on a GPU: transformed against unmodified, eager and as packages.

Everything here runs on the CPU too, where tests try it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import ikbo
from bench.public_models import deepctr, rechub, torchrec
from bench.public_models.case import Case
from bench.public_models.measure import (
    EXAMPLE_ROWS,
    Request,
    compared,
    exported,
    package_unmodified,
    transformed,
)
from ikbo.testing import bench, bench_cuda
from ikbo.transform import TransformedModule
from ikbo.transform.capture import Captured, capture
from ikbo.transform.verify import in_fp64

MODELS = (
    "deepctr_torch.DeepFM",
    "deepctr_torch.xDeepFM",
    "torch_rechub.DIN",
    "deepctr_torch.MMOE",
    "torch_rechub.DCNv2 (one matrix per layer)",
    "torchrec.DLRM",
)
FORMS = ("ours", "replicated")
# Each compares the two forms.
WAYS = ("eager", "package", "replayed")
# Of a process that builds a package.
THREADS = 2

Contestant = Callable[[], Any] | str  # a string says why it does not run
Package = Callable[..., Any] | str


def cases() -> list[Case]:
    """The named models."""
    known = {c.name: c for c in (*deepctr.cases(), *rechub.cases(), *torchrec.cases())}
    return [known[name] for name in MODELS]


@dataclass(frozen=True)
class Prepared:
    """A model on a device with what becomes of it."""

    model: nn.Module
    program: ExportedProgram
    captured: Captured
    ours: TransformedModule

    @classmethod
    def of(cls, case: Case, device: str) -> Prepared:
        # PyTorch would let convolutions on a GPU, and nothing else, round their operands to TF32.
        torch.backends.cudnn.allow_tf32 = False
        inputs = pytree.tree_map_only(Tensor, lambda x: x.to(device), case.rows(EXAMPLE_ROWS))
        program = exported(case.make().to(device), inputs)
        captured = capture(program, inputs, list(case.request_only))
        # The export leaves its own tensors in attributes that some models set when they run.
        return cls(case.make().to(device), program, captured, transformed(case, program, inputs))


def build(name: str, form: str, device: str, path: Path) -> None:
    """Writes the package of a named model, in a process of its own."""
    torch.set_num_threads(THREADS)
    case = next(case for case in cases() if case.name == name)
    write_package(Prepared.of(case, device), form, path)


def write_package(prepared: Prepared, form: str, path: Path) -> None:
    """Writes a package, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    if form == "ours":
        ikbo.package(prepared.ours, draft, both_forms="measured")
    else:
        package_unmodified(prepared.program, prepared.captured.device.type, draft)
    draft.replace(path)


class Builds:
    """Jobs in processes of their own, begun at once: one that dies takes no other with it.

    Args:
        jobs: a name to a call that can be pickled.
        workers: processes at a time.
    """

    def __init__(self, jobs: Mapping[Hashable, Callable[[], Any]], workers: int) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._jobs = {name: self._pool.submit(_run, name, job) for name, job in jobs.items()}

    def reasons(self) -> dict[Hashable, str]:
        """Waits for all; the name of each that failed to its reason."""
        with self._pool:
            found = {name: job.result() for name, job in self._jobs.items()}
        return {name: reason for name, reason in found.items() if reason is not None}


def _run(name: Hashable, job: Callable[[], Any]) -> str | None:
    """Runs a job; why it failed, which its process has printed in full."""
    begin = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(target=job)
    process.start()
    process.join()
    state = "failed" if process.exitcode else "built"
    print(f"{name}: {state} after {time.monotonic() - begin:.0f} s", flush=True)
    return f"its process ended with exit code {process.exitcode}" if process.exitcode else None


def loaded(path: Path) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path), run_single_threaded=True)


def row_of(
    case: Case,
    prepared: Prepared,
    packages: Mapping[str, Package],
    sizes: tuple[int, int],
    ratio: int,
) -> dict[str, Any]:
    """The row of a model at a ratio.

    Args:
        packages: the packages of both forms, or why one could not be built.
        sizes: users and candidates.
    """
    request = Request.of(prepared.captured, *sizes)
    args, kwargs = request.replicated
    found, max_error = checked(contestants_of(prepared, packages, request), args, kwargs, prepared)
    times = times_of(found, prepared.captured.device.type)
    eager = times["eager"]
    row = {
        "case": {
            "library": case.library,
            "model": case.model,
            "ratio": ratio,
            "U": sizes[0],
            "B": sizes[1],
            "dtype": "float32",
        },
        "unit": "ms",
        "ours": eager["ours"],
        "peers": {"replicated": eager["replicated"]},
        **{way: times[way] for way in WAYS if way != "eager" and way in times},
        "max_error": max_error,
    }
    return row | {"speedup": speedups(times)}


def contestants_of(
    prepared: Prepared, packages: Mapping[str, Package], request: Request
) -> dict[tuple[str, str], Contestant]:
    """(way, form) to the call on a request."""
    modules = {"eager": {"ours": prepared.ours, "replicated": prepared.model}, "package": packages}
    args, kwargs = request.ours
    # A package of ours takes flat inputs.
    ours = {"eager": (args, kwargs), "package": (tuple(pytree.tree_leaves(request.ours)), {})}
    made: dict[tuple[str, str], Contestant] = {}
    for way, forms in modules.items():
        for form in FORMS:
            call = forms[form]
            args, kwargs = ours[way] if form == "ours" else request.replicated
            made[way, form] = (
                call if isinstance(call, str) else functools.partial(call, *args, **kwargs)
            )
    return made


def checked(
    contestants: Mapping[tuple[str, str], Contestant],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prepared: Prepared,
) -> tuple[dict[tuple[str, str], Contestant], float]:
    """Runs each once against the unmodified model in fp64; what fails or is wrong says so.

    Args:
        args, kwargs: of the unmodified model.

    Returns:
        The contestants, and the largest error of ours.
    """
    result, max_error = dict(contestants), 0.0
    with torch.no_grad():
        exact = pytree.tree_leaves(in_fp64(prepared.model)(args, kwargs))
        theirs = pytree.tree_leaves(prepared.model(*args, **kwargs))
    for name, call in contestants.items():
        if isinstance(call, str):
            continue
        try:
            with torch.inference_mode():
                error, is_close = compared(pytree.tree_leaves(call()), theirs, exact)
        except Exception as problem:  # one that cannot run this size says why
            result[name] = bench_cuda.reason_of(problem)
            continue
        if not is_close:
            result[name] = f"wrong result: error {error:.3g}"
        if "ours" in name:
            max_error = max(max_error, error)
    return result, max_error


def times_of(
    contestants: Mapping[tuple[str, str], Contestant], device: str
) -> dict[str, dict[str, float | str]]:
    """Milliseconds by way and form, all in turn; as CUDA graphs too, the packages."""
    named = {" ".join(name): call for name, call in contestants.items()}
    if device == "cuda":
        times = bench_cuda.timed(named)
        packages = {name: call for name, call in named.items() if name.startswith("package")}
        replays = bench_cuda.timed(bench_cuda.replayed(packages))
        times |= {name.replace("package", "replayed"): ms for name, ms in replays.items()}
    else:
        running = {name: call for name, call in named.items() if not isinstance(call, str)}
        reasons = {name: call for name, call in named.items() if isinstance(call, str)}
        with torch.inference_mode():  # as bench_cuda does
            times = reasons | bench.interleaved(running, rounds=3)
    found: dict[str, dict[str, float | str]] = {}
    for name, ms in times.items():
        way, form = name.split()
        found.setdefault(way, {})[form] = ms
    return found


def speedups(times: Mapping[str, Mapping[str, float | str]]) -> dict[str, float]:
    """How many times faster ours is than the unmodified model, by way, where both run."""
    found = {}
    for way, forms in times.items():
        ours, replicated = forms["ours"], forms["replicated"]
        if not isinstance(ours, str) and not isinstance(replicated, str):
            found[way] = replicated / ours
    return found


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of ours could not be run, or was wrong, and where."""
    texts = []
    for row in rows:
        tried = {"eager": row["ours"], "package": row["package"]["ours"]}
        name = f"{row['case']['library']}.{row['case']['model']} at ratio {row['case']['ratio']}"
        texts += [f"{name}, {way}: {t}" for way, t in tried.items() if isinstance(t, str)]
    return texts


def run(
    known: Sequence[Case],
    jobs: Mapping[tuple[str, str], Path],
    device: str,
    sizes: Mapping[int, tuple[int, int]],
    *,
    workers: int,
    add: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Builds the packages that are missing, measures every case at every ratio.

    Args:
        jobs: (case, form) to the package.
        sizes: ratio to users and candidates.
        add: takes each row.

    Returns:
        Models that could not be transformed, and `failures`.
    """
    missing = {
        name: functools.partial(build, *name, device, path)
        for name, path in jobs.items()
        if not path.exists()
    }
    builds = Builds(missing, workers)
    prepared, rows, failed = {}, [], []
    for case in known:
        try:
            prepared[case.name] = Prepared.of(case, device)
        except Exception as problem:  # the others are measured
            failed.append(f"{case.name}: {bench_cuda.reason_of(problem)}")
    print(f"{len(prepared)} models transformed", flush=True)
    reasons = builds.reasons()
    for case in known:
        if case.name not in prepared:
            continue
        packages = {
            form: reasons.get((case.name, form)) or loaded(jobs[case.name, form]) for form in FORMS
        }
        for ratio, pair in sizes.items():
            rows.append(row_of(case, prepared[case.name], packages, pair, ratio))
            add(rows[-1])
            print(line_of(rows[-1]), flush=True)
    return failed + failures(rows)


def line_of(row: Mapping[str, Any]) -> str:
    shown = {"eager": {"ours": row["ours"], **row["peers"]}}
    shown |= {way: row[way] for way in WAYS if way in row}
    parts = [f"{row['case']['library']}.{row['case']['model']} ratio {row['case']['ratio']}:"]
    for way, forms in shown.items():
        speedup = f" ({row['speedup'][way]:.2f}x)" if way in row["speedup"] else ""
        times = [f"{t:.4g}" if not isinstance(t, str) else t for t in forms.values()]
        parts.append(f"{way} {' over '.join(reversed(times))} ms{speedup}")
    return " ".join(parts)
