# SPDX-License-Identifier: Apache-2.0
"""Provenance per slice: what users alone determine is computed at U, in each pattern."""

from typing import Any

import pytest
import torch

import ikbo
from ikbo._torch_warnings import quiet
from ikbo.transform import forms as f
from ikbo.transform.capture import capture
from ikbo.transform.forms import Rows, User
from ikbo.transform.rules import RULES
from tests.transform.mixed_models import MIXED
from tests.transform.truth import Provenance

aten = torch.ops.aten


def differences(name: str) -> list[str]:
    made = MIXED[name]()
    with quiet():
        return Provenance(
            capture(made.model, made.inputs, made.users, made.columns, made.row_counts)
        ).differences()


@pytest.mark.parametrize("name", MIXED)
def test_all_that_users_determine_is_found(name: str) -> None:
    assert differences(name) == []


@pytest.mark.parametrize("name", MIXED)
def test_user_work_is_at_user_batch(name: str) -> None:
    """The transformed model, which is verified against the unmodified one in fp64."""
    made = MIXED[name]()
    spec = ikbo.explain(
        made.model, made.inputs, made.users, columns=made.columns, row_counts=made.row_counts,
        max_users=8, max_candidates=64,
    )  # fmt: skip
    for op in made.at_users:
        batches = [row.batch for row in spec.rows if row.op == op]
        assert any("U" in batch for batch in batches), f"{op}: {batches}"
    assert spec.total("bytes_after", 1, 64) < spec.total("bytes_before", 1, 64)


def test_a_missed_user_value_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, aten.index.Tensor, [])
    assert "index: 69 user-only elements are at B" in differences("index_lists_in_any_order")


def test_a_false_claim_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(walk: Any, x: Any) -> User:
        return User(torch.zeros(walk.num_users, *f.shape(x)[1:], dtype=f.dtype(x)), Rows())

    monkeypatch.setitem(RULES, aten.tanh.default, [claim])
    [text] = [t for t in differences("pieces_interleaved") if t.startswith("tanh")]
    assert text.endswith("elements are claimed for the user")
