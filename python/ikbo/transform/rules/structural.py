# SPDX-License-Identifier: Apache-2.0
"""Operators that only move data keep the form (A22)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Merged, Rows, Size, Sum, User
from ikbo.transform.parts import rejoined
from ikbo.transform.pending import Reordered, Scaled
from ikbo.transform.rules.linear import swapped
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.cat.default, first=True)
def cat_reordered(walk: Walk, tensors: Sequence[Form], dim: int = 0) -> Reordered | None:
    """A6, A11: before: cat([Reordered(x, order), y], 1); after: Reordered(cat([x, y], 1), ...)."""
    axis = f.normal_axis(dim, f.rank(tensors[0]))
    if not any(isinstance(x, Reordered) and x.axis == axis for x in tensors):
        return None
    inside: list[Form] = []
    order: list[int] = []
    start = 0
    for x in tensors:
        if isinstance(x, Reordered) and x.axis == axis:
            inside.append(x.x)
            order += [start + place for place in x.order]
        else:
            inside.append(x)
            order += range(start, start + f.width(x, axis))
        start += f.width(inside[-1], axis)
    whole = walk.apply(aten.cat.default, inside, axis)
    is_concat = isinstance(whole, Concat) and whole.axis == axis
    return Reordered(whole, tuple(order)) if is_concat else None


@rule(aten.cat.default)
def cat(walk: Walk, tensors: Sequence[Form], dim: int = 0) -> Concat | None:
    """Parts of different origin stay apart.

    before: cat([expand(u), c], 1)    after: Concat(1, [User u, Cand c])
    """
    parts: list[Any] = []
    axis = f.normal_axis(dim, f.rank(tensors[0]))
    if any(isinstance(x, Merged) for x in tensors) or _is_across(tensors, axis):
        return None
    for x in tensors:
        if isinstance(x, Concat) and x.axis == axis:
            parts.extend(x.parts)
        elif isinstance(x, Const | User | Cand):
            parts.append(x)
        else:
            parts.append(Cand(walk.materialise(x, "cat reads it whole"), x.rows))
    rows = {x.rows for x in parts}
    if len(rows) != 1 or len({f.dtype(x) for x in parts}) != 1:
        return None
    where = rows.pop()
    mixed = any(isinstance(x, User) for x in parts) and any(isinstance(x, Cand) for x in parts)
    if where is None or where.axis == axis or not mixed:
        return None
    return Concat(axis, tuple(rejoined(walk, parts, axis)), where)


def _is_across(tensors: Sequence[Form], axis: int) -> bool:
    """Whether concatenations along one other axis are joined, each piece with its like."""
    return {x.axis for x in tensors if isinstance(x, Concat)} - {axis} != set() and all(
        isinstance(x, Concat | Const | User) for x in tensors
    )


@rule(aten.hstack.default)
def hstack(walk: Walk, tensors: Sequence[Form]) -> Form | None:
    """before: hstack([u, c]); after: cat([u, c], 1)."""
    return walk.apply(aten.cat.default, tensors, 1) if f.rank(tensors[0]) > 1 else None


@rule(aten.stack.default)
def stack(walk: Walk, tensors: Sequence[Form], dim: int = 0) -> Form:
    """before: stack([u, c], 1); after: cat([unsqueeze(u, 1), unsqueeze(c, 1)], 1)."""
    axis = f.normal_axis(dim, f.rank(tensors[0]) + 1)
    parts = [walk.apply(aten.unsqueeze.default, x, axis) for x in tensors]
    return walk.apply(aten.cat.default, parts, axis)


@rule(aten.clone.default, aten.alias.default, aten.detach.default)
def identity(walk: Walk, x: Form, **_: Any) -> Form:
    """A copy of a value is the value: the model's graph has no in-place operators left."""
    return x


@rule(aten.permute.default)
def permute(walk: Walk, x: Form, dims: Sequence[int]) -> Form | None:
    """Axes move in every part; a permutation and its inverse cancel.

    before: permute(Concat(2, [u, c]), [0, 2, 1])    after: Concat(1, [permute(u), permute(c)])
    """
    order = tuple(f.normal_axis(d, f.rank(x)) for d in dims)
    if order == tuple(range(len(order))):
        return x
    if isinstance(x, Sum):
        return swapped(x) if order == (0, 2, 1) and not x.is_shared else None
    if isinstance(x, Concat):
        if x.base is not None:
            order, x = tuple(x.dims[d] for d in order), x.base
            if order == tuple(range(len(order))):
                return x
        parts = tuple(walk.apply(aten.permute.default, part, order) for part in x.parts)
        return Concat(order.index(x.axis), parts, _moved(x.rows, order), base=x, dims=order)
    if isinstance(x, Merged):
        return _permuted_merged(walk, x, order)
    if isinstance(x, Reordered):
        moved = walk.apply(aten.permute.default, x.x, dims)
        return replace(x, x=moved) if isinstance(moved, Concat) else None
    if isinstance(x, Scaled):
        inside, gain = (walk.apply(aten.permute.default, y, dims) for y in (x.x, x.gain))
        return replace(x, x=inside, gain=gain) if isinstance(inside, Concat) else None
    if isinstance(x, Const):
        rows = None if x.rows is None else _moved(x.rows, order)
        return walk.fold(lambda: x.tensor.permute(order), x.name, rows)
    if not isinstance(x, User | Cand) or x.rows is None:
        return None
    if x.dims is not None:
        order = tuple(x.dims[d] for d in order)
        x = x.base  # type: ignore[assignment]
        if order == tuple(range(len(order))):
            return x
    assert isinstance(x, User | Cand) and x.rows is not None
    keep = None if x.keep is None else walk.apply(aten.permute.default, x.keep, order)
    rows = _moved(x.rows, order)
    return type(x)(x.tensor.permute(order), rows, base=x, dims=order, keep=keep)


