# SPDX-License-Identifier: Apache-2.0
"""Timers, limits, checks and options of the GPU benchmarks.

All that is timed runs in inference mode, as in serving: outside of it PyTorch goes through the
operators' autograd kernels, which are Python and take the host's time at each call.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ikbo.testing.cost import Cost

FLUSH_BYTES = 256 * 1024 * 1024  # several times the L2 of an H200 (50 MB)
FLUSH_MS = 0.08  # what writing them takes

Call = Callable[[], torch.Tensor]
Contestant = Call | str  # a string says why it does not run
Case = TypeVar("Case")


@torch.inference_mode()
def interleaved_cuda(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int = 60,
    warmup: int = 5,
    *,
    min_rounds: int = 15,
    seconds: float = 1.0,
) -> dict[str, float]:
    """Median time of each contestant on the current stream, in milliseconds, with a cold L2.

    One round runs each contestant once, in turn, so that clocks and power, which change within
    milliseconds, are the same for all. A write of ``FLUSH_BYTES`` before each run clears the L2.
    The time is from event to event: it holds the launch gaps between a contestant's own kernels.

    Args:
        contestants: name to a call that launches its work.
        rounds: rounds that count.
        warmup: rounds before them.
        min_rounds: runs of a contestant at least.
        seconds: for all rounds. A contestant that would take more than its share of it runs in
            some of the rounds only, evenly spread.

    Errors:
        RuntimeError: what a contestant raises, with its name.
    """
    if not contestants:
        return {}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def run(name: str) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        flush.zero_()
        begin.record()
        try:
            contestants[name]()
        except Exception as problem:
            raise RuntimeError(f"{name}: {reason_of(problem)}") from problem
        end.record()
        return begin, end

    warm = [{name: run(name) for name in contestants} for _ in range(warmup)]
    torch.cuda.synchronize()
    share = seconds * 1e3 / len(contestants)
    runs = {}
    for name in contestants:
        estimate = min((w[name][0].elapsed_time(w[name][1]) for w in warm), default=0.0)
        runs[name] = min(rounds, max(min_rounds, int(share / (estimate + FLUSH_MS))))
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in contestants
    }
    for number in range(rounds):
        for name in contestants:
            if (number + 1) * runs[name] // rounds > number * runs[name] // rounds:
                events[name].append(run(name))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in events.items()
    }


def reason_of(problem: BaseException) -> str:
    """An exception as a row of a result file quotes it."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:100] if lines else ''}"


def without_oversized(
    contestants: Mapping[str, Contestant], needed_bytes: Mapping[str, int]
) -> dict[str, Contestant]:
    """Those that ``needed_bytes`` knows to need more memory than is free do not run."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] - FLUSH_BYTES
    kept = dict(contestants)
    for name, needed in needed_bytes.items():
        if name in kept and needed > free:
            kept[name] = f"needs {needed / 1e9:.3g} GB; {free / 1e9:.3g} GB are free"
    return kept


@torch.inference_mode()
def checked(
    contestants: Mapping[str, Contestant],
    reference: torch.Tensor,
    select: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
    *,
    tolerance: float = 2e-2,
    unchecked: Sequence[str] = (),
) -> dict[str, Contestant]:
    """Runs each once. One that fails or is wrong becomes the reason.

    Args:
        contestants: to be run, each with the memory of the one before freed.
        reference: in fp32.
        select: what of an output the reference holds.
        tolerance: of the error's norm, relative to the reference's.
        unchecked: names of those that do less than the operator.
    """
    scale = reference.norm()
    result = dict(contestants)
    for name, call in contestants.items():
        if isinstance(call, str):
            continue
        try:
            out = select(call())
            error = (
                ((out.float() - reference).norm() / scale).item() if name not in unchecked else 0
            )
            if not error < tolerance:
                result[name] = f"wrong result: relative error {error:.3g}"
            del out
        except Exception as problem:  # one that cannot run this shape says why
            result[name] = reason_of(problem)
        torch.cuda.empty_cache()
    return result


def timed(
    contestants: Mapping[str, Callable[[], object] | str], **options: Any
) -> dict[str, float | str]:
    """``interleaved_cuda`` of those that run; the others keep their reason."""
    runnable = {name: call for name, call in contestants.items() if not isinstance(call, str)}
    reasons = {name: call for name, call in contestants.items() if isinstance(call, str)}
    while True:
        try:
            times = interleaved_cuda(runnable, **options)
            break
        except RuntimeError as problem:
            name, _, reason = str(problem).partition(": ")
            if name not in runnable:
                raise
            reasons[name] = reason
            del runnable[name]
            torch.cuda.empty_cache()
    return {name: times[name] if name in times else reasons[name] for name in contestants}


@torch.inference_mode()
def replayed(contestants: Mapping[str, Contestant]) -> dict[str, Callable[[], object] | str]:
    """Each call's kernels as a CUDA graph; a call that cannot be captured becomes the reason."""
    replays: dict[str, Callable[[], object] | str] = {}
    for name, call in contestants.items():
        if isinstance(call, str):
            replays[name] = call
            continue
        try:
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # A capture that fails does not give the stream back.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                call()
            replays[name] = graph.replay
        except Exception as problem:
            replays[name] = reason_of(problem)
    return replays


def padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with zeros after it along ``dim``, to a multiple of 8; itself where it is one."""
    extra = -tensor.size(dim) % 8
    if extra == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = extra
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def sorted_index(num_candidates: int, ratio: int) -> torch.Tensor:
    """``cand_to_user`` with ``ratio`` neighbouring candidates a user; the last has the rest."""
    return (torch.arange(num_candidates, device="cuda") // ratio).int()


@dataclass(frozen=True)
class Limits:
    """What the device reaches in this run.

    bytes_per_ms            read and written by a copy of 2 GiB
    flops_per_ms            of a 8192^3 fp16 GEMM that alternates with that copy, so that the clock
                            is not the power cap's
    sustained_flops_per_ms  of the same GEMM in the second half of a second of nothing else: at the
                            power cap
    """

    bytes_per_ms: float
    flops_per_ms: float
    sustained_flops_per_ms: float

    def floor(self, cost: Cost, *, tensor_cores: bool = True) -> float:
        """Milliseconds: the larger of the bytes' and the FLOPs' time at the first two rates.

        Without tensor cores (fp32) that of the bytes.
        """
        flops = cost.flops if tensor_cores else 0
        return max(cost.unique_bytes / self.bytes_per_ms, flops / self.flops_per_ms)


def measured_limits() -> Limits:
    source = torch.randn(2**30, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    times = interleaved_cuda({"copy": lambda: target.copy_(source), "gemm": lambda: a @ b}, 30)
    halves = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    products = max(1, round(500 / times["gemm"]))  # of a half
    halves[0].record()
    for event in halves[1:]:
        for _ in range(products):
            torch.mm(a, b)
        event.record()
    torch.cuda.synchronize()
    flops = 2 * 8192**3
    return Limits(
        bytes_per_ms=2 * source.numel() * 2 / times["copy"],
        flops_per_ms=flops / times["gemm"],
        sustained_flops_per_ms=flops * products / halves[1].elapsed_time(halves[2]),
    )


def parser_of(doc: str, num_cases: int = 0) -> argparse.ArgumentParser:
    """The options that every GPU benchmark has; the first line of ``doc`` says what it does.

    With ``num_cases``, also those by which ``chosen`` picks some of as many cases, and ``--keep``.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the result file")
    if num_cases > 0:
        number = functools.partial(parser.add_argument, type=int)
        number("--first", default=0, help="number of the first case to run")
        number("--count", default=num_cases, help="cases to run")
        parser.add_argument("--keep", action="store_true", help="keep the file's rows of others")
    return parser


def chosen(args: argparse.Namespace, cases: Sequence[Case]) -> list[tuple[int, Case]]:
    """The cases to run, each with its number."""
    return list(enumerate(cases))[args.first : args.first + args.count]
