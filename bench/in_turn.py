# SPDX-License-Identifier: Apache-2.0
"""Times contestants that leave memory and caches to each other in another state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ikbo.testing.bench import interleaved

_WARM_UP = "warm-up of "


def in_turn(contestants: Mapping[str, Callable[[], object]], **limits: Any) -> dict[str, float]:
    """`interleaved`, each timed call right behind an untimed one of the same contestant.

    glibc gives freed memory back to the system once enough of it lies at the end of its heap: a
    large contestant does that to the next one, whose first call pays a page fault for each 4 KiB.
    A server runs one model again and again.

    Args:
        contestants: as `interleaved` takes them.
        limits: the same.

    Returns:
        Name to median, in milliseconds.
    """
    calls = {k: call for name, call in contestants.items() for k in (_WARM_UP + name, name)}
    times = interleaved(calls, **limits)
    return {name: times[name] for name in contestants}
