# SPDX-License-Identifier: Apache-2.0
"""Another shape of the same elements keeps the form (A22); the batch may merge with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Merged, Rows, Scores, Size, Sum, User
from ikbo.transform.parts import narrow
from ikbo.transform.pending import Affine, Joined, Outer, Scaled
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


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
    if isinstance(x, Joined):
        rows = _rows_after(x, dims)
        if rows is None or rows.axis == len(dims) - 1 or not f.same(dims[-1], f.shape(x)[-1]):
            return None
        return replace(x, rows=rows, view=tuple(dims))
    if isinstance(x, Scaled):
        return _reshaped_scaled(walk, x, dims)
    if isinstance(x, Scores | Outer):
        return None
    if isinstance(x, Merged):
        x, direct = x.x, None
    if isinstance(x, Concat):
        return (
            _reshaped_concat(walk, x, dims, direct)
            or _interleaved(walk, x, dims)
            or _merged(walk, x, dims)
        )
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
    old = f.shape(x)
    dead = x.dead if _same_shape(old[-2:], dims[-2:]) else None
    if direct is not None and origin is x:
        return type(x)(direct(x.tensor), rows, base=x, keep=keep, dead=dead)
    tensor = origin.tensor.reshape([f.at(d, n) for d in dims])  # type: ignore[union-attr]
    return type(x)(tensor, rows, base=origin, keep=keep, dead=dead)


def _reshaped_scaled(walk: Walk, x: Scaled, dims: list[Any]) -> Scaled | None:
    if isinstance(x.x, Affine):
        return None
    inside = reshaped(walk, x.x, dims)
    if not isinstance(inside, Concat):
        return None
    sizes = [*dims[: inside.axis], 1, *dims[inside.axis + 1 :]]
    gain = reshaped(walk, x.gain, sizes)
    return replace(x, x=inside, gain=gain) if isinstance(gain, Cand) else None


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


# Parts of one concatenation; they cost time while the graph is made, not when it runs.
_MAX_PARTS = 1024


def _interleaved(walk: Walk, x: Concat, dims: list[Any]) -> Concat | None:
    """The axis of the concatenation is merged with axes before it: its parts take turns.

    before: view(Concat(2, [u [U, K, 1], c [B, K, 1]]), [B, 2 K])
    after:  Concat(1, [u[:, 0:1], c[:, 0:1], u[:, 1:2], ...])
    """
    old = f.shape(x)
    for first in range(x.axis - 1, x.rows.axis, -1):
        turns = f.product(old[first : x.axis], 1)
        if turns == 1 or turns * len(x.parts) > _MAX_PARTS:
            continue
        for axis in range(len(dims)):
            behind = _quotient([*old[x.axis + 1 :]], dims[axis + 1 :])
            if not _same_product(old[:first], dims[:axis]) or behind is None:
                continue
            wholes = []
            for part in x.parts:
                size = turns * f.width(part, x.axis) * behind
                wholes.append(reshaped(walk, part, [*dims[:axis], size, *dims[axis + 1 :]]))
            if not all(isinstance(p, Const | User | Cand) for p in wholes):
                continue
            widths = [f.width(part, x.axis) * behind for part in x.parts]
            parts = [
                narrow(walk, whole, axis, turn * width, width)
                for turn in range(turns)
                for whole, width in zip(wholes, widths, strict=True)
            ]
            return Concat(axis, tuple(parts), wholes[0].rows)  # type: ignore[arg-type,union-attr]
    return None


def _merged(walk: Walk, x: Concat, dims: list[Any]) -> Merged | None:
    """The batch takes in the axis of the concatenation, its neighbour.

    before: view(Concat(1, [u, c]), [B * K, ...])    after: Merged(Concat(1, [u, c]))
    """
    rows, old, is_inner = _rows_after(x, dims), f.shape(x), x.axis > x.rows.axis
    low, high = sorted((x.axis, x.rows.axis))
    if rows is None or f.product(old[low + 1 : high], 1) != 1:
        return None
    total, (count, plain) = old[x.axis], rows.apart(is_inner)
    if x.rows.apart(is_inner)[0] != 1 or count % total or not (is_inner or count == total):
        return None
    head, tail = dims[: rows.axis], dims[rows.axis + 1 :]
    parts = []
    for part in x.parts:
        size = f.width(part, x.axis) * (count // total)
        pair = [plain.length(), size] if is_inner else [size, plain.length()]
        parts.append(reshaped(walk, part, [*head, *pair, *tail]))
    if not all(isinstance(p, Const | User | Cand) and p.rows == plain for p in parts):
        return None
    axis = rows.axis + is_inner
    return Merged(Concat(axis, tuple(parts), plain))  # type: ignore[arg-type]


def _same_product(a: list[Any], b: list[Any]) -> bool:
    return f.same(a, b)


def _quotient(a: list[Any], b: list[Any]) -> int | None:
    """The product of `a` over that of `b`, if it is one whole number for every batch size."""
    ratios = set()
    for n in f.PROBES:
        whole, rest = divmod(f.product(a, n), f.product(b, n))
        ratios.add(None if rest else whole)
    return ratios.pop() if len(ratios) == 1 else None
