# SPDX-License-Identifier: Apache-2.0
"""Both forms of a model as compiled programs, timed in turn on the device that they are for.

Sizes are looked at in rows, one for each power of two of users: from one candidate per user on, in
steps of a factor of four, and finer around the break-even. What large sizes take is their
arithmetic and their traffic, whose ratio does not change any more; so a row ends where a run is
long and the transformed form gains, and rows end where the first run of the next would be long.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ikbo._served import ServedModel
from ikbo.transform.break_even import NOISE, Timing, crossing, slowdown_of

CALL, GRAPH = "call", "graph"

# For all sizes together, and for one of them at most. A size takes less where the answer is clear,
# down to this share.
_SECONDS, _SIZE_SECONDS = 20.0, 0.6
_LEAST = 0.05
# A run is long from here on, and too long to look at more candidates from ten times that on.
_LONG_MS = 20.0
_STEP, _FINE_STEP = 4, 1.5
# Sizes at which the choice between both forms is timed.
_SLOWEST = 3
# Rounds before the answer is looked at, again and again, and before any that counts.
_ROUNDS, _WARM_UP = 8, 4
# Where weights come to lie in memory decides some per cent of a program's time: copies of it take
# turns, where there is memory for them.
_COPIES, _SMALL_BYTES = 4, 512 << 20
# Written before each run on a GPU: several times the L2 of an H200 (50 MB).
_FLUSH_BYTES = 256 << 20
# Rounds that bring a GPU back to speed which waited.
_RUN_UP = 2

Run = Callable[[], object]
# The runs of both programs; what one call of each takes, in milliseconds, so many times.
Rounds = Callable[[int], Sequence[tuple[float, float]]]
# (users, candidates) to what was measured there.
Timer = Callable[[int, int], Sequence[Timing]]


def measured(timer: Timer, max_users: int, max_candidates: int) -> tuple[Timing, ...]:
    """Times the sizes that decide which form runs where.

    Returns:
        In order of users; the first has 1 user and 1 candidate.

    Cost:
        About 20 seconds at most, but for runs that take seconds.
    """
    end = time.monotonic() + _SECONDS
    found: list[Timing] = []
    users, is_last = 1, False
    while not is_last:
        row = _row(timer, users, max_candidates, end)
        found += itertools.chain(*row.values())
        first_ms = max(timing.replicated_ms for timing in row[users])
        is_last = users >= min(max_users, max_candidates)
        is_last |= 2 * first_ms > _LONG_MS or time.monotonic() > end
        users = min(2 * users, max_users, max_candidates)
    return tuple(found)


def _row(timer: Timer, users: int, limit: int, end: float) -> dict[int, Sequence[Timing]]:
    """Candidates, in order, to what was measured with so many users."""
    row = {users: timer(users, users)}
    candidates = users
    while candidates < limit and not _is_settled(row[candidates]) and time.monotonic() < end:
        candidates = min(_STEP * candidates, limit)
        try:
            row[candidates] = timer(users, candidates)
        except RuntimeError:  # users repeated so often may need more memory than there is
            break
    while time.monotonic() < end:
        pair = crossing({count: slowdown_of(found) for count, found in sorted(row.items())})
        if pair is None or pair[1] <= _FINE_STEP * pair[0]:
            break
        middle = round(math.sqrt(pair[0] * pair[1]))
        if middle in pair:
            break
        row[middle] = timer(users, middle)
    return row


def _is_settled(found: Sequence[Timing]) -> bool:
    """Whether more candidates would say nothing new, or take too long."""
    longest = max(timing.replicated_ms * max(1.0, timing.slowdown) for timing in found)
    is_gain = slowdown_of(found) < 1 - NOISE
    return longest > (_LONG_MS if is_gain else 10 * _LONG_MS)


def timed_again(timer: Timer, timings: Sequence[Timing]) -> list[float]:
    """The slowdowns at the sizes at which a choice between two forms matters most.

    These are the ones at which the transformed form is slowest, and the shortest run, in which the
    choice itself is the largest share. The largest of many timings is too large by chance.

    Args:
        timings: of the transformed form, as `measured` returns them.
    """
    slowest = sorted(timings, key=lambda timing: timing.slowdown)[-_SLOWEST:]
    sizes = dict.fromkeys((t.users, t.candidates) for t in (timings[0], *slowest))
    return [slowdown_of(timer(*size)) for size in sizes]


class Contest:
    """Two packages with the inputs of a served model, loaded to be timed in turn: a `Timer`.

    Args:
        served: what makes the inputs.
        first, second: archives; a timing's slowdown is that of the first.
    """

    def __init__(self, served: ServedModel, first: Path, second: Path) -> None:
        self._served = served
        self._is_on_gpu = served.device.type == "cuda"
        sizes = (1 + math.log2(max(served.max_users, 1))) * (1 + math.log(served.max_candidates, 4))
        self._seconds = min(_SIZE_SECONDS, _SECONDS / sizes)
        copies = _COPIES
        if self._is_on_gpu or max(path.stat().st_size for path in (first, second)) > _SMALL_BYTES:
            copies = 1
        self._sides: list[list[Callable[[list[Tensor]], object]]] = [[], []]
        for copy in range(copies):
            # NOTE: what is loaded later finds another heap and can be the faster for it.
            order = list(zip((first, second), self._sides, strict=True))
            for path, side in order if copy % 2 == 0 else reversed(order):
                package = torch._inductor.aoti_load_package(
                    os.fspath(path), run_single_threaded=self._is_on_gpu
                )
                # Inputs and outputs in lists, as the C++ runtime has them: no pytrees of torch.
                side.append(package.loader.boxed_run)

    @torch.inference_mode()
    def __call__(self, users: int, candidates: int) -> Sequence[Timing]:
        # In no order: neighbours of one user would spare the form that reads users by index more.
        order = torch.randperm(candidates, generator=torch.Generator().manual_seed(0))
        index = order * users // candidates
        inputs = self._served.make_inputs(users, index.to(torch.int32), seed=0)
        calls = [[functools.partial(_run, copy, inputs) for copy in side] for side in self._sides]
        ways: dict[str, Rounds] = {}
        if self._is_on_gpu:
            flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self._served.device)
            plain = [call for (call,) in calls]
            ways[CALL] = functools.partial(_rounds_on_gpu, plain, flush)
            if graphs := _recorded(plain):
                ways[GRAPH] = functools.partial(_rounds_on_gpu, graphs, flush)
        else:
            ways[CALL] = functools.partial(_rounds_on_cpu, [itertools.cycle(c) for c in calls])
        timings = []
        for how, rounds in ways.items():
            pairs = sampled(rounds, self._seconds / len(ways))
            slowdown = statistics.median(first / second for first, second in pairs)
            milliseconds = statistics.median(second for _, second in pairs)
            timings.append(
                Timing(how, users, candidates, round(slowdown, 4), round(milliseconds, 5))
            )
        return timings


def _run(program: Callable[[list[Tensor]], object], inputs: Sequence[Tensor]) -> object:
    return program(list(inputs))


def sampled(rounds: Rounds, seconds: float) -> list[tuple[float, float]]:
    """Pairs of times, until it is clear which form is faster, if either, or time is up."""
    rounds(_WARM_UP)
    begin = time.monotonic()
    pairs: list[tuple[float, float]] = []
    while True:
        pairs += rounds(_ROUNDS)
        spent = time.monotonic() - begin
        clear = spent > _LEAST * seconds and is_clear([first / second for first, second in pairs])
        if clear or spent > seconds:
            return pairs


def is_clear(ratios: Sequence[float]) -> bool:
    """Whether the median's range is on one side of either limit of what counts as equal.

    The range is that of the order statistics around the median within which the true one lies in
    98 of 100 samples.
    """
    count, ordered = len(ratios), sorted(ratios)
    margin = 1.3 * math.sqrt(count)
    low = ordered[max(0, math.floor(count / 2 - margin))]
    high = ordered[min(count - 1, math.floor(count / 2 + margin))]
    return not any(low <= limit <= high for limit in (1 - NOISE, 1 + NOISE))


def _rounds_on_cpu(sides: Sequence[Iterator[Run]], count: int) -> Sequence[tuple[float, float]]:
    """Each timed call is behind an untimed one, which finds the heap as the other side left it.

    The CPU time of a single thread leaves out what other processes of the machine take.
    """
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    times = [[0.0] * count for _ in sides]
    for i in range(count):
        order = list(enumerate(sides))
        for side, copies in order if i % 2 else reversed(order):
            call = next(copies)
            call()
            begin = clock()
            call()
            times[side][i] = (clock() - begin) / 1e6
    first, second = times
    return list(zip(first, second, strict=True))


def _rounds_on_gpu(
    calls: Sequence[Run], flush: Tensor, count: int
) -> Sequence[tuple[float, float]]:
    """From event to event, with a cold L2: with the gaps between a run's own kernels."""

    def timed(call: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        call()
        end.record()
        return begin, end

    rounds = [[timed(call) for call in calls] for _ in range(_RUN_UP + count)]
    torch.cuda.synchronize()
    pairs = [[begin.elapsed_time(end) for begin, end in events] for events in rounds[_RUN_UP:]]
    return [(first, second) for first, second in pairs]


def _recorded(calls: Sequence[Run]) -> list[Run]:
    """The kernels of each call as a CUDA graph; none where one of them cannot be recorded."""
    replays: list[Run] = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # A capture that fails does not give the stream back.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                call()
        except Exception:  # whatever an operator raises while it is recorded: a server does without
            return []
        replays.append(graph.replay)
    return replays


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for other processes of this user that time packages on this machine."""
    with open(Path(tempfile.gettempdir(), f"ikbo-timing-{os.getuid()}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
