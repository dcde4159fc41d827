# SPDX-License-Identifier: Apache-2.0
"""Rows that nobody reads are not computed (A16)."""

from __future__ import annotations

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
    if mask is not None and not (isinstance(mask, Const) and mask.rows is None):
        return None
    sizes = (f.width(q, f.rank(q) - 2), f.width(k, f.rank(k) - 2))
    bias = walk.fold(lambda: bias_of(mask, is_causal, sizes, f.sample(q)), "mask")
    parts = []
    for part, span, is_live in pieces:
        if is_live:
            some = piece_of(walk, bias, span, [(0, sizes[1])])
            target = aten.scaled_dot_product_attention.default
            parts.append(walk.apply(target, part, k, v, some, **options))
        else:
            parts.append(_zeros(walk, part, f.width(v, f.rank(v) - 1)))
    return joined(walk, parts, q.axis, q.rows)  # type: ignore[union-attr,arg-type]


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
