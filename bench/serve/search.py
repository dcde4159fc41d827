# SPDX-License-Identifier: Apache-2.0
"""The largest rate at which a server's p99 stays within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REQUESTS = 100  # at least, of one step
# A rate whose p99 is over the limit, but less than so many times, is tried once more: on a machine
# that does something else for a second, one of two tries is spoilt, seldom both.
NEAR = 2

# `ikbo-load` at a rate for so many seconds, with further flags; returns its figures.
Ask = Callable[..., Mapping[str, Any]]


def show(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Search:
    """How the largest rate is found."""

    seconds: float  # at least, of one step
    load_range: tuple[float, float]  # in the rate of one request after the other
    steps: int


@dataclass(frozen=True)
class Step:
    """What a server made of a rate."""

    rate: float  # answered requests a second
    p99_ms: float
    errors: Mapping[str, int]

    def keeps(self, limit_ms: float) -> bool:
        return self.p99_ms <= limit_ms and not self.errors


def try_rate(ask: Ask, rate: float, seconds: float, limit_ms: float) -> Step:
    """One try, or the better of two where the first was near the limit."""
    tries: list[Step] = []
    for seed in (1, 2):
        seen = ask(rate, seconds, timeout_ms=math.ceil(10 * limit_ms), seed=seed)
        step = Step(seen["achieved_rate"], seen["latency_us"]["p99"] / 1e3, seen["errors"])
        errors = f", errors {step.errors}" if step.errors else ""
        show(f"    {rate:.2f}/s: p99 {step.p99_ms:.4g} ms (limit {limit_ms:.4g} ms){errors}")
        tries.append(step)
        if step.keeps(limit_ms) or not step.keeps(NEAR * limit_ms):
            break
    return min(tries, key=lambda step: (bool(step.errors), step.p99_ms))


def find_rate(ask: Ask, name: str, search: Search, alone: float, limit_ms: float) -> Step:
    """Bisects the rate. A request alone takes `alone` seconds.

    Errors:
        RuntimeError: none of the rates was within the limit.
    """
    low, high = (load / alone for load in search.load_range)
    best: Step | None = None
    for _ in range(search.steps):
        rate = (low + high) / 2
        step = try_rate(ask, rate, max(search.seconds, REQUESTS / rate), limit_ms)
        if step.keeps(limit_ms):
            low, best = rate, step
        else:
            high = rate
    if best is None:
        raise RuntimeError(
            f"bench_serve: {name} must keep p99 within {limit_ms:.0f} ms at some rate"
        )
    return best
