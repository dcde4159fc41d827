# SPDX-License-Identifier: Apache-2.0
"""Timer for GPU benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 256 * 1024 * 1024  # several times the L2 of an H200 (50 MB)


def interleaved_cuda(
    contestants: Mapping[str, Callable[[], object]], rounds: int = 60, warmup: int = 5
) -> dict[str, float]:
    """Median time of each contestant on the current stream, in milliseconds, with a cold L2.

    One round runs each contestant once, in turn, so that clocks and power, which change within
    milliseconds, are the same for all. A write of ``FLUSH_BYTES`` before each run clears the L2.
    The time is from event to event: it holds the launch gaps between a contestant's own kernels.

    Args:
        contestants: name to a call that launches its work.
        rounds: rounds that count.
        warmup: rounds before them.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in contestants
    }
    for finished in range(warmup + rounds):
        for name, call in contestants.items():
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            call()
            end.record()
            if finished >= warmup:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in events.items()
    }
