# SPDX-License-Identifier: Apache-2.0
"""Reductions over a mixed axis (A19), and pooled look-ups."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, PerBatch, Rows, Sum, User
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.sum.dim_IntList)
def sum_(walk: Walk, x: Form, dim: Any, keepdim: bool = False, **options: Any) -> Form | None:
    """A19: a sum over the axis of a concatenation is a sum of sums.

    before: sum(cat([expand(u), c], 1), 1)    after: Sum(sum(u, 1) at U, sum(c, 1) at B)
    """
    if not isinstance(x, Concat) or not dim or not f.dtype(x).is_floating_point:
        return None
    axes = [f.normal_axis(d, f.rank(x)) for d in dim]
    if x.axis not in axes or x.rows.axis in axes:
        return None
    sums = [walk.apply(aten.sum.dim_IntList, p, dim, keepdim, **options) for p in x.parts]
    users = [walk.at_users(s) for s in sums if f.is_user_only(s)]
    cands = [s.tensor for s in sums if isinstance(s, Cand)]
    rows = sums[0].rows
    return Sum(User(sum(users[1:], users[0]), rows), Cand(sum(cands[1:], cands[0]), rows), rows)


@rule(aten.mean.dim)
def mean(walk: Walk, x: Form, dim: Any, keepdim: bool = False, **options: Any) -> Form | None:
    """A19: before: mean(cat([expand(u), c], 1), 1); after: the sum, divided at each batch."""
    if not isinstance(x, Concat) or not dim:
        return None
    axes = [f.normal_axis(d, f.rank(x)) for d in dim]
    total = walk.apply(aten.sum.dim_IntList, x, dim, keepdim, **options) if x.axis in axes else None
    if not isinstance(total, Sum) or x.rows.axis in axes:
        return None
    count = f.product([f.shape(x)[axis] for axis in axes], 1)
    user, cand = walk.evaluate(total.user), walk.evaluate(total.cand)
    return Sum(
        User(user.tensor / count, user.rows), Cand(cand.tensor / count, cand.rows), total.rows
    )


def _combined(target: Any, pairwise: Any) -> None:
    @rule(target)
    def reduce(walk: Walk, x: Form, dim: Any = (), keepdim: bool = False) -> Cand | None:
        """A19: before: amax(cat([expand(u), c], 1), 1); after: maximum(amax(u) at U, amax(c))."""
        axes = [f.normal_axis(d, f.rank(x)) for d in ([dim] if isinstance(dim, int) else dim)]
        if not isinstance(x, Concat) or x.axis not in axes or x.rows.axis in axes:
            return None
        parts = [walk.apply(target, part, dim, keepdim) for part in x.parts]
        users = [walk.at_users(part) for part in parts if f.is_user_only(part)]
        cands = [part.tensor for part in parts if isinstance(part, Cand)]
        if not users or not cands:
            return None
        rows = parts[0].rows
        user = walk.materialise(User(functools.reduce(pairwise, users), rows))
        return Cand(functools.reduce(pairwise, [user, *cands]), rows)

    reduce.__name__ = f"{target._opname}_"


_combined(aten.amax.default, torch.maximum)
_combined(aten.amin.default, torch.minimum)
_combined(aten.logsumexp.default, torch.logaddexp)


def _with_places(target: Any, values: Any) -> None:
    @rule(target)
    def reduce(walk: Walk, x: Form, dim: int, keepdim: bool = False) -> tuple[Form, Form] | None:
        """A19: before: max(cat([u, c], 1), 1); after: amax(...), and places if they are read."""
        if not isinstance(x, Concat) or f.normal_axis(dim, f.rank(x)) != x.axis:
            return None
        out = walk.apply(values, x, [dim], keepdim)
        return out, Cand(target(walk.materialise(x), dim, keepdim)[1], out.rows)

    reduce.__name__ = f"{target._opname}_and_places"


_with_places(aten.max.dim, aten.amax.default)
_with_places(aten.min.dim, aten.amin.default)


@rule(aten.embedding_bag.padding_idx)
def embedding_bag(
    walk: Walk, weight: Form, indices: Form, offsets: Form, *options: Any
) -> tuple[Any, ...] | None:
    """A22: bags of equal size, one per row, pooled at the batch of their indices.

    before: embedding_bag(W, view(expand(ids [U, k]), -1), arange(0, B k, k))    at B
    after:  embedding_bag(W, view(ids, -1), arange(0, U k, k))                   at U
    """
    if not (isinstance(offsets, PerBatch) and isinstance(indices, User)) or indices.rows is None:
        return None
    if not isinstance(weight, Const) or any(isinstance(x, f.FORMS) for x in options):
        return None
    step = indices.rows.inner
    if indices.rows != Rows(0, 1, step) or not _is_strided(walk, offsets, step):
        return None
    out = aten.embedding_bag.padding_idx(
        walk.use(weight), indices.tensor, offsets.make(walk.num_users), *options
    )
    return (User(out[0], Rows()), None, None, None)


def _is_strided(walk: Walk, offsets: PerBatch, step: int) -> bool:
    return walk.constants.fold(lambda: offsets.make(3).tolist() == [0, step, 2 * step])
