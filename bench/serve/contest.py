# SPDX-License-Identifier: Apache-2.0
"""Whose throughput `bench.bench_serve` finds: a net with an index, and the same replicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.serve.search import Search


@dataclass(frozen=True)
class Contest:
    """The workloads `ours` (under its name) and `replicated`."""

    net: str
    ours: str
    flags: Sequence[str]  # of both servers
    user_inputs: Sequence[str]
    search: Search
    tolerance: float  # of answers
