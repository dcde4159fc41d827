# SPDX-License-Identifier: Apache-2.0
"""Random models with random roles: as the unmodified ones, and moved to users as far as can be."""

import pytest
import torch

from ikbo.transform import rowwise
from ikbo.transform.rules import RULES
from tests.transform.fuzz import exported, mismatch, shares
from tests.transform.test_planted import after, without_bias
from tests.transform.test_rules import find

aten = torch.ops.aten

SEEDS = 100
EXPORTED = 2


def test_random_models_keep_their_meaning() -> None:
    assert [text for seed in range(SEEDS) if (text := mismatch(seed)) is not None] == []


def test_most_of_what_users_determine_is_moved() -> None:
    pairs = [shares(seed) for seed in range(SEEDS // 4)]
    assert sum(moved for _, moved in pairs) >= 0.95 * sum(found for found, _ in pairs)


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find("linear.linear", aten.linear.default)
    rules = [after(without_bias)(r) if r is rule else r for r in RULES[aten.linear.default]]
    monkeypatch.setitem(RULES, aten.linear.default, rules)
    assert any(mismatch(seed) for seed in range(10))


def test_user_work_at_candidates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise, "distribute", lambda *_: None)
    pairs = [shares(seed) for seed in range(15)]
    assert sum(moved for _, moved in pairs) < 0.95 * sum(found for found, _ in pairs)


@pytest.mark.parametrize("seed", range(EXPORTED))
def test_random_programs_are_verified(seed: int) -> None:
    exported(seed)
