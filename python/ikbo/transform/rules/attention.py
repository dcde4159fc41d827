# SPDX-License-Identifier: Apache-2.0
"""Attention of candidates over a user's keys (A14), and the masks that it understands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Const, Form, Rows, User
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

_HEADS_LAST = (0, 2, 1, 3)


@rule(aten.scaled_dot_product_attention.default)
def sdpa(
    walk: Walk, q: Form, k: Form, v: Form, mask: Form | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Form | None:  # fmt: skip
    """A14: attention of candidate queries over keys and values of the user.

    before: sdpa(q [B, H, Q, D], expand(k), expand(v), mask)
    after:  ikbo::target_attention(q, k [U, S, H_kv, D], v, user_mask=mask [U, S])
    """
    if dropout_p or is_causal or not isinstance(q, Cand):
        return None
    if not (isinstance(k, User) and isinstance(v, User)) or {x.rows for x in (q, k, v)} != {Rows()}:
        return None
    if q.tensor.ndim == 3 and k.tensor.ndim == v.tensor.ndim == 3 and mask is None:
        heads = [walk.apply(aten.unsqueeze.default, x, 1) for x in (q, k, v)]
        out = walk.apply(aten.scaled_dot_product_attention.default, *heads, scale=scale)
        return walk.apply(aten.squeeze.dim, out, 1)
    if not q.tensor.ndim == k.tensor.ndim == v.tensor.ndim == 4:
        return None
    num_heads, num_kv_heads = q.tensor.shape[1], k.tensor.shape[1]
    fits = num_heads % num_kv_heads == 0 if enable_gqa else num_heads == num_kv_heads
    if not fits or k.tensor.shape[1:] != v.tensor.shape[1:]:
        return None
    user_mask = None if mask is None else _key_mask(walk, mask, k.tensor.shape[2])
    if mask is not None and user_mask is None:
        return None
    rows = [walk.apply(aten.permute.default, x, _HEADS_LAST).tensor for x in (q, k, v)]
    out, _ = torch.ops.ikbo.target_attention(*rows, walk.cand_to_user, None, None, user_mask, scale)
    return walk.apply(aten.permute.default, Cand(out, Rows()), _HEADS_LAST)


def _key_mask(walk: Walk, mask: Form, length: Any) -> torch.Tensor | None:
    """A mask of user keys as bool `[U, S]`; None if it depends on anything else, or adds values."""
    if isinstance(mask, User) and mask.tensor.dtype != torch.bool:
        mask = mask.keep if mask.keep is not None else mask
    if not isinstance(mask, User | Const) or f.dtype(mask) != torch.bool or mask.rows != Rows():
        return None
    tensor = walk.at_users(mask)
    if tensor.ndim != 4:
        return None
    for axis in (1, 2):
        # One value for all heads and all queries: size 1, or one value repeated.
        if tensor.shape[axis] != 1 and tensor.stride(axis) != 0:
            return None
    keys = tensor[:, 0, 0]
    return keys if keys.shape[1] == length else keys.expand(-1, length)


def _is_all_zero(walk: Walk, x: Any) -> bool:
    if isinstance(x, Const):
        return walk.constants.fold(lambda: not bool(x.tensor.any()))
    return isinstance(x, int | float) and x == 0


def _is_minus_inf(walk: Walk, x: Any) -> bool:
    if isinstance(x, Const):
        return walk.constants.fold(lambda: bool((x.tensor == -math.inf).all()))
    return isinstance(x, float) and x == -math.inf


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def additive_mask(walk: Walk, x: Form, mask: Form, value: Any) -> Form | None:
    """A14: the additive form of a boolean mask remembers the boolean.

    before: masked_fill(zeros, mask, -inf)    after: the same value, with `keep = ~mask`
    """
    if not isinstance(mask, User) or not _is_all_zero(walk, x) or not _is_minus_inf(walk, value):
        return None
    keep = walk.apply(aten.bitwise_not.default, mask)
    zeros = walk.at_users(x) if isinstance(x, Const) else x
    return _with_keep(mask, keep, zeros.masked_fill(mask.tensor, -math.inf))


@rule(aten.where.self, aten.where.Scalar, aten.where.ScalarSelf, aten.where.ScalarOther)
def additive_where(walk: Walk, condition: Form, x: Any, y: Any) -> Form | None:
    """A14: before: where(mask, 0, -inf); after: the same value, with `keep = mask`."""
    if not isinstance(condition, User):
        return None
    if _is_all_zero(walk, x) and _is_minus_inf(walk, y):
        keep = condition
    elif _is_minus_inf(walk, x) and _is_all_zero(walk, y):
        keep = walk.apply(aten.bitwise_not.default, condition)
    else:
        return None
    x, y = (walk.at_users(v) if isinstance(v, Const) else v for v in (x, y))
    return _with_keep(condition, keep, torch.where(condition.tensor, x, y))


def _with_keep(mask: User, keep: User, out: torch.Tensor) -> User | None:
    return User(out, mask.rows, keep=keep) if out.shape == mask.tensor.shape else None
