# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from ikbo import CandidateIndex


def test_from_cand_to_user_keeps_the_order() -> None:
    index = CandidateIndex.from_cand_to_user(torch.tensor([2, 0, 2, 0]), num_users=4)
    assert index.cand_to_user.tolist() == [2, 0, 2, 0]
    assert index.cand_to_user.dtype == torch.int32
    assert (index.num_users, index.num_candidates) == (4, 4)
    assert not index.sorted
    assert index.user_offsets is None
    assert index.counts().tolist() == [2, 0, 2, 0]


def test_from_cand_to_user_counts_users_when_not_told() -> None:
    assert CandidateIndex.from_cand_to_user([0, 3, 1]).num_users == 4
    assert CandidateIndex.from_cand_to_user([]).num_users == 0


def test_sorted_index_has_offsets() -> None:
    index = CandidateIndex.from_cand_to_user([0, 0, 2], num_users=4)
    assert index.sorted
    assert index.user_offsets is not None
    assert index.user_offsets.dtype == torch.int32
    assert index.user_offsets.tolist() == [0, 2, 2, 3, 3]


def test_non_contiguous_index_is_copied() -> None:
    column = torch.tensor([[0, 9], [1, 9], [1, 9]], dtype=torch.int32)[:, 0]
    index = CandidateIndex.from_cand_to_user(column)
    assert index.cand_to_user.is_contiguous()
    assert index.cand_to_user.tolist() == [0, 1, 1]


def test_from_counts() -> None:
    index = CandidateIndex.from_counts([2, 0, 3])
    assert index.cand_to_user.tolist() == [0, 0, 2, 2, 2]
    assert index.num_users == 3
    assert index.user_offsets is not None
    assert index.user_offsets.tolist() == [0, 2, 2, 5]


def test_from_counts_of_nobody() -> None:
    index = CandidateIndex.from_counts([])
    assert (index.num_users, index.num_candidates, index.sorted) == (0, 0, True)


@pytest.mark.parametrize(
    ("ids", "expected", "is_sorted"),
    [
        (torch.tensor([70, 70, 12, 12, 12]), [0, 0, 1, 1, 1], True),
        (torch.tensor([70, 12, 70]), [0, 1, 0], False),
        (["a", "b", "a", "c"], [0, 1, 0, 2], False),
        ([], [], True),
    ],
)
def test_from_request_ids(ids: object, expected: list[int], is_sorted: bool) -> None:
    index = CandidateIndex.from_request_ids(ids)  # type: ignore[arg-type]
    assert index.cand_to_user.tolist() == expected
    assert index.num_users == len(set(expected))
    assert index.sorted == is_sorted


def test_first_candidates_undo_the_repetition() -> None:
    index = CandidateIndex.from_request_ids(torch.tensor([70, 12, 70, 5, 12]))
    assert index.first_candidates().tolist() == [0, 1, 3]
    x_user = torch.randn(3, 4)
    repeated = x_user[index.cand_to_user.long()]
    torch.testing.assert_close(repeated[index.first_candidates()], x_user, rtol=0, atol=0)


def test_first_candidates_need_a_candidate_each() -> None:
    with pytest.raises(ValueError, match="user 1 has none"):
        CandidateIndex.from_counts([1, 0]).first_candidates()


def test_to_moves_everything() -> None:
    index = CandidateIndex.from_counts([1, 2]).to("meta")
    assert index.cand_to_user.device.type == "meta"
    assert index.user_offsets is not None
    assert index.user_offsets.device.type == "meta"
    assert index.num_users == 2


@pytest.mark.parametrize(
    ("values", "num_users", "error", "text"),
    [
        ([0, 3, 1], 3, ValueError, r"in \[0, 3\).*got cand_to_user\[1\] = 3"),
        ([0, 1, -1], None, ValueError, r"in \[0, 2\).*got cand_to_user\[2\] = -1"),
        ([0], -1, ValueError, r"num_users must be an int in \[0, 2\*\*31\); got -1"),
        ([2**31 + 1], None, ValueError, r"must be an int in \[0, 2\*\*31\); got 2147483650"),
        ([2**32], 1, ValueError, r"got cand_to_user\[0\] = 4294967296"),
        ([[0, 1]], 2, ValueError, r"one dimension; got shape \(1, 2\)"),
        ([0.0, 1.0], 2, TypeError, "integer dtype; got torch.float32"),
        ([True, False], 2, TypeError, "integer dtype; got torch.bool"),
    ],
)
def test_bad_index_is_refused(
    values: list[int], num_users: int | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        CandidateIndex.from_cand_to_user(torch.tensor(values), num_users)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts must be >= 0; got counts\[1\] = -2"):
        CandidateIndex.from_counts([3, -2])
    with pytest.raises(TypeError, match="counts must be of an integer dtype"):
        CandidateIndex.from_counts(torch.ones(3))
    with pytest.raises(TypeError, match="request_ids must be of an integer dtype"):
        CandidateIndex.from_request_ids(torch.ones(3))


@pytest.mark.parametrize("counts", [[2**31], [2**30, 2**30], [2**62, 2**62], [2**63 - 1, 1]])
def test_too_many_candidates_are_refused_before_they_are_built(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="at most 2\\*\\*31 - 1 candidates are allowed; got "):
        CandidateIndex.from_counts(counts)


@pytest.mark.parametrize("values", [None, ["a"], [None], [[0], [1, 2]], [2**70]])
def test_no_list_of_ints_is_refused(values: Any) -> None:
    text = "must be a tensor or a list of ints; got "
    with pytest.raises(TypeError, match=f"CandidateIndex: counts {text}"):
        CandidateIndex.from_counts(values)
    with pytest.raises(TypeError, match=f"CandidateIndex: cand_to_user {text}"):
        CandidateIndex.from_cand_to_user(values)


@pytest.mark.parametrize("ids", [3, None, [["a"], ["b"]]])
def test_request_ids_that_cannot_be_counted(ids: Any) -> None:
    with pytest.raises(TypeError, match="request_ids must be an integer tensor or hashable values"):
        CandidateIndex.from_request_ids(ids)


@pytest.mark.parametrize("num_users", ["3", 3.0])
def test_num_users_is_an_int(num_users: Any) -> None:
    with pytest.raises(ValueError, match=f"num_users must be an int.*got {num_users!r}"):
        CandidateIndex.from_cand_to_user([0, 1], num_users)
