# SPDX-License-Identifier: Apache-2.0
"""From how many candidates on the transformed form is the faster one, by what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What `both_forms` of `ikbo.package` may be besides False and True.
MEASURED = "measured"

# Two forms whose times are within so much of each other are equally fast: timing them again changes
# that much.
NOISE = 0.02


@dataclass(frozen=True)
class Timing:
    """What the transformed form took at one size, measured in turn with the unmodified one.

    `how` is "call", or "graph" for the replay of a CUDA graph. `slowdown` is the median of
    transformed / unmodified, `replicated_ms` what the unmodified form took.
    """

    how: str
    users: int
    candidates: int
    slowdown: float
    replicated_ms: float


def slowdown_of(timings: Iterable[Timing]) -> float:
    """The largest slowdown: what one way to run gains does not pay for what another one loses."""
    return max(timing.slowdown for timing in timings)


def measured_pays_from(
    timings: Sequence[Timing], limits: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """From how many candidates on the transformed form runs.

    One form runs everywhere if the other one is nowhere faster by more than noise; of two such
    forms that is the transformed one. Else, for each number of users that was measured, the
    transformed form runs from behind the last number of candidates at which it is slower. Between
    two numbers of users the later of both break-evens holds, and behind the last one its ratio.

    Args:
        timings: some for each number of users, in order, from 1 user and as many candidates as
            users on.
        limits: (max_users, max_candidates).

    Returns:
        Pairs (U, B) as `variants_of` takes them.
    """
    never = limits[1] + 1
    rows = _rows(timings)
    found = [slowdown for row in rows.values() for slowdown in row.values()]
    if max(found) <= 1 + NOISE:
        return ((1, 1),)
    if min(found) >= 1 - NOISE:
        return ((1, never),)
    firsts = {users: _first(row, never) for users, row in rows.items()}
    users, first = list(firsts.items())[-1]
    ratio = first / users
    while users < limits[0]:
        users = min(2 * users, limits[0])
        firsts[users] = first if first in (1, never) else min(never, math.ceil(ratio * users))
    begins = [1, *(users + 1 for users in firsts)]
    highest = [max(pair) for pair in pairwise([0, *firsts.values()])]
    steps: list[tuple[int, int]] = []
    for begin, first in zip(begins, highest, strict=False):
        if not steps or steps[-1][1] != first:
            steps.append((begin, first))
    return tuple(steps)


def _rows(timings: Iterable[Timing]) -> dict[int, dict[int, float]]:
    """Users to candidates, in order, to the largest slowdown."""
    rows: dict[int, dict[int, float]] = {}
    for timing in sorted(timings, key=lambda timing: (timing.users, timing.candidates)):
        row = rows.setdefault(timing.users, {})
        row[timing.candidates] = max(timing.slowdown, row.get(timing.candidates, 0.0))
    return rows


def crossing(row: dict[int, float]) -> tuple[int, int] | None:
    """The last number of candidates at which the transformed form is slower, and the next one.

    None where it is nowhere slower, or at the last one.

    Args:
        row: candidates, in order, to slowdown.
    """
    counts = list(row)
    slow = [i for i, count in enumerate(counts) if row[count] > 1 + NOISE]
    if not slow or slow[-1] == len(counts) - 1:
        return None
    return counts[slow[-1]], counts[slow[-1] + 1]


def _first(row: dict[int, float], never: int) -> int:
    """From how many candidates on the transformed form runs; both forms are equal in between."""
    pair = crossing(row)
    if pair is None:
        return never if list(row.values())[-1] > 1 + NOISE else 1
    low, high = pair
    if row[high] >= 1:
        return high
    share = math.log(row[low]) / (math.log(row[low]) - math.log(row[high]))
    return max(low + 1, min(high, math.ceil(low * (high / low) ** share)))
