# SPDX-License-Identifier: Apache-2.0
"""`materialise(rule(op, forms)) == op(materialise(forms))` in fp64, for every rule."""

from typing import Any

import pytest

from ikbo.transform import forms as f
from ikbo.transform.rules import RULES
from tests.transform import attention_cases, move_cases, pending_cases  # noqa: F401  (tables)
from tests.transform.random_forms import Draw, assert_same
from tests.transform.rule_cases import LEAVES, TAKES

DRAWS = 25


def name_of(function: Any) -> str:
    return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"


def find(name: str, target: Any) -> Any:
    return next(rule for rule in RULES[target] if name_of(rule) == name)


def check_equal(d: Draw, walk: Any, result: Any, target: Any, args: Any, kwargs: Any) -> None:
    args, kwargs = f.map_leaves(d.meaning, (args, kwargs))
    want = target(*args, **kwargs)
    results, wants = (x if isinstance(x, tuple | list) else (x,) for x in (result, want))
    assert len(results) == len(wants)
    for got, expected in zip(results, wants, strict=True):
        if got is not None:  # a result that the model does not read
            axis, low, high = d.live or (0, 0, expected.shape[0])
            for value in (walk.materialise(got), d.meaning(got)):
                assert_same(
                    value.narrow(axis, low, high - low), expected.narrow(axis, low, high - low)
                )


def test_every_rule_has_cases() -> None:
    registered = {name_of(rule) for rules in RULES.values() for rule in rules}
    assert registered == set(TAKES)
    assert set(LEAVES) <= set(TAKES)


@pytest.mark.parametrize("name", TAKES)
def test_rule_keeps_the_meaning(name: str) -> None:
    for number, make in enumerate(TAKES[name]):
        for draw in range(DRAWS):
            d = Draw(f"{name}/{number}/{draw}")
            target, args, kwargs = make(d)
            walk = d.walk()
            result = find(name, target)(walk, *args, **kwargs)
            assert result is not None, "the rule does not take its own case"
            check_equal(d, walk, result, target, args, kwargs)


@pytest.mark.parametrize("name", LEAVES)
def test_rule_leaves_near_misses_alone(name: str) -> None:
    for number, make in enumerate(LEAVES[name]):
        for draw in range(5):
            d = Draw(f"{name}/near/{number}/{draw}")
            target, args, kwargs = make(d)
            walk = d.walk()
            assert find(name, target)(walk, *args, **kwargs) is None
            check_equal(d, walk, walk.apply(target, *args, **kwargs), target, args, kwargs)
