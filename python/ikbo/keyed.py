# SPDX-License-Identifier: Apache-2.0
"""Keyed jagged features, as TorchRec's KeyedJaggedTensor holds them, by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ikbo.candidate_index import CandidateIndex

_INTEGER_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class KeyedJagged:
    """Features of a batch with any number of values each; the arguments of a KeyedJaggedTensor.

    Attributes:
        keys: F names.
        values: `[T]`, the values of the first key, row after row, then those of the second.
        lengths: `[F * rows]`, integer: how many values each row has, in the same order.
        weights: `[T]` or None: one for each value.
    """

    keys: tuple[str, ...]
    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.lengths.numel() // len(self.keys) if self.keys else 0


def split_by_key(
    keys: Sequence[str],
    values: Tensor,
    lengths: Tensor,
    user_keys: Collection[str],
    index: CandidateIndex | None = None,
    weights: Tensor | None = None,
) -> tuple[KeyedJagged, KeyedJagged]:
    """The user's features and the candidates' of a keyed jagged batch, each with its own batch.

    What each is looked up to, `[U, F_user, D]` and `[B, F_cand, D]`, are inputs of a transformed
    model. With TorchRec, `KeyedJaggedTensor(user.keys, user.values, user.weights, user.lengths)`.

    Args:
        keys: F names, each once.
        values: `[T]`, any dtype: the values of the first key, row after row, then of the second.
        lengths: `[F * rows]`, int32 or int64, >= 0, sum T, in the same order.
        user_keys: which keys are the user's; all of them in `keys`.
        index: of a batch with the users' rows repeated for their candidates: the user part keeps
            one row per user, that of their first candidate. None: both parts keep all rows.
        weights: `[T]` or None.

    Returns:
        The user's part and the candidates' part; keys keep their order.

    Errors:
        TypeError: lengths are not integers.
        ValueError: sizes do not fit, a key is there twice or missing, a user of the index has no
            candidate.

    Cost: one pass over the values; reads sizes back, so it waits for the device.
    """
    keys = tuple(keys)
    rows = _check(keys, values, lengths, user_keys, index, weights)
    everyone = torch.arange(rows, device=lengths.device)
    users = everyone if index is None else index.first_candidates().to(lengths.device)
    begins = lengths.cumsum(0) - lengths
    parts = []
    for is_user, chosen in ((True, users), (False, everyone)):
        places = [i for i, key in enumerate(keys) if (key in set(user_keys)) == is_user]
        first = torch.tensor(places, device=lengths.device, dtype=torch.int64) * rows
        cells = (first[:, None] + chosen).flatten()
        counts = lengths[cells]
        # Of each value its place in its row, from where that row begins.
        within = torch.arange(int(counts.sum()), device=lengths.device)
        shift = begins[cells] - (counts.cumsum(0) - counts)
        taken = within + shift.repeat_interleave(counts)
        some = None if weights is None else weights[taken]
        parts.append(KeyedJagged(tuple(keys[i] for i in places), values[taken], counts, some))
    return parts[0], parts[1]


def _check(
    keys: tuple[str, ...],
    values: Tensor,
    lengths: Tensor,
    user_keys: Collection[str],
    index: CandidateIndex | None,
    weights: Tensor | None,
) -> int:
    """The number of rows."""
    name = "ikbo.split_by_key"
    if len(set(keys)) != len(keys) or not keys:
        raise ValueError(f"{name}: keys must be different names, at least one; got {list(keys)}")
    missing = sorted(set(user_keys) - set(keys))
    if missing:
        raise ValueError(f"{name}: user_keys must be in keys; {missing} are not in {list(keys)}")
    if lengths.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name}: lengths must be int32 or int64; got {lengths.dtype}")
    if lengths.ndim != 1 or lengths.numel() % len(keys):
        raise ValueError(
            f"{name}: lengths must have a multiple of {len(keys)} elements (= keys); "
            f"got {list(lengths.shape)}"
        )
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"{name}: lengths must be >= 0; got {int(lengths.min())}")
    total = int(lengths.sum())
    for argument, tensor in (("values", values), ("weights", weights)):
        if tensor is not None and list(tensor.shape) != [total]:
            raise ValueError(
                f"{name}: {argument} must have {total} elements (= sum of lengths); "
                f"got {list(tensor.shape)}"
            )
    rows = lengths.numel() // len(keys)
    if index is not None and index.num_candidates != rows:
        raise ValueError(
            f"{name}: index must have {rows} candidates (= rows of the batch); "
            f"got {index.num_candidates}"
        )
    return rows
