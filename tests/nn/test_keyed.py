# SPDX-License-Identifier: Apache-2.0
"""Keyed jagged batches, split by key into a user's part and a candidates' part."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo.keyed import KeyedJagged

KEYS = ("age", "item", "clicks", "tags")
USER_KEYS = ("clicks", "age")
INDEX = ikbo.CandidateIndex.from_cand_to_user([1, 0, 1, 2, 0])

Bag = dict[str, list[list[int]]]


def batch() -> tuple[Bag, Tensor, Tensor]:
    """Per key and candidate its values, those of a user repeated; and the same flat."""
    per_user = {"age": [[3], [5], [7]], "clicks": [[1, 2, 3], [], [4, 4]]}
    bags: Bag = {
        "age": [per_user["age"][u] for u in INDEX.cand_to_user],
        "item": [[10], [11], [12], [13], [14]],
        "clicks": [per_user["clicks"][u] for u in INDEX.cand_to_user],
        "tags": [[], [21, 22], [], [23], [24, 25, 26]],
    }
    rows = [row for key in KEYS for row in bags[key]]
    values = torch.tensor([value for row in rows for value in row])
    return bags, values, torch.tensor([len(row) for row in rows])


def unpacked(part: KeyedJagged) -> Bag:
    rows = [row.tolist() for row in part.values.split(part.lengths.tolist())]
    n = part.num_rows
    return {key: rows[i * n : (i + 1) * n] for i, key in enumerate(part.keys)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_parts_keep_their_values(dtype: torch.dtype) -> None:
    bags, values, lengths = batch()
    user, cand = ikbo.split_by_key(KEYS, values, lengths.to(dtype), USER_KEYS)
    assert unpacked(user) == {key: bags[key] for key in ("age", "clicks")}
    assert unpacked(cand) == {key: bags[key] for key in ("item", "tags")}
    assert user.lengths.dtype == cand.lengths.dtype == dtype
    assert user.weights is None


def test_one_row_for_each_user_where_there_is_an_index() -> None:
    bags, values, lengths = batch()
    user, cand = ikbo.split_by_key(KEYS, values, lengths, USER_KEYS, INDEX, values / 2)
    assert unpacked(user) == {"age": [[3], [5], [7]], "clicks": [[1, 2, 3], [], [4, 4]]}
    assert unpacked(cand) == {key: bags[key] for key in ("item", "tags")}
    for part in (user, cand):
        assert part.weights is not None
        assert torch.equal(part.weights, part.values / 2)


def test_a_side_without_keys_and_a_batch_without_rows() -> None:
    _, values, lengths = batch()
    user, cand = ikbo.split_by_key(KEYS, values, lengths, KEYS)
    assert torch.equal(user.values, values)
    assert (cand.keys, cand.num_rows, cand.values.numel()) == ((), 0, 0)
    user, _ = ikbo.split_by_key(KEYS, values[:0], lengths[:0], USER_KEYS)
    assert user.num_rows == 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"keys": ("a", "a", "b", "c")}, ValueError, "keys must be different names"),
        ({"user_keys": ("age", "sex")}, ValueError, r"user_keys must be in keys; \['sex'\]"),
        ({"lengths": torch.ones(4)}, TypeError, "lengths must be int32 or int64; got torch.float"),
        ({"lengths": torch.ones(6).int()}, ValueError, "lengths must have a multiple of 4"),
        ({"lengths": torch.tensor([2, 0, 0, -1])}, ValueError, "lengths must be >= 0; got -1"),
        ({"values": torch.ones(2)}, ValueError, r"values must have 24 elements.*got \[2\]"),
        ({"weights": torch.ones(3)}, ValueError, r"weights must have 24 elements.*got \[3\]"),
        (
            {"index": ikbo.CandidateIndex.from_counts([1, 2])},
            ValueError,
            "index must have 5 candidates .*got 3",
        ),
    ],
)
def test_errors(change: dict[str, Any], error: type[Exception], text: str) -> None:
    _, values, lengths = batch()
    arguments = {"keys": KEYS, "values": values, "lengths": lengths, "user_keys": USER_KEYS}
    with pytest.raises(error, match=text):
        ikbo.split_by_key(**{**arguments, **change})
