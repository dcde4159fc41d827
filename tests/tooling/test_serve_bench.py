# SPDX-License-Identifier: Apache-2.0
"""How `bench.bench_serve` searches for a rate, and what it keeps when a part of it fails."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import bench_serve
from bench.bench_serve import Bench, Row
from bench.serve.search import Search, find_rate, try_rate

ALONE = 0.01
LIMIT_MS = 80.0
SEARCH = Search(1.0, (0.1, 1.3), 4)

P99 = Callable[[float, int], float]  # of a rate and a try, in ms


class Asked:
    """A server whose p99 is known, and the rates of all tries."""

    def __init__(self, p99: P99, errors_from: float = math.inf) -> None:
        self.p99 = p99
        self.errors_from = errors_from
        self.rates: list[float] = []

    def __call__(self, rate: float, seconds: float, **flags: Any) -> dict[str, Any]:
        self.rates.append(rate)
        return {
            "achieved_rate": rate,
            "latency_us": {"p99": 1e3 * self.p99(rate, flags["seed"])},
            "errors": {"timeout": 3} if rate >= self.errors_from else {},
        }


def up_to(largest: float) -> P99:
    return lambda rate, _: 50.0 if rate <= largest else 1e4


def test_finds_the_largest_rate_within_the_limit() -> None:
    for largest in (20.0, 60.0, 120.0):
        found = find_rate(Asked(up_to(largest)), "ours", SEARCH, ALONE, LIMIT_MS)
        assert largest - 120 / 16 <= found.rate <= largest


def test_one_bad_second_does_not_end_the_search() -> None:
    """The first try of every rate is just over the limit, the second within it."""
    ask = Asked(lambda rate, seed: 1.5 * LIMIT_MS if seed == 1 or rate > 100 else 50.0)
    assert 90 < find_rate(ask, "ours", SEARCH, ALONE, LIMIT_MS).rate <= 100


def test_what_is_far_over_the_limit_is_not_tried_again() -> None:
    ask = Asked(lambda rate, seed: 3 * LIMIT_MS if seed == 1 else 1.0)
    assert try_rate(ask, 50, 1, LIMIT_MS).p99_ms == 3 * LIMIT_MS
    assert ask.rates == [50]


def test_the_better_of_two_tries_counts() -> None:
    ask = Asked(lambda rate, seed: LIMIT_MS * (1.2 if seed == 1 else 1.4))
    assert try_rate(ask, 50, 1, LIMIT_MS).p99_ms == pytest.approx(1.2 * LIMIT_MS)


def test_a_net_that_keeps_no_rate_is_named() -> None:
    ask = Asked(lambda rate, _: 1.0, errors_from=0)
    with pytest.raises(RuntimeError, match="replicated must keep p99 within 80 ms at some rate"):
        find_rate(ask, "replicated", SEARCH, ALONE, LIMIT_MS)


def test_a_part_that_fails_loses_no_row_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(what: str) -> Row:
        return {"case": {"what": what}, "unit": "ms", "ours": 1.0, "peers": {}}

    def breaks(_: Bench) -> Iterator[Row]:
        yield row("before")
        raise RuntimeError("the server is gone")

    parts = {"breaks": breaks, "works": lambda _: [row("after")]}
    monkeypatch.setitem(bench_serve.PARTS, "cpu", parts)
    monkeypatch.setattr(bench_serve, "make_bench", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench_serve", "--quick", "--out", str(tmp_path)])
    assert bench_serve.main() == 1
    rows = json.loads((tmp_path / "serve-cpu.json").read_text())["rows"]
    assert [row["case"]["what"] for row in rows] == ["before", "after"]
    shown = capsys.readouterr()
    assert "FAILED: breaks: RuntimeError: the server is gone" in shown.err
    assert "works (2 of 2, after 0 s)" in shown.out
