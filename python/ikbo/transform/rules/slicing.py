# SPDX-License-Identifier: Apache-2.0
"""Ranges of a concatenation give its parts back, and constructors that are given the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Concat, Const, Form, PerBatch, Rows, Size
from ikbo.transform.parts import narrow
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


def _range(walk: Walk, x: Concat, lo: int, hi: int) -> Form:
    """The range [lo, hi) of the axis of a concatenation."""
    start, parts = 0, []
    for part in x.parts:
        width = f.width(part, x.axis)
        first, last = max(lo - start, 0), min(hi - start, width)
        if first < last:
            parts.append(narrow(walk, part, x.axis, first, last - first))
        start += width
    return parts[0] if len(parts) == 1 else walk.apply(aten.cat.default, parts, x.axis)


@rule(aten.slice.Tensor)
def slice_(
    walk: Walk, x: Form, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Form | None:
    """before: slice(Concat(1, [u, c]), 1, 0, K_user); after: u. A full slice is the value."""
    dims, axis = f.shape(x), f.normal_axis(dim, f.rank(x))
    lo = 0 if start is None else start
    hi = f.LAST if end is None else end
    if step == 1 and isinstance(lo, int) and lo == 0 and (_is_last(hi) or f.same(hi, dims[axis])):
        return x
    bounds = (lo, hi)
    if not isinstance(x, Concat) or x.axis != axis or step != 1:
        return None
    if not all(isinstance(bound, int) for bound in bounds):
        return None
    lo, hi, _ = slice(lo, hi).indices(dims[axis])
    return _range(walk, x, lo, hi) if lo < hi else None


def _is_last(bound: Any) -> bool:
    return isinstance(bound, int) and bound == f.LAST


@rule(aten.select.int)
def select(walk: Walk, x: Form, dim: int, index: Any) -> Form | None:
    """before: select(Concat(1, [u, c]), 1, 0); after: select(u, 1, 0)."""
    if not isinstance(x, Concat) or x.axis != f.normal_axis(dim, f.rank(x)):
        return None
    at = f.normal_axis(index, f.shape(x)[x.axis])
    piece = _range(walk, x, at, at + 1)
    return walk.apply(aten.squeeze.dim, piece, x.axis)


@rule(aten.split_with_sizes.default, aten.split.Tensor)
def split(walk: Walk, x: Form, sizes: Any, dim: int = 0) -> tuple[Form, ...] | None:
    """before: split(Concat(1, [u, c]), [K_user, K_cand], 1); after: (u, c)."""
    if not isinstance(x, Concat) or x.axis != f.normal_axis(dim, f.rank(x)):
        return None
    total = f.shape(x)[x.axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_range(walk, x, end - size, end) for end, size in zip(ends, sizes, strict=True))


@rule(aten.unbind.int)
def unbind(walk: Walk, x: Form, dim: int = 0) -> tuple[Form, ...] | None:
    """before: unbind(Concat(1, [u, c]), 1); after: the rows of u and of c."""
    if not isinstance(x, Concat) or x.axis != f.normal_axis(dim, f.rank(x)):
        return None
    return tuple(walk.apply(aten.select.int, x, x.axis, i) for i in range(f.shape(x)[x.axis]))


@rule(aten.full.default)
def full(walk: Walk, sizes: Sequence[Any], value: Any, **options: Any) -> Const | None:
    """before: full([B, d], value); after: one row [1, d] that the batch shares."""
    batch = [a for a, d in enumerate(sizes) if isinstance(d, Size)]
    if len(batch) != 1 or isinstance(value, Size):
        return None
    size = sizes[batch[0]]
    rows = Rows(batch[0], 1, size.at(1))
    if not f.same(size, rows.length()):
        return None
    one_row = [f.at(d, 1) for d in sizes]
    return walk.fold(lambda: aten.full.default(one_row, value, **options), "row", rows)


def _filled(target: Any, value: float) -> None:
    @rule(target)
    def construct(walk: Walk, sizes: Sequence[Any], **options: Any) -> Form:
        """before: zeros([B, d]); after: full([B, d], 0)."""
        options.setdefault("dtype", torch.get_default_dtype())
        return walk.apply(aten.full.default, sizes, value, **options)

    construct.__name__ = target._opname


def _new_filled(target: Any, value: float | None) -> None:
    @rule(target)
    def construct(walk: Walk, x: Form, sizes: Sequence[Any], *fill: Any, **options: Any) -> Form:
        """before: x.new_zeros([B, d]); after: full([B, d], 0) with x's type and device."""
        like = f.sample(x)
        options = {"dtype": like.dtype, "device": like.device} | options
        return walk.apply(aten.full.default, sizes, fill[0] if fill else value, **options)

    construct.__name__ = target._opname


def _like(target: Any) -> None:
    @rule(target)
    def construct(walk: Walk, x: Form, *fill: Any, **options: Any) -> Const | None:
        """before: zeros_like(x); after: one row that the batch shares."""
        if x.rows is None:
            return None
        dims, like = [f.at(d, 1) for d in f.shape(x)], f.sample(x)
        kind, device = like.dtype, like.device
        return walk.fold(
            lambda: target(torch.empty(dims, dtype=kind, device=device), *fill, **options),
            "row",
            x.rows,
        )

    construct.__name__ = target._opname


_filled(aten.zeros.default, 0)
_filled(aten.ones.default, 1)
_new_filled(aten.new_zeros.default, 0)
_new_filled(aten.new_ones.default, 1)
_new_filled(aten.new_full.default, None)
for _target in (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default):
    _like(_target)


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(walk: Walk, *args: Any, **kwargs: Any) -> PerBatch | None:
    """before: arange(B); after: a value that is built for the batch of whoever reads it."""
    if not any(isinstance(x, Size) for x in args):
        return None
    target = (aten.arange.default, aten.arange.start, aten.arange.start_step)[len(args) - 1]
    return PerBatch(lambda n: target(*[f.at(x, n) for x in args], **kwargs))