def _permuted_merged(walk: Walk, x: Merged, order: tuple[int, ...]) -> Merged:
    """Batch and concatenation stay neighbours."""
    batch = x.axis
    apart: list[int] = []
    for d in order:
        apart += [batch, batch + 1] if d == batch else [d + (d > batch)]
    concat = walk.apply(aten.permute.default, x.x, apart)
    assert isinstance(concat, Concat)
    return Merged(concat)


def _moved(rows: Rows, order: tuple[int, ...]) -> Rows:
    return replace(rows, axis=order.index(rows.axis))


@rule(aten.transpose.int)
def transpose(walk: Walk, x: Form, dim0: int, dim1: int) -> Form:
    """before: transpose(x, i, j); after: permute(x, ...)."""
    order = list(range(f.rank(x)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return walk.apply(aten.permute.default, x, order)


@rule(aten.t.default)
def t(walk: Walk, x: Form) -> Form:
    """before: t(x); after: permute(x, [1, 0])."""
    return x if f.rank(x) < 2 else walk.apply(aten.permute.default, x, [1, 0])


@rule(aten.expand.default)
def expand(walk: Walk, x: Form, sizes: Sequence[Any], **_: Any) -> Form | None:
    """A constant that is expanded to the batch stays one row; other forms expand within a row.

    before: expand(Const [1, d], [B, d])    after: Const [1, d], its row shared by the batch
    """
    old = f.shape(x)
    new = len(sizes) - len(old)
    old = [1] * new + old
    dims = [o if isinstance(s, int) and s == -1 else s for o, s in zip(old, sizes, strict=True)]
    if isinstance(x, Const) and x.rows is None:
        return _one_row(walk, x, old, dims, lambda: x.tensor.expand([f.at(d, 1) for d in dims]))
    if isinstance(x, Concat):
        axis, rows = x.axis + new, replace(x.rows, axis=x.rows.axis + new)
        if not (f.same(dims[axis], old[axis]) and f.same(dims[rows.axis], rows.length())):
            return None
        widths = [*sizes[:axis], -1, *sizes[axis + 1 :]]
        parts = [walk.apply(aten.expand.default, part, widths) for part in x.parts]
        return Concat(axis, tuple(parts), rows)
    if not isinstance(x, Const | User | Cand) or x.rows is None:
        return None
    rows = replace(x.rows, axis=x.rows.axis + new)
    if not f.same(dims[rows.axis], rows.length()):
        return None
    if isinstance(x, Const):
        return walk.fold(lambda: x.tensor.expand([f.at(d, 1) for d in dims]), x.name, rows)
    n = walk.num_users if isinstance(x, User) else walk.num_candidates
    keep = None if x.keep is None else walk.apply(aten.expand.default, x.keep, sizes)
    out = x.tensor.expand([f.at(d, n) for d in dims])
    dead = x.dead if out.shape[-2:] == x.tensor.shape[-2:] else None
    return type(x)(out, rows, keep=keep, dead=dead, spread=(x.spread or x) if new == 0 else None)


@rule(aten.repeat.default)
def repeat(walk: Walk, x: Form, repeats: Sequence[Any]) -> Form | None:
    """before: repeat(Const [k, d], [B, 1]); after: Const [k, d], its rows shared by the batch.

    An axis of size 1 of a value with a batch is expanded.
    """
    if isinstance(x, User | Cand) and x.rows is not None and len(repeats) == f.rank(x):
        ones = [f.same(d, 1) for d in f.shape(x)]
        if all(one or f.same(n, 1) for one, n in zip(ones, repeats, strict=True)):
            sizes = [n if one else -1 for one, n in zip(ones, repeats, strict=True)]
            return walk.apply(aten.expand.default, x, sizes)
    if not isinstance(x, Const) or x.rows is not None:
        return None
    old = [1] * (len(repeats) - x.tensor.ndim) + f.shape(x)
    return _one_row(walk, x, old, repeats, lambda: x.tensor.repeat([f.at(r, 1) for r in repeats]))


@rule(aten.tile.default)
def tile(walk: Walk, x: Form, dims: Sequence[Any]) -> Form:
    """before: tile(x, [B, 1]); after: repeat(x, [B, 1])."""
    return walk.apply(aten.repeat.default, x, [*[1] * (f.rank(x) - len(dims)), *dims])


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(
    walk: Walk, x: Form, repeats: Any, dim: int | None = None, **_: Any
) -> Const | None:
    """before: repeat_interleave(Const [k, d], B, 0); after: Const [k, d], each row shared by B."""
    is_batch = isinstance(repeats, Size) and repeats.is_batch()
    if not isinstance(x, Const) or x.rows is not None or dim is None or not is_batch:
        return None
    axis = f.normal_axis(dim, x.tensor.ndim)
    return Const(x.tensor, Rows(axis, outer=x.tensor.shape[axis]), x.name)


def _one_row(
    walk: Walk, x: Const, old: list[Any], new: Sequence[Any], compute: Callable[[], Tensor]
) -> Const | None:
    """A constant that was repeated to the batch along at most one axis, from `old` sizes."""
    batch = [a for a, d in enumerate(new) if isinstance(d, Size)]
    if len(batch) > 1 or (batch and not new[batch[0]].is_batch()):
        return None
    rows = Rows(batch[0], inner=old[batch[0]]) if batch else None
    return walk.fold(compute, x.name, rows)
