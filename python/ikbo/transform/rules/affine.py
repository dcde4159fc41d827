# SPDX-License-Identifier: Apache-2.0
"""Scales and shifts that are constant over the batch (A3), and sums of split values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Product, Sum, User
from ikbo.transform.pending import Affine
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    walk: Walk, x: Form, weight: Form | None, bias: Form | None, mean: Form, var: Form,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """A3: BatchNorm in evaluation over mixed channels, or over the rows of a split product.

    before: batch_norm(cat([u, c], 1))    batch_norm(Sum(linear(u), linear(c)))
    after:  Affine(cat([u, c], 1))        Sum(linear(u), linear(c)) with folded weights and bias
    """
    stats = (weight, bias, mean, var)
    if not all(v is None or isinstance(v, Const) for v in stats) or not _has_channel(x, 1):
        return None
    gain: Any = 1 if weight is None else weight.tensor
    offset: Any = 0 if bias is None else bias.tensor
    scale = walk.fold(lambda: gain * torch.rsqrt(var.tensor + eps), "batch_norm_scale")
    shift = walk.fold(lambda: offset - mean.tensor * scale.tensor, "batch_norm_shift")
    return (affine(walk, x, scale, shift), None, None)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def scale(walk: Walk, x: Any, y: Any) -> Form | None:
    """A3: a constant gate on mixed channels or on the rows of a split product.

    before: cat([u, c], -1) * g           Sum(linear(u), linear(c)) * g
    after:  Affine(cat([u, c], -1), g)    Sum(linear(u), linear(c)) with folded weights and bias
    """
    x, y = (y, x) if not isinstance(x, Concat | Affine | Sum) else (x, y)
    vector = _vector(walk, x, y)
    return None if vector is None else affine(walk, x, vector, None)


@rule(aten.div.Tensor, aten.div.Scalar)
def divide(walk: Walk, x: Any, y: Any) -> Form | None:
    """A3: before: cat([u, c], -1) / g; after: Affine(cat([u, c], -1), 1 / g)."""
    vector = _vector(walk, x, y)
    if vector is None:
        return None
    return affine(walk, x, walk.fold(vector.tensor.reciprocal, vector.name), None)


@rule(aten.add.Tensor, aten.add.Scalar)
def shift(walk: Walk, x: Any, y: Any, *, alpha: Any = 1) -> Form | None:
    """A3: a constant shift of mixed channels or of the rows of a split product.

    before: cat([u, c], -1) + s                 Sum(linear(u, b), linear(c)) + s
    after:  Affine(cat([u, c], -1), shift=s)    Sum(linear(u, b + s), linear(c))
    """
    if alpha != 1:
        return None
    x, y = (y, x) if not isinstance(x, Concat | Affine | Sum) else (x, y)
    vector = _vector(walk, x, y)
    return None if vector is None else affine(walk, x, None, vector)


@rule(aten.sub.Tensor, aten.sub.Scalar)
def subtract(walk: Walk, x: Any, y: Any, *, alpha: Any = 1) -> Form | None:
    """A3: before: cat([u, c], -1) - s; after: Affine(cat([u, c], -1), shift=-s)."""
    vector = _vector(walk, x, y) if alpha == 1 else None
    if vector is None:
        return None
    return affine(walk, x, None, walk.fold(vector.tensor.neg, vector.name))


@rule(aten.add.Tensor)
def add(walk: Walk, x: Any, y: Any, *, alpha: Any = 1) -> Sum | None:
    """Sums stay unsummed, so that users and candidates are each added up at their own batch.

    before: Sum(a, b) + User c      Sum(a, b) + Sum(c, d)       User c + Cand d
    after:  Sum(a + c at U, b)      Sum(a + c at U, b + d)      Sum(c, d)

    A compression of fields that meets a candidate's value is added up first: `ikbo::lce` does it.
    """
    if alpha != 1 or not all(isinstance(v, User | Cand | Sum) for v in (x, y)):
        return None
    if x.rows is None or x.rows != y.rows or not _same_shape_and_type(x, y):
        return None
    users = [t for v in (x, y) for t in _terms(v) if _is_user(t)]
    cands = [t for v in (x, y) for t in _terms(v) if not _is_user(t)]
    if not users or not cands:
        return None
    if any(isinstance(v, Sum) and v.is_shared for v in (x, y)):
        return None
    if any(isinstance(v, Cand) for v in (x, y)) and any(map(_is_compression, (x, y))):
        return None
    return Sum(_total(walk, users), _total(walk, cands), x.rows)


def _is_compression(x: Form) -> bool:
    """Whether a sum is one of two products along the field axis."""
    if not isinstance(x, Sum) or not x.rows.is_plain or f.rank(x) != 3:
        return False
    return all(isinstance(term, Product) and term.kind == "lce" for term in (x.user, x.cand))


@rule(aten.sub.Tensor)
def difference(walk: Walk, x: Any, y: Any, *, alpha: Any = 1) -> Sum | None:
    """A12: before: User u - Cand c; after: Sum(u, -c). The negative is known as such."""
    if alpha != 1 or {type(x), type(y)} != {User, Cand} or x.rows is None or x.rows != y.rows:
        return None
    if not _same_shape_and_type(x, y) or not f.dtype(x).is_floating_point:
        return None
    small = y.spread or y
    negative: Any = type(y)(-small.tensor, small.rows, minus=small)
    if small is not y:
        spread = negative.tensor.expand(y.tensor.shape)
        negative = type(y)(spread, y.rows, spread=negative, minus=y)
    return Sum(x, negative, x.rows) if isinstance(x, User) else Sum(negative, x, x.rows)


def _is_user(term: Any) -> bool:
    return isinstance(term.x if isinstance(term, Product) else term, User)


def _terms(value: Any) -> tuple[Any, ...]:
    return (value.user, value.cand) if isinstance(value, Sum) else (value,)


def _total(walk: Walk, terms: list[Any]) -> Any:
    if len(terms) == 1:
        return terms[0]
    a, b = (walk.evaluate(term) for term in terms)
    return type(a)(a.tensor + b.tensor, a.rows)


def _same_shape_and_type(x: Form, y: Form) -> bool:
    a, b = f.shape(x), f.shape(y)
    equal = len(a) == len(b) and all(f.same(i, j) for i, j in zip(a, b, strict=True))
    return equal and f.dtype(x) == f.dtype(y)


def _has_channel(x: Form, axis: int) -> bool:
    """Whether a vector along `axis` can be left pending on, or folded into, a form."""
    if isinstance(x, Concat | Affine):
        return (x.x if isinstance(x, Affine) else x).axis == axis
    if not isinstance(x, Sum) or x.is_shared:
        return False
    terms = (x.user, x.cand)
    if not all(isinstance(t, Product) for t in terms):
        return False
    return f.rank(x) + (-1 if x.user.kind == "linear" else -2) == axis  # type: ignore[union-attr]


def _vector(walk: Walk, x: Any, y: Any) -> Const | None:
    """`y` as a vector along the one axis of `x` that a scale or shift may follow, or None."""
    if not isinstance(x, Concat | Affine | Sum) or not f.dtype(x).is_floating_point:
        return None
    axis = next((a for a in range(f.rank(x)) if _has_channel(x, a)), None)
    return None if axis is None else vector_along(walk, x, axis, y)


def vector_along(walk: Walk, x: Form, axis: int, y: Any) -> Const | None:
    """`y` as a vector along an axis of `x`, or None where it is no number and no such constant."""
    dims = f.shape(x)
    size = dims[axis]
    if isinstance(y, int | float) and not isinstance(y, bool):
        like = f.sample(x)
        return walk.fold(
            lambda: torch.full((size,), y, dtype=like.dtype, device=like.device), "scalar"
        )
    if not isinstance(y, Const) or y.rows is not None or y.tensor.dtype != f.dtype(x):
        return None
    trailing = len(dims) - axis - 1
    small = list(y.tensor.shape)
    if len(small) > len(dims) or any(
        s != 1 and (len(small) - 1 - i) != trailing for i, s in enumerate(small)
    ):
        return None
    return walk.fold(lambda: y.tensor.reshape(-1).expand(size), y.name)


def affine(walk: Walk, x: Any, scale: Const | None, shift: Const | None) -> Any:
    if isinstance(x, Sum):
        return replace(
            x, user=_fold(walk, x.user, scale, shift), cand=_fold(walk, x.cand, scale, None)
        )
    inner = Affine(x, None, None) if isinstance(x, Concat) else x
    old_scale, old_shift = inner.scale, inner.shift
    if scale is not None:
        old_scale = combine(walk, torch.mul, old_scale, scale)
        old_shift = None if old_shift is None else combine(walk, torch.mul, old_shift, scale)
    if shift is not None:
        old_shift = combine(walk, torch.add, old_shift, shift)
    return Affine(inner.x, old_scale, old_shift)


def combine(walk: Walk, function: Any, old: Const | None, new: Const) -> Const:
    return new if old is None else walk.fold(lambda: function(old.tensor, new.tensor), new.name)


def _fold(walk: Walk, term: Any, scale: Const | None, shift: Const | None) -> Product:
    """The product whose result is scaled and shifted, one value per row of its weight."""
    weight, bias = term.weight, term.bias
    if scale is not None:
        weight = walk.fold(lambda: term.weight.tensor * scale.tensor[:, None], term.weight.name)
        if term.bias is not None:
            bias = walk.fold(lambda: term.bias.tensor * scale.tensor, term.bias.name)
    if shift is not None:
        bias = combine(walk, torch.add, bias, shift)
    return replace(term, weight=weight, bias=bias)
