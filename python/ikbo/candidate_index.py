# SPDX-License-Identifier: Apache-2.0
"""Which user each candidate belongs to: the one place where the index is built and checked."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

_INT32_MAX = torch.iinfo(torch.int32).max
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class CandidateIndex:
    """Links B candidates to U users: candidate b belongs to user `cand_to_user[b]`.

    Made by `from_cand_to_user`, `from_counts` or `from_request_ids`, which check everything; the
    constructor itself checks nothing.

    Attributes:
        cand_to_user: int32 `[B]`, values in `[0, U)`, contiguous.
        num_users: U; users without candidates count.
        sorted: whether `cand_to_user` never decreases.
        user_offsets: int32 `[U + 1]` when sorted (the candidates of user u are the rows
            `user_offsets[u]` to `user_offsets[u + 1] - 1`), else None.
    """

    cand_to_user: Tensor
    num_users: int
    sorted: bool
    user_offsets: Tensor | None

    @property
    def num_candidates(self) -> int:
        """B."""
        return self.cand_to_user.numel()

    @classmethod
    def from_cand_to_user(
        cls, cand_to_user: Tensor | Sequence[int], num_users: int | None = None
    ) -> CandidateIndex:
        """Takes the index as it is.

        Args:
            cand_to_user: `[B]`, integer, values in `[0, U)`, any order.
            num_users: U; None means the largest value plus one (0 when B = 0).
        Returns: the index, on the device of `cand_to_user`.
        Errors: TypeError when it is not of an integer dtype; ValueError when it has not one
            dimension, a value lies outside `[0, U)`, or U or B exceeds int32.
        Cost: one pass over the B values; reads results back, so it waits for the device.
        """
        index = _integer_vector("cand_to_user", cand_to_user)
        if num_users is None:
            num_users = int(index.max()) + 1 if index.numel() else 0
        return _build(index, num_users)

    @classmethod
    def from_counts(cls, counts: Tensor | Sequence[int]) -> CandidateIndex:
        """Candidates grouped by user, in user order.

        Args:
            counts: `[U]`, integer, how many candidates each user has; 0 is allowed.
        Returns: a sorted index with B = sum of the counts.
        Errors: TypeError when not of an integer dtype; ValueError when it has not one dimension,
            a count is negative, or B exceeds int32.
        """
        counts = _integer_vector("counts", counts)
        if counts.numel() and int(counts.min()) < 0:
            user = int(counts.argmin())
            raise ValueError(
                f"CandidateIndex: counts must be >= 0; got counts[{user}] = {int(counts[user])}"
            )
        counts = counts.long()
        if counts.numel():  # a count alone may be too large for their sum
            _check_num_candidates(max(int(counts.max()), int(counts.sum())))
        users = torch.arange(counts.numel(), device=counts.device)
        return _build(torch.repeat_interleave(users, counts), counts.numel())

    @classmethod
    def from_request_ids(cls, request_ids: Tensor | Iterable[Hashable]) -> CandidateIndex:
        """One user per distinct request id, numbered in order of first appearance.

        `first_candidates()` of the result says where to take each user's features from when the
        data still repeat them for every candidate: `x_user = x[index.first_candidates()]`.

        Args:
            request_ids: `[B]`, one id per candidate: an integer tensor or any hashable values;
                equal ids need not stand together.
        Returns: the index; sorted exactly when equal ids stand together.
        Errors: as `from_cand_to_user`.
        """
        if isinstance(request_ids, Tensor):
            request_ids = _integer_vector("request_ids", request_ids)
            device = request_ids.device
            ids: Iterable[Hashable] = request_ids.tolist()
        else:
            device = torch.device("cpu")
            ids = request_ids
        number: dict[Hashable, int] = {}
        try:
            index = [number.setdefault(request_id, len(number)) for request_id in ids]
        except TypeError as error:
            raise TypeError(
                "CandidateIndex: request_ids must be an integer tensor or hashable values; "
                f"got {request_ids!r}: {error}"
            ) from error
        return _build(torch.tensor(index, dtype=torch.int64, device=device), len(number))

    def counts(self) -> Tensor:
        """Candidates of each user, int64 `[U]`."""
        return torch.bincount(self.cand_to_user, minlength=self.num_users)

    def first_candidates(self) -> Tensor:
        """The first candidate row of each user, int64 `[U]`.

        Errors: ValueError when a user has no candidate.
        """
        missing = torch.nonzero(self.counts() == 0)
        if missing.numel():
            raise ValueError(
                "CandidateIndex.first_candidates: every user must have a candidate; "
                f"user {int(missing[0])} has none"
            )
        rows = torch.arange(self.num_candidates, device=self.cand_to_user.device)
        first = torch.empty(self.num_users, dtype=torch.int64, device=rows.device)
        return first.scatter_reduce(
            0, self.cand_to_user.long(), rows, reduce="amin", include_self=False
        )

    def to(self, device: torch.device | str) -> CandidateIndex:
        """The same index on another device."""
        offsets = None if self.user_offsets is None else self.user_offsets.to(device)
        return CandidateIndex(self.cand_to_user.to(device), self.num_users, self.sorted, offsets)


def as_cand_to_user(index: CandidateIndex | Tensor) -> Tensor:
    """The tensor that operators take, from either form of the index."""
    return index.cand_to_user if isinstance(index, CandidateIndex) else index


def _integer_vector(name: str, values: Tensor | Sequence[int]) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"CandidateIndex: {name} must be a tensor or a list of ints; got {values!r}"
        ) from error
    if not isinstance(values, Tensor) and tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"CandidateIndex: {name} must be of an integer dtype; got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(
            f"CandidateIndex: {name} must have one dimension; got shape {tuple(tensor.shape)}"
        )
    return tensor


def _check_num_candidates(num_candidates: int) -> None:
    if num_candidates > _INT32_MAX:
        raise ValueError(
            f"CandidateIndex: at most 2**31 - 1 candidates are allowed; got {num_candidates}"
        )


def _build(index: Tensor, num_users: int) -> CandidateIndex:
    if not isinstance(num_users, Integral) or not 0 <= num_users <= _INT32_MAX:
        raise ValueError(
            f"CandidateIndex: num_users must be an int in [0, 2**31); got {num_users!r}"
        )
    _check_num_candidates(index.numel())
    if index.numel():
        outside = (index < 0) | (index >= num_users)
        if bool(outside.any()):
            row = int(outside.int().argmax())
            raise ValueError(
                f"CandidateIndex: cand_to_user values must be in [0, {num_users}) "
                f"(num_users = {num_users}); got cand_to_user[{row}] = {int(index[row])}"
            )
    is_sorted = bool((index[1:] >= index[:-1]).all())
    offsets = None
    if is_sorted:
        counts = torch.bincount(index, minlength=num_users)
        offsets = torch.zeros(num_users + 1, dtype=torch.int32, device=index.device)
        offsets[1:] = counts.cumsum(0)
    return CandidateIndex(index.to(torch.int32).contiguous(), num_users, is_sorted, offsets)
