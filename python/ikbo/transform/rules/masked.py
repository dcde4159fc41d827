# SPDX-License-Identifier: Apache-2.0
"""Attention over user and candidate tokens, under a mask that is constant (A15, A17)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Rows, User
from ikbo.transform.rowwise import cut, joined, joint_borders
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

_HEADS_LAST = (0, 2, 1, 3)


@rule(aten.scaled_dot_product_attention.default)
def masked_sdpa(
    walk: Walk, q: Form, k: Form, v: Form, mask: Form | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Concat | None:  # fmt: skip
    """A17: rows of the user that the mask lets see user keys alone stay at the user's batch.

    before: sdpa(Concat(-2, [q_user, q_cand]), Concat(-2, [k_user, k_cand]), ..., causal)    at B
    after:  Concat(-2, [sdpa(q_user, k_user, ...) at U, sdpa(q_cand, [k_user, k_cand], ...) at B])
    """
    tokens = (q, k, v)
    if dropout_p or not all(isinstance(x, Concat) and x.axis == f.rank(x) - 2 for x in tokens):
        return None
    if mask is not None and not (isinstance(mask, Const) and mask.rows is None):
        return None
    assert isinstance(q, Concat) and isinstance(k, Concat) and isinstance(v, Concat)
    sizes = (f.width(q, q.axis), f.width(k, k.axis))
    bias = walk.fold(lambda: _bias(mask, is_causal, sizes, f.sample(q)), "mask")
    borders = joint_borders([k, v])
    spans = list(pairwise(borders))
    keys = list(zip(cut(walk, k, borders), cut(walk, v, borders), spans, strict=True))
    row_ends = joint_borders([q])
    seen = walk.constants.fold(lambda: _seen(bias.tensor, row_ends, spans))
    rows = [
        (part, span, [key for key, is_seen in zip(keys, flags, strict=True) if is_seen])
        for part, span, flags in zip(q.parts, pairwise(row_ends), seen, strict=True)
    ]
    if not all(some for _, _, some in rows) or not any(_is_of_user(p, some) for p, _, some in rows):
        return None
    parts = []
    for part, span, some in rows:
        k_seen, v_seen = (_joined_keys(walk, [key[i] for key in some], k.axis) for i in (0, 1))
        piece = _piece(walk, bias, span, [key[2] for key in some])
        parts.append(
            walk.apply(
                aten.scaled_dot_product_attention.default, part, k_seen, v_seen, piece, **options
            )
        )
    return joined(walk, parts, q.axis, q.rows)


@rule(aten.scaled_dot_product_attention.default)
def joint_sdpa(
    walk: Walk, q: Form, k: Form, v: Form, mask: Form | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Form | None:  # fmt: skip
    """A15: candidate queries over user keys, read by index, and over the candidate's own.

    before: sdpa(q_cand, cat([expand(k_user), k_cand], -2), cat([expand(v_user), v_cand], -2), mask)
    after:  (ikbo::target_attention(q_cand, k_user, v_user), lse_user), joined with the sums over
            the scores of k_cand by their share of the exponentials
    """
    if dropout_p or enable_gqa or not isinstance(q, Cand) or f.rank(q) != 4:
        return None
    if mask is not None and not (isinstance(mask, Const) and mask.rows is None):
        return None
    sides = _two_sides(k), _two_sides(v)
    if None in sides or q.rows != Rows() or k.rows != Rows() or q.tensor.shape[1] != f.width(k, 1):
        return None
    (k_user, k_cand), (v_user, v_cand) = sides  # type: ignore[misc]
    count = f.width(k_user, 2)
    if f.width(v_user, 2) != count or k_user.tensor.shape != v_user.tensor.shape:
        return None
    sizes = (f.width(q, 2), f.width(k, 2))
    bias = walk.fold(lambda: _bias(mask, is_causal, sizes, q.tensor), "mask")
    if walk.constants.fold(lambda: bool(bias.tensor[..., :count].any())):
        return None
    at_users = [
        walk.apply(aten.permute.default, x, _HEADS_LAST).tensor for x in (q, k_user, v_user)
    ]
    out, lse = torch.ops.ikbo.target_attention(
        *at_users, walk.cand_to_user, None, None, None, scale
    )
    factor = q.tensor.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.tensor @ k_cand.tensor.mT).to(lse.dtype) * factor
    own = _piece(walk, bias, (0, sizes[0]), [(count, sizes[1])])
    if own is not None:
        scores = scores + walk.use(own)
    top = torch.maximum(lse, scores.amax(-1))
    user_share = (lse - top).exp()
    shares = (scores - top.unsqueeze(-1)).exp()
    total = (user_share + shares.sum(-1)).unsqueeze(-1)
    user_part = (user_share.unsqueeze(-1) / total).to(out.dtype) * out.permute(_HEADS_LAST)
    return Cand(user_part + (shares / total).to(out.dtype) @ v_cand.tensor, Rows())


def _two_sides(x: Form) -> tuple[User, Cand] | None:
    """The user's keys and the candidate's, where these two follow each other."""
    if not isinstance(x, Concat) or x.axis != 2 or len(x.parts) != 2:
        return None
    user, cand = x.parts
    return (user, cand) if isinstance(user, User) and isinstance(cand, Cand) else None


def _bias(mask: Const | None, is_causal: bool, sizes: tuple[int, int], like: Tensor) -> Tensor:
    """What is added to the scores, `[..., rows, keys]`; -inf where a key is not seen."""
    bias = torch.zeros(sizes, dtype=like.dtype, device=like.device)
    if is_causal:
        bias = bias.masked_fill(~torch.ones_like(bias, dtype=torch.bool).tril(), -math.inf)
    if mask is None:
        return bias
    if mask.tensor.dtype == torch.bool:
        return bias.masked_fill(~mask.tensor, -math.inf)
    return bias + mask.tensor


def _seen(bias: Tensor, row_ends: list[int], spans: list[tuple[int, int]]) -> list[list[bool]]:
    """Per range of rows and range of keys, whether any of the rows sees any of the keys."""
    visible = bias != -math.inf
    return [
        [bool(visible[..., top:bottom, low:high].any()) for low, high in spans]
        for top, bottom in pairwise(row_ends)
    ]


def _is_of_user(part: Form, keys: list[Any]) -> bool:
    return f.is_user_only(part) and all(f.is_user_only(x) for key in keys for x in key[:2])


def _joined_keys(walk: Walk, pieces: list[Any], axis: int) -> Form:
    return pieces[0] if len(pieces) == 1 else walk.apply(aten.cat.default, pieces, axis)


def _piece(
    walk: Walk, bias: Const, rows: tuple[int, int], spans: list[tuple[int, int]]
) -> Const | None:
    """The mask of some rows and key ranges; None where it changes nothing."""

    def compute() -> Tensor:
        some = bias.tensor[..., rows[0] : rows[1], :]
        return torch.cat([some[..., low:high] for low, high in spans], -1)

    piece = walk.fold(compute, bias.name)
    return piece if walk.constants.fold(lambda: bool(piece.tensor.any())) else None
