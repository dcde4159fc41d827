# SPDX-License-Identifier: Apache-2.0
"""Times contestants that leave memory and caches to each other in another state."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from ikbo.testing.bench import interleaved

_WARM_UP = "warm-up of "
# What `ikbo-server` tells glibc's mallopt: a process keeps what a run frees.
_MEBIBYTE = 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT = {
    _M_MMAP_THRESHOLD: 32 * _MEBIBYTE,
    _M_TOP_PAD: 64 * _MEBIBYTE,
    _M_TRIM_THRESHOLD: 1024 * _MEBIBYTE,
}


def in_turn(contestants: Mapping[str, Callable[[], object]], **limits: Any) -> dict[str, float]:
    """`interleaved`, each timed call right behind an untimed one of the same contestant.

    glibc gives freed memory back to the system once enough of it lies at the end of its heap, and
    the next call pays a page fault for each 4 KiB: which contestant does depends on the sizes of
    them all. A server runs one model again and again and keeps its memory, and so does this
    process.

    Args:
        contestants: as `interleaved` takes them.
        limits: the same.

    Returns:
        Name to median, in milliseconds.
    """
    libc = ctypes.CDLL(None)
    for parameter, value in _KEPT.items():
        assert libc.mallopt(parameter, value) == 1
    calls = {k: call for name, call in contestants.items() for k in (_WARM_UP + name, name)}
    times = interleaved(calls, **limits)
    return {name: times[name] for name in contestants}
