# SPDX-License-Identifier: Apache-2.0
"""A recorded batch taken apart into users, candidates and the index."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ikbo.candidate_index import CandidateIndex
from ikbo.legacy.rows import arguments, bits_of, index_of
from ikbo.transform import inputs
from ikbo.transform.capture import split_packed
from ikbo.transform.packed import apart


@dataclass(frozen=True, eq=False)
class SharedBatch:
    """A batch with one row per user: `model(**inputs, cand_to_user=index.cand_to_user)`.

    `inputs` is as a transformed module takes them, positional (tuple) or by keyword (dict): user
    inputs `[U, ...]`, the others `[B, ...]` in the order of the batch, packed ones as their parts.
    """

    inputs: tuple[Any, ...] | dict[str, Any]
    index: CandidateIndex


def deduplicate(
    batch: tuple[Any, ...] | Mapping[str, Any],
    request_ids: Tensor | Iterable[Hashable] | None,
    request_only: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    model: nn.Module | None = None,
    share_users: bool = False,
) -> SharedBatch:
    """Takes a batch with user rows repeated apart, losslessly.

    Args:
        batch, request_only, columns, row_counts, model: as in `find_request_only` and
            `ikbo.transform`.
        request_ids: `[B]`, the request of each row; None: rows with equal user values are one user.
        share_users: whether requests with equal user values become one user.

    Returns:
        One user per request, in the order of first appearance, and the index. `x_user[index]` and
        the candidates' tensors are the batch's, bit by bit.

    Errors:
        TypeError, ValueError: an argument is not as described, or a user value differs between rows
            of one request.
    """
    args, kwargs, signature = arguments(batch, model)
    named = apart(inputs.named_leaves(signature, args, kwargs), row_counts)
    given = inputs.roles(named, request_only, columns)
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}
    parts, names, roles = split_packed(named, given)
    _, structure = pytree.tree_flatten((args, kwargs))
    values, structure = pytree.tree_flatten(pytree.tree_unflatten(parts, structure))
    is_user = [name is not None and roles[name] == "user" for name in names]
    users = {str(name): x for name, x, own in zip(names, values, is_user, strict=True) if own}
    if request_ids is None:
        index = _by_value(users, index_of(tensors, range(len(next(iter(tensors.values()))))))
    else:
        index = index_of(tensors, request_ids)
        _check_constant(users, index)
        index = _by_value(users, index) if share_users else index
    rows = index.first_candidates()
    shared = [x[rows.to(x.device)] if own else x for x, own in zip(values, is_user, strict=True)]
    args, kwargs = pytree.tree_unflatten(shared, structure)
    device = next(iter(tensors.values())).device
    return SharedBatch(kwargs if isinstance(batch, Mapping) else args, index.to(device))


def _check_constant(users: Mapping[str, Tensor], index: CandidateIndex) -> None:
    first = index.first_candidates()[index.cand_to_user.long()]
    for name, x in users.items():
        bits = bits_of(x)
        wrong = (bits != bits[first]).flatten(1).any(1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"ikbo.legacy: user input {name!r} must be the same for all candidates of a "
                f"request; rows {int(first[row])} and {row} of one request differ"
            )


def _by_value(users: Mapping[str, Tensor], index: CandidateIndex) -> CandidateIndex:
    """The index with requests of equal user values as one user."""
    rows = index.first_candidates()
    bits = torch.cat([bits_of(x)[rows].flatten(1) for x in users.values()], 1).numpy()
    users_of = CandidateIndex.from_request_ids(row.tobytes() for row in bits)
    return CandidateIndex.from_request_ids(users_of.cand_to_user[index.cand_to_user.long()])
