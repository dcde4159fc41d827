# SPDX-License-Identifier: Apache-2.0
"""Attention over user and candidate tokens, under a mask that is constant (A15, A17)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Rows, User
from ikbo.transform.parts import cut, joined, joint_borders
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

_HEADS_LAST = (0, 2, 1, 3)

Span = tuple[int, int]


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
    assert isinstance(q, Concat) and isinstance(k, Concat) and isinstance(v, Concat)
    sizes = (f.width(q, q.axis), f.width(k, k.axis))
    of_keys = mask if isinstance(mask, Concat) and _is_of_keys(mask, q) else None
    if of_keys is not None:
        fixed: Form | None = walk.fold(lambda: _visible(of_keys, sizes), "mask")
    else:
        fixed = mask
    if fixed is not None and not (isinstance(fixed, Const) and fixed.rows is None):
        return None
    bias = walk.fold(lambda: bias_of(fixed, is_causal, sizes, f.sample(q)), "mask")
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
        ranges = [key[2] for key in some]
        if of_keys is None:
            piece: Form | None = piece_of(walk, bias, span, ranges)
        else:
            piece = _piece_of_keys(walk, of_keys, span, ranges)
        # Attention kernels have a fast form for causal rows, none for an additive mask.
        causal = isinstance(piece, Const) and walk.constants.fold(partial(_is_causal, piece.tensor))
        how = (None, 0.0, True) if causal else (piece,)
        parts.append(
            walk.apply(
                aten.scaled_dot_product_attention.default, part, k_seen, v_seen, *how, **options
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
    bias = walk.fold(lambda: bias_of(mask, is_causal, sizes, q.tensor), "mask")
    if walk.constants.fold(lambda: bool(bias.tensor[..., :count].any())):
        return None
    at_users = [
        walk.apply(aten.permute.default, x, _HEADS_LAST).tensor for x in (q, k_user, v_user)
    ]
    out, lse = torch.ops.ikbo.target_attention(
        *at_users, walk.cand_to_user, None, None, None, scale
    )
    factor = q.tensor.shape[-1] ** -0.5 if scale is None else scale
    scores = _own_scores(q.tensor, k_cand.tensor, lse.dtype) * factor
    own = piece_of(walk, bias, (0, sizes[0]), [(count, sizes[1])])
    if own is not None:
        scores = scores + walk.use(own)
    top = torch.maximum(lse, scores.amax(-1))
    user_share = (lse - top).exp()
    shares = (scores - top.unsqueeze(-1)).exp()
    total = (user_share + shares.sum(-1)).unsqueeze(-1)
    user_part = (user_share.unsqueeze(-1) / total).to(out.dtype) * out.permute(_HEADS_LAST)
    own_shares = (shares / total).to(out.dtype)
    is_one = v_cand.tensor.shape[2] == 1
    own_part = own_shares * v_cand.tensor if is_one else own_shares @ v_cand.tensor
    return Cand(user_part + own_part, Rows())


def _own_scores(q: Tensor, k: Tensor, kind: torch.dtype) -> Tensor:
    """`q @ k.mT`; with one key not as a product, so that a compiler fuses it with what follows."""
    if k.shape[2] == 1:
        return (q.to(kind) * k.to(kind)).sum(-1, keepdim=True)
    return (q @ k.mT).to(kind)


def _two_sides(x: Form) -> tuple[User, Cand] | None:
    """The user's keys and the candidate's, where these two follow each other."""
    if not isinstance(x, Concat) or x.axis != 2 or len(x.parts) != 2:
        return None
    user, cand = x.parts
    return (user, cand) if isinstance(user, User) and isinstance(cand, Cand) else None


@rule(aten.add.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor)
def joint_mask(walk: Walk, x: Form, y: Form, **options: Any) -> User | Cand | None:
    """A17: a mask of keys out of inputs, with a constant one, remembers where that one masks.

    before: mask_of_keys [B, 1, S] & causal [S, S]    after: the same value, with `dead = ~causal`
    """
    const, other = (x, y) if isinstance(x, Const) else (y, x)
    if options or not isinstance(const, Const) or const.rows is not None or const.tensor.ndim < 2:
        return None
    kind = f.dtype(other)
    if not isinstance(other, User | Cand) or other.rows is None or kind != const.tensor.dtype:
        return None
    if not (kind.is_floating_point or kind == torch.bool):
        return None
    dead = walk.constants.fold(lambda: _dead(const.tensor))
    if dead is None:
        return None
    target = aten.add.Tensor if kind.is_floating_point else aten.logical_and.default
    out = walk.default(target, (x, y), {})
    same = isinstance(out, User | Cand) and out.tensor.shape[-2:] == dead.shape
    return replace(out, dead=dead) if same else None


def _is_causal(bias: Tensor) -> bool:
    """Whether a bias hides from each row what follows it, and does nothing else."""
    causal = torch.full(bias.shape[-2:], -math.inf, dtype=bias.dtype, device=bias.device).triu(1)
    return bias.shape[-2] == bias.shape[-1] and bool((bias == causal).all())


def _dead(mask: Tensor) -> Tensor | None:
    """Where a mask masks in all of its leading axes; None if nowhere."""
    dead = ~mask if mask.dtype == torch.bool else mask == -math.inf
    everywhere = dead.reshape(-1, *mask.shape[-2:]).all(0)
    return everywhere if everywhere.any() else None


def _is_of_keys(mask: Concat, q: Concat) -> bool:
    """Whether a mask has the keys of both sides side by side."""
    return mask.rows == q.rows and f.rank(mask) == f.rank(q) == mask.axis + 1


def _visible(mask: Concat, sizes: tuple[int, int]) -> Tensor:
    """Bool [rows, keys]: false where the mask masks whatever the inputs are."""
    known = []
    for part in mask.parts:
        dead = getattr(part, "dead", None)
        shape = (sizes[0], f.width(part, mask.axis))
        known.append(torch.ones(shape, dtype=torch.bool) if dead is None else ~dead.cpu())
    return torch.cat(known, -1).to(f.sample(mask).device)


def _piece_of_keys(walk: Walk, mask: Concat, rows: Span, spans: list[Span]) -> Form:
    """The mask of some rows and key ranges."""
    slice_ = aten.slice.Tensor
    some = mask if f.shape(mask)[-2] == 1 else walk.apply(slice_, mask, mask.axis - 1, *rows)
    pieces = [walk.apply(slice_, some, mask.axis, *span) for span in spans]
    return _joined_keys(walk, pieces, mask.axis)


def bias_of(mask: Const | None, is_causal: bool, sizes: tuple[int, int], like: Tensor) -> Tensor:
    """What is added to the scores, `[..., rows, keys]`; -inf where a key is not seen."""
    bias = torch.zeros(sizes, dtype=like.dtype, device=like.device)
    if is_causal:
        bias = bias.masked_fill(~torch.ones_like(bias, dtype=torch.bool).tril(), -math.inf)
    if mask is None:
        return bias
    if mask.tensor.dtype == torch.bool:
        return bias.masked_fill(~mask.tensor, -math.inf)
    return bias + mask.tensor


def _seen(bias: Tensor, row_ends: list[int], spans: list[Span]) -> list[list[bool]]:
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


def piece_of(walk: Walk, bias: Const, rows: Span, spans: list[Span]) -> Const | None:
    """The mask of some rows and key ranges; None where it changes nothing."""

    def compute() -> Tensor:
        some = bias.tensor[..., rows[0] : rows[1], :]
        return torch.cat([some[..., low:high] for low, high in spans], -1)

    piece = walk.fold(compute, bias.name)
    return piece if walk.constants.fold(lambda: bool(piece.tensor.any())) else None
