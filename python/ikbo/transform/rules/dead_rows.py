# SPDX-License-Identifier: Apache-2.0
"""Rows that nobody reads are not computed (A16)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Concat, Const, Form
from ikbo.transform.parts import cut, joined
from ikbo.transform.rules.masked import bias_of, piece_of
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

Piece = tuple[Any, tuple[int, int], bool]


@rule(aten.scaled_dot_product_attention.default, first=True)
def attention(
    walk: Walk, q: Form, k: Form, v: Form, mask: Form | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Concat | None:  # fmt: skip
    """A16: of a sequence of which only the candidate's rows are read, these alone attend.

    before: sdpa(cat([expand(q_u), q_c], -2), cat([...]), cat([...]))[..., -1, :]
    after:  Concat(-2, [zeros that nobody reads, sdpa(q_c, cat([...]), cat([...]))])
    """
    pieces = _pieces(walk, q)
    if pieces is None or dropout_p or f.rank(k) != f.rank(q):
        return None
    some_of = _rows_of_mask(walk, mask, is_causal, q, k)
    if some_of is None:
        return None
    parts = []
    for part, span, is_live in pieces:
        if is_live:
            some = some_of(span)
            target = aten.scaled_dot_product_attention.default
            parts.append(walk.apply(target, part, k, v, some, **options))
        else:
            parts.append(_zeros(walk, part, f.width(v, f.rank(v) - 1)))
    return joined(walk, parts, q.axis, q.rows)  # type: ignore[union-attr,arg-type]


def _rows_of_mask(
    walk: Walk, mask: Form | None, is_causal: bool, q: Form, k: Form
) -> Callable[[tuple[int, int]], Any] | None:
    """What gives the mask of some rows; None where it is not known."""
    if mask is None or (isinstance(mask, Const) and mask.rows is None):
        sizes = (f.width(q, f.rank(q) - 2), f.width(k, f.rank(k) - 2))
        bias = walk.fold(lambda: bias_of(mask, is_causal, sizes, f.sample(q)), "mask")
        return lambda span: piece_of(walk, bias, span, [(0, sizes[1])])
    if is_causal or f.rank(mask) != f.rank(q):
        return None
    return lambda span: _rows_of(walk, mask, span)


@rule(aten.matmul.default, aten.bmm.default, first=True)
def product(walk: Walk, a: Form, b: Form) -> Concat | None:
    """A16: the same where attention is spelled out.

    before: matmul(cat([expand(q_u), q_c], -2), k.mT), of which the last rows are read
    after:  Concat(-2, [zeros that nobody reads, matmul(q_c, k.mT)])
    """
    pieces = _pieces(walk, a)
    if pieces is None or f.rank(b) != f.rank(a):
        return None
    parts = [
        walk.apply(aten.matmul.default, part, b)
        if is_live
        else _zeros(walk, part, f.width(b, f.rank(b) - 1))
        for part, _, is_live in pieces
    ]
    return joined(walk, parts, a.axis, a.rows)  # type: ignore[union-attr,arg-type]


@rule(aten.baddbmm.default, first=True)
def masked_product(walk: Walk, mask: Form, a: Form, b: Form, **options: Any) -> Concat | None:
    """A16: the same with an additive mask, as `nn.MultiheadAttention` has it.

    before: baddbmm(mask, cat([expand(q_u), q_c], -2), k.mT), of which the last rows are read
    after:  Concat(-2, [zeros that nobody reads, baddbmm(mask of these rows, q_c, k.mT)])
    """
    pieces = _pieces(walk, a)
    if pieces is None or f.rank(mask) != f.rank(a):
        return None
    parts = [
        walk.apply(aten.baddbmm.default, _rows_of(walk, mask, span), part, b, **options)
        if is_live
        else _zeros(walk, part, f.width(b, f.rank(b) - 1))
        for part, span, is_live in pieces
    ]
    return joined(walk, parts, a.axis, a.rows)  # type: ignore[union-attr,arg-type]


def _rows_of(walk: Walk, mask: Form, span: tuple[int, int]) -> Any:
    """Some rows of a mask, which may have one for all, as of padding."""
    is_one = f.shape(mask)[-2] == 1
    return mask if is_one else walk.apply(aten.slice.Tensor, mask, f.rank(mask) - 2, *span)


def _pieces(walk: Walk, x: Form) -> list[Piece] | None:
    """The rows of a sequence in pieces, each with whether anyone reads it; None if all are read."""
    if walk.live is None or not isinstance(x, Concat) or not 0 < x.axis == f.rank(x) - 2:
        return None
    axis, low, high = walk.live
    if axis != x.axis or (low, high) == (0, f.width(x, axis)):
        return None
    borders = _borders(x, low, high)
    spans = list(pairwise(borders))
    return [
        (part, span, low <= span[0] < high)
        for part, span in zip(cut(walk, x, borders), spans, strict=True)
    ]


def _borders(x: Concat, low: int, high: int) -> list[int]:
    ends, total = {0, low, high}, 0
    for part in x.parts:
        total += f.width(part, x.axis)
        ends.add(total)
    return sorted(ends)


def _zeros(walk: Walk, part: Any, width: int) -> Const:
    dims = [*(f.at(d, 1) for d in f.shape(part)[:-1]), width]
    like = f.sample(part)
    return walk.fold(
        lambda: torch.zeros(dims, dtype=like.dtype, device=like.device), "unread", part.rows
    )
