# SPDX-License-Identifier: Apache-2.0
"""Which sizes are timed, and from how many candidates on the transformed form then runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from ikbo import _measured
from ikbo.transform.break_even import NOISE, Timing, measured_pays_from
from ikbo.transform.variants import TRANSFORMED, variants_of

LIMITS = (16, 512)
Time = Callable[[int, int], float]


class Exact:
    """A timer of two formulas, in microseconds of U and B."""

    def __init__(self, transformed: Time, replicated: Time) -> None:
        self.transformed, self.replicated = transformed, replicated
        self.sizes: list[tuple[int, int]] = []

    def slowdown(self, users: int, candidates: int) -> float:
        return self.transformed(users, candidates) / self.replicated(users, candidates)

    def __call__(self, users: int, candidates: int) -> Sequence[Timing]:
        self.sizes.append((users, candidates))
        ms = self.replicated(users, candidates) / 1e3
        return [Timing("call", users, candidates, self.slowdown(users, candidates), ms)]


def timed(slowdowns: dict[tuple[int, int], float], how: str = "call") -> list[Timing]:
    return [Timing(how, *sizes, slowdown, 1.0) for sizes, slowdown in slowdowns.items()]


def pays_of(timer: Exact) -> tuple[tuple[int, int], ...]:
    return measured_pays_from(_measured.measured(timer, *LIMITS), LIMITS)


# Formulas: U users cost, B candidates cost, and a run does.
CASES = {
    "crosses": Exact(lambda u, b: 60 + 8 * u + 4 * b, lambda u, b: 50 + 10 * b),
    "crosses late": Exact(lambda u, b: 400 + 20 * u + 4 * b, lambda u, b: 50 + 7 * b),
    "crosses at ratio 1": Exact(lambda u, b: 50 + 6 * u + 4 * b, lambda u, b: 50 + 9 * b),
    "with many users alone": Exact(lambda u, b: 50 + u * u + 4 * b, lambda u, b: 55 + 9 * b),
    "with few users alone": Exact(lambda u, b: 90 + u + 4 * b, lambda u, b: 50 + 9 * b),
}


@pytest.mark.parametrize("name", CASES)
def test_no_form_is_much_slower_than_the_other_where_it_runs(name: str) -> None:
    """Nowhere on the grid by more than noise, and in between the transformed form by 3 %."""
    timer = CASES[name]
    timer.sizes.clear()
    parts = variants_of(pays_of(timer), LIMITS)
    for users in range(1, LIMITS[0] + 1):
        for candidates in range(users, LIMITS[1] + 1):
            (part,) = [p for p in parts if p.holds(users, candidates)]
            if part.form == TRANSFORMED:
                is_timed = (users, candidates) in timer.sizes
                limit = 1 + NOISE if is_timed else 1.03
                assert timer.slowdown(users, candidates) <= limit, (users, candidates)
            elif users & (users - 1) == 0:
                assert timer.slowdown(users, candidates) > 0.8, (users, candidates)


@pytest.mark.parametrize(("share", "first"), [(0.5, 1), (1 + NOISE, 1), (1.1, LIMITS[1] + 1)])
def test_one_form_where_the_other_is_nowhere_faster(share: float, first: int) -> None:
    timer = Exact(lambda u, b: share * (9 + b), lambda u, b: 9 + b)
    assert pays_of(timer) == ((1, first),)


def test_ties_do_not_keep_a_second_form() -> None:
    """Equal at some sizes, the unmodified form faster at others: that one alone."""
    assert measured_pays_from(timed({(1, 1): 1.2, (1, 4): 1.0, (2, 2): 0.99}), (2, 4)) == ((1, 5),)


def test_the_last_slow_size_counts() -> None:
    slowdowns = {(1, 1): 0.9, (1, 4): 1.1, (1, 16): 1.0, (1, 64): 0.5}
    assert measured_pays_from(timed(slowdowns), (1, 64)) == ((1, 16),)


def test_the_break_even_is_where_both_take_as_long() -> None:
    """Of a slowdown of 2 and one of 1/2 the middle, in factors."""
    assert measured_pays_from(timed({(1, 4): 2.0, (1, 16): 0.5}), (1, 64)) == ((1, 8),)


def test_what_graphs_gain_does_not_pay_for_what_calls_lose() -> None:
    both = timed({(1, 1): 1.2, (1, 4): 0.9}) + timed({(1, 1): 0.5, (1, 4): 1.3}, "graph")
    assert measured_pays_from(both, (1, 4)) == ((1, 5),)


def test_between_two_numbers_of_users_the_later_break_even_holds() -> None:
    slowdowns = {(1, 1): 0.5, (4, 4): 1.5, (4, 16): 1 / 1.5, (8, 8): 0.5}
    assert measured_pays_from(timed(slowdowns), (8, 16)) == ((1, 1), (2, 8))


def test_more_users_than_were_timed_have_the_last_ratio() -> None:
    slowdowns = {(1, 1): 0.9, (2, 2): 2.0, (2, 8): 0.5}
    expected = ((1, 1), (2, 4), (3, 8), (5, 12))
    assert measured_pays_from(timed(slowdowns), (6, 100)) == expected
    assert measured_pays_from(timed(slowdowns), (6, 10)) == (*expected[:3], (5, 11))


def test_rows_begin_with_one_candidate_for_each_user_and_reach_the_limits() -> None:
    timer = Exact(lambda u, b: 1.0, lambda u, b: 2.0)
    _measured.measured(timer, 6, 24)
    rows = {u: [b for v, b in timer.sizes if u == v] for u, _ in timer.sizes}
    assert rows == {1: [1, 4, 16, 24], 2: [2, 8, 24], 4: [4, 16, 24], 6: [6, 24]}


def test_more_users_than_candidates() -> None:
    timer = Exact(lambda u, b: 1.0, lambda u, b: 2.0)
    _measured.measured(timer, 8, 3)
    assert timer.sizes == [(1, 1), (1, 3), (2, 2), (2, 3), (3, 3)]


def test_long_runs_end_a_row_where_more_candidates_gain() -> None:
    """Runs of 1 ms for each candidate: 64 of them are enough, and 16 users."""
    timer = Exact(lambda u, b: 500.0 * b, lambda u, b: 1000.0 * b)
    _measured.measured(timer, 64, 8192)
    assert max(b for u, b in timer.sizes if u == 1) == 64
    assert max(u for u, _ in timer.sizes) == 16


def test_long_runs_do_not_end_a_row_where_they_lose() -> None:
    timer = Exact(lambda u, b: 10_000.0 * u + 10 * b, lambda u, b: 5000.0 + 100 * b)
    assert pays_of(timer)[0] == (1, 56)


def test_time_that_is_up_ends_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measured, "_SECONDS", 0.0)
    timer = Exact(lambda u, b: 1.0, lambda u, b: 2.0)
    assert [t.candidates for t in _measured.measured(timer, 8, 64)] == [1]


def test_a_size_that_cannot_run_ends_its_row() -> None:
    def limited(users: int, candidates: int) -> Sequence[Timing]:
        if candidates > 10:
            raise RuntimeError("out of memory")
        return timed({(users, candidates): 0.5})

    sizes = [(t.users, t.candidates) for t in _measured.measured(limited, 8, 512)]
    assert sizes == [(1, 1), (1, 4), (2, 2), (2, 8), (4, 4), (8, 8)]
    with pytest.raises(RuntimeError, match="out of memory"):
        _measured.measured(limited, 16, 512)


def test_timed_again_are_the_shortest_run_and_the_slowest() -> None:
    timings = timed({(1, 1): 0.5, (1, 4): 1.1, (2, 2): 1.3, (2, 8): 0.6, (4, 4): 1.2})
    timer = Exact(lambda u, b: 10.0 * u + b, lambda u, b: 10.0)
    assert _measured.timed_again(timer, timings) == [1.1, 1.4, 4.4, 2.2]
    assert timer.sizes == [(1, 1), (1, 4), (4, 4), (2, 2)]


def test_clear_is_what_lies_on_one_side_of_the_limits() -> None:
    assert _measured.is_clear([0.9] * 7)
    assert _measured.is_clear([1.0] * 7)
    assert _measured.is_clear([1.1] * 7)
    assert not _measured.is_clear([0.9] * 6 + [1.0])
    assert _measured.is_clear([0.9] * 60 + [1.0])
    assert not _measured.is_clear([0.9, 1.1] * 30)


def rounds_of(ratios: Iterator[float]) -> _measured.Rounds:
    return lambda count: [(next(ratios), 1.0) for _ in range(count)]


def test_sampling_ends_when_the_answer_is_clear_and_drops_the_first_rounds() -> None:
    ratios = itertools.chain([9.0] * 4, itertools.repeat(0.5))
    pairs = _measured.sampled(rounds_of(ratios), seconds=10.0)
    assert {first for first, _ in pairs} == {0.5}
    assert len(pairs) % 8 == 0


def test_sampling_ends_when_time_is_up() -> None:
    assert _measured.sampled(rounds_of(itertools.cycle([0.9, 1.1])), seconds=0.05)
