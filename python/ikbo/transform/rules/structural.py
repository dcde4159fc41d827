# SPDX-License-Identifier: Apache-2.0
"""Operators that only move data keep the form (A22)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Rows, Size, Sum, User
from ikbo.transform.rules.linear import swapped
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.cat.default)
def cat(walk: Walk, tensors: Sequence[Form], dim: int = 0) -> Concat | None:
    """Parts of different origin stay apart.

    before: cat([expand(u), c], 1)    after: Concat(1, [User u, Cand c])
    """
    parts: list[Any] = []
    axis = f.normal_axis(dim, f.rank(tensors[0]))
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
    return Concat(axis, tuple(parts), where)


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
        parts = tuple(walk.apply(aten.permute.default, part, dims) for part in x.parts)
        return Concat(order.index(x.axis), parts, _moved(x.rows, order))
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


@rule(aten.unsqueeze.default)
def unsqueeze(walk: Walk, x: Form, dim: int) -> Form | None:
    """A new axis of size 1 in every part."""
    axis = f.normal_axis(dim, f.rank(x) + 1)
    dims = f.shape(x)
    return reshaped(walk, x, [*dims[:axis], 1, *dims[axis:]], lambda t: t.unsqueeze(axis))


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(walk: Walk, x: Form, dim: Any = None) -> Form | None:
    """Axes of size 1 go from every part; the batch, and an axis of another size, stay."""
    dims = f.shape(x)
    if dim is None:
        dim = range(len(dims))
    axes = [f.normal_axis(d, len(dims)) for d in ([dim] if isinstance(dim, int) else dim)]
    gone = tuple(a for a in axes if f.same(dims[a], 1))
    kept = [d for a, d in enumerate(dims) if a not in gone]
    return reshaped(walk, x, kept, lambda t: t.squeeze(gone[0] if len(gone) == 1 else gone))


@rule(aten.view.default, aten._unsafe_view.default)
def view(walk: Walk, x: Form, shape: Sequence[Any]) -> Form | None:
    """Another shape of the same elements, in every part.

    before: view(Concat(1, [u, c]), [B, -1])    after: Concat(1, [view(u), view(c)])
    The batch may be merged with its neighbours and split off again.
    """
    dims = list(shape)
    hidden = [a for a, d in enumerate(dims) if isinstance(d, int) and d == -1]
    if hidden:
        known = [d for a, d in enumerate(dims) if a != hidden[0]]
        old = f.shape(x)
        missing = Size(lambda n: f.product(old, n) // f.product(known, n))
        probes = {missing.at(n) for n in f.PROBES}
        dims[hidden[0]] = probes.pop() if len(probes) == 1 else missing
    return reshaped(walk, x, dims)


def reshaped(
    walk: Walk, x: Form, dims: list[Any], direct: Callable[[Tensor], Tensor] | None = None
) -> Form | None:
    """The form with another shape; None where the batch cannot be followed.

    Args:
        dims: the shape, without -1.
        direct: a plainer operator that gives a tensor this shape.
    """
    if isinstance(x, Sum):
        x = Cand(walk.materialise(x), x.rows)
    if isinstance(x, Concat):
        return _reshaped_concat(walk, x, dims, direct)
    if isinstance(x, Const) and x.rows is None and not any(isinstance(d, Size) for d in dims):
        return walk.fold(lambda: x.tensor.reshape(dims), x.name)
    if not isinstance(x, Const | User | Cand) or x.rows is None:
        return None
    rows = _rows_after(x, dims)
    if rows is None:
        return None
    if isinstance(x, Const):
        return walk.fold(lambda: x.tensor.reshape([f.at(d, 1) for d in dims]), x.name, rows)
    n = walk.num_users if isinstance(x, User) else walk.num_candidates
    keep = None if x.keep is None else reshaped(walk, x.keep, dims)
    origin = x.base if x.base is not None and x.dims is None else x
    if _same_shape(f.shape(origin), dims):
        return origin
    if direct is not None and origin is x:
        return type(x)(direct(x.tensor), rows, base=x, keep=keep)
    tensor = origin.tensor.reshape([f.at(d, n) for d in dims])  # type: ignore[union-attr]
    return type(x)(tensor, rows, base=origin, keep=keep)


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(f.same(i, j) for i, j in zip(a, b, strict=True))


def _rows_after(x: Any, dims: list[Any]) -> Rows | None:
    """Where the batch is after a reshape: what lies before and behind it in memory stays there."""
    old = f.shape(x)
    rows = x.rows
    before = f.product(old[: rows.axis], 1) * rows.outer
    behind = rows.inner * f.product(old[rows.axis + 1 :], 1)
    for axis, dim in enumerate(dims):
        head, tail = f.product(dims[:axis], 1), f.product(dims[axis + 1 :], 1)
        if before % head or behind % tail:
            continue
        found = Rows(axis, before // head, behind // tail)
        others_static = not any(
            isinstance(d, Size) and not f.same(d, f.at(d, 1))
            for d in dims[:axis] + dims[axis + 1 :]
        )
        if others_static and f.same(dim, found.length()):
            return found
    return None


def _reshaped_concat(walk: Walk, x: Concat, dims: list[Any], direct: Any) -> Concat | None:
    """Each part takes the new shape, where no new axis crosses the border between two parts."""
    old = f.shape(x)
    behind = old[x.axis + 1 :]
    for axis in range(len(dims)):
        tail = dims[axis + 1 :]
        if not _same_product(old[: x.axis], dims[:axis]):
            continue
        sizes = [_quotient([f.width(part, x.axis), *behind], tail) for part in x.parts]
        if any(size is None for size in sizes):
            continue
        parts = [
            reshaped(walk, part, [*dims[:axis], size, *tail], direct)
            for part, size in zip(x.parts, sizes, strict=True)
        ]
        if (
            all(isinstance(p, Const | User | Cand) for p in parts)
            and len({p.rows for p in parts}) == 1
        ):  # type: ignore[union-attr]
            return Concat(axis, tuple(parts), parts[0].rows)  # type: ignore[arg-type,union-attr]
    return None


def _same_product(a: list[Any], b: list[Any]) -> bool:
    return f.same(a, b)


def _quotient(a: list[Any], b: list[Any]) -> int | None:
    """The product of `a` over that of `b`, if it is one whole number for every batch size."""
    ratios = set()
    for n in f.PROBES:
        whole, rest = divmod(f.product(a, n), f.product(b, n))
        ratios.add(None if rest else whole)
    return ratios.pop() if len(ratios) == 1 else None


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
    if not isinstance(x, Const | User | Cand) or x.rows is None:
        return None
    rows = replace(x.rows, axis=x.rows.axis + new)
    if not f.same(dims[rows.axis], rows.length()):
        return None
    if isinstance(x, Const):
        return walk.fold(lambda: x.tensor.expand([f.at(d, 1) for d in dims]), x.name, rows)
    n = walk.num_users if isinstance(x, User) else walk.num_candidates
    keep = None if x.keep is None else walk.apply(aten.expand.default, x.keep, sizes)
    return type(x)(x.tensor.expand([f.at(d, n) for d in dims]), rows, keep=keep)


@rule(aten.repeat.default)
def repeat(walk: Walk, x: Form, repeats: Sequence[Any]) -> Const | None:
    """before: repeat(Const [1, d], [B, 1]); after: Const [1, d], its row shared by the batch."""
    if not isinstance(x, Const) or x.rows is not None:
        return None
    old = [1] * (len(repeats) - x.tensor.ndim) + f.shape(x)
    return _one_row(walk, x, old, repeats, lambda: x.tensor.repeat([f.at(r, 1) for r in repeats]))


def _one_row(
    walk: Walk, x: Const, old: list[Any], new: Sequence[Any], compute: Callable[[], Tensor]
) -> Const | None:
    """A constant that was repeated to the batch along at most one axis, of size 1 before."""
    batch = [a for a, d in enumerate(new) if isinstance(d, Size)]
    if len(batch) > 1 or (batch and not (new[batch[0]].is_batch() and old[batch[0]] == 1)):
        return None
    return walk.fold(compute, x.name, Rows(batch[0]) if batch else None)
