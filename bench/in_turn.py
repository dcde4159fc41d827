# SPDX-License-Identifier: Apache-2.0
"""Times contestants that leave memory and caches to each other in another state."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ikbo.testing.bench import interleaved

Call = Callable[[], object]
MOST_TURNS = 5


class _Copies:
    """One contestant: the next of its copies, untimed, then the same one timed."""

    def __init__(self, copies: Sequence[Call]) -> None:
        self.turns = itertools.cycle(copies)
        self.now = copies[0]

    def warm_up(self) -> None:
        self.now = next(self.turns)
        self.now()

    def timed(self) -> None:
        self.now()

    def seconds(self) -> float:
        self.warm_up()
        begin = time.perf_counter()
        self.now()
        return time.perf_counter() - begin


def loaded_in_turn(paths: Sequence[Path], copies: int) -> list[list[Callable[..., Any]]]:
    """Copies of packages; what is loaded later finds another heap and can be the faster for it.

    Returns:
        Those of each package, as `in_turn` takes them.
    """
    loaded: list[list[Callable[..., Any]]] = [[] for _ in paths]
    order = list(zip(paths, loaded, strict=True))
    for _ in range(copies):
        for path, own in order:
            own.append(torch._inductor.aoti_load_package(str(path)))
        order.reverse()
    return loaded


def in_turn(contestants: Mapping[str, Call | Sequence[Call]], **limits: Any) -> dict[str, float]:
    """`interleaved`, each timed call right behind an untimed one of the same contestant.

    glibc gives freed memory back to the system once enough of it lies at the end of its heap: a
    large contestant does that to the next one, whose first call pays a page fault for each 4 KiB.
    A server runs one model again and again.

    A fast contestant has several turns in a round, up to `MOST_TURNS`, while they take no more time
    than the slowest one's: few rounds tell two slow contestants apart, which differ much, and not
    two fast ones, which differ little.

    Args:
        contestants: as `interleaved` takes them; or copies of one, which take turns: where a
            model's weights come to lie in memory is chance, and decides some per cent of its time.
        limits: as `interleaved` takes them.

    Returns:
        Name to median of its turns' medians, in milliseconds.
    """
    copies = {
        name: _Copies([given] if callable(given) else given) for name, given in contestants.items()
    }
    seconds = {name: each.seconds() for name, each in copies.items()}
    longest = max(seconds.values())
    owners = {
        f"{name} {turn}": name
        for name, own in seconds.items()
        for turn in range(min(MOST_TURNS, int(longest / own)))
    }
    medians = interleaved(
        {turn: copies[name].timed for turn, name in owners.items()},
        before=lambda turn: copies[owners[turn]].warm_up(),
        **limits,
    )
    return {
        name: statistics.median(ms for turn, ms in medians.items() if owners[turn] == name)
        for name in copies
    }
