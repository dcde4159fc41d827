# SPDX-License-Identifier: Apache-2.0
"""The simulation of bench/capacity.py against what is known of queues."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from bench import capacity


def constant(seconds: float) -> capacity.ServiceTime:
    """Merging pays fully."""
    return lambda count: seconds


def proportional(seconds: float) -> capacity.ServiceTime:
    """Merging pays nothing."""
    return lambda count: count * seconds


def test_an_idle_server_answers_in_the_time_of_a_run() -> None:
    seen = capacity.latencies(proportional(0.01), rate=0.01, machines=1, count=1000)
    assert seen == pytest.approx([0.01] * 900)


def test_one_server_at_half_load_waits_as_queueing_theory_says() -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services. Unmerged: a limit of one request."""
    previous, capacity.MAX_MERGED = capacity.MAX_MERGED, 1
    try:
        seen = capacity.latencies(constant(0.01), rate=50, machines=1, count=50_000)
    finally:
        capacity.MAX_MERGED = previous
    assert statistics.mean(seen) == pytest.approx(0.01 * (1 + 0.5 / (2 * 0.5)), rel=0.03)


def test_merging_that_pays_needs_fewer_machines() -> None:
    merged = capacity.machines_for(constant(0.01), rate=1000, target=0.05)
    unmerged = capacity.machines_for(proportional(0.01), rate=1000, target=0.05)
    assert 1000 * 0.01 / capacity.MAX_MERGED <= merged < unmerged
    assert unmerged >= 10, "no fewer than the load itself"
    slow = capacity.latencies(proportional(0.01), rate=1000, machines=unmerged // 2)
    assert capacity.p99(slow) > 0.05


def test_a_target_below_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="a run alone takes 0.01 s"):
        capacity.machines_for(constant(0.01), rate=1, target=0.005)


def test_service_times_come_from_the_results(tmp_path: Path) -> None:
    rows = [
        {"case": {"figure": f, "clients": n}, "unit": "ms", "ours": x, "peers": {"other": 2 * x}}
        for f, n, x in (("p50", 1, 10.0), ("p99", 1, 99.0), ("p50", 4, 16.0))
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"rows": rows}))
    times = capacity.read_service_times(path)
    assert [times["ikbo"](n) for n in (1, 2, 8)] == pytest.approx([0.010, 0.012, 0.024])
    assert times["other"](4) == pytest.approx(0.032)
    path.write_text(json.dumps({"rows": [rows[0] | {"unit": "us"}]}))
    with pytest.raises(ValueError, match="unit must be ms"):
        capacity.read_service_times(path)
