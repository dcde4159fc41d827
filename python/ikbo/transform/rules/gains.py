# SPDX-License-Identifier: Apache-2.0
"""One gain per candidate on mixed features: cross networks of vectors (A9), RMSNorm (A4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Sum
from ikbo.transform.pending import Affine, Scaled
from ikbo.transform.rules.affine import affine, combine, vector_along
from ikbo.transform.rules.linear import is_mixed_along
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.mul.Tensor)
def gain(walk: Walk, x: Form, y: Form) -> Scaled | None:
    """A9: a gain for each row of the batch waits for the product that follows.

    before: cat([expand(u), c], 1) * a [B, 1]    after: Scaled(Concat(1, [u, c]), gain=a)
    """
    x, y = (x, y) if isinstance(x, Concat | Affine) else (y, x)
    if not isinstance(x, Concat | Affine) or not isinstance(y, Cand | Sum) or y.rows != x.rows:
        return None
    concat = x.x if isinstance(x, Affine) else x
    dims, sizes, kind = f.shape(x), f.shape(y), f.dtype(x)
    dims[concat.axis] = 1
    is_gain = len(sizes) == len(dims) and all(map(f.same, sizes, dims))
    if not is_gain or kind != f.dtype(y) or not kind.is_floating_point:
        return None
    return Scaled(x, Cand(walk.materialise(y), x.rows), None)


@rule(aten.matmul.default, aten.bmm.default)
def outer_gain(walk: Walk, x: Form, y: Form) -> Scaled | None:
    """A9: before: matmul(cat([u, c], 1) [B, K, 1], a [B, 1, 1]); after: the gain `a`."""
    if not isinstance(x, Concat | Affine) or not isinstance(y, Cand | Sum) or f.rank(x) != 3:
        return None
    is_gain = f.same(f.shape(x)[2], 1) and f.rank(y) == 3 and f.shape(y)[1:] == [1, 1]
    return gain(walk, x, y) if is_gain else None


@rule(aten.mul.Tensor, aten.mul.Scalar)
def scale(walk: Walk, x: Any, y: Any) -> Scaled | None:
    """A9: before: Scaled(x, a, b) * v; after: Scaled(x * v, a, b * v), for a constant vector v."""
    x, y = (x, y) if isinstance(x, Scaled) else (y, x)
    vector = vector_along(walk, x, x.axis, y) if isinstance(x, Scaled) else None
    if vector is None:
        return None
    shift = None if x.shift is None else combine(walk, torch.mul, x.shift, vector)
    return replace(x, x=affine(walk, x.x, vector, None), shift=shift)


@rule(aten.add.Tensor)
def add(walk: Walk, x: Any, y: Any, *, alpha: Any = 1) -> Scaled | None:
    """A9: shifts and gains of the same features are added up.

    before: Scaled(x, a, b) + v          Scaled(x, a, b) + x       Scaled(x, a, b) + Scaled(x, c, d)
    after:  Scaled(x, a, b + v)          Scaled(x, a + 1, b)       Scaled(x, a + c, b + d)
    """
    x, y = (x, y) if isinstance(x, Scaled) else (y, x)
    if not isinstance(x, Scaled) or alpha != 1:
        return None
    if y is x.x:
        return replace(x, gain=Cand(x.gain.tensor + 1, x.gain.rows))
    if isinstance(y, Scaled) and y.x is x.x:
        shift = x.shift if y.shift is None else combine(walk, torch.add, x.shift, y.shift)
        return replace(x, gain=Cand(x.gain.tensor + y.gain.tensor, x.gain.rows), shift=shift)
    vector = vector_along(walk, x, x.axis, y)
    return None if vector is None else replace(x, shift=combine(walk, torch.add, x.shift, vector))


@rule(aten.linear.default)
def linear(walk: Walk, x: Form, weight: Form, bias: Form | None = None) -> Cand | None:
    """A9: a layer over features with a gain.

    before: linear(cat([expand(u), c], -1) * a + s, W, b)
    after:  Sum(linear(u, W[:, u columns]) at U, linear(c, W[:, c columns]) at B) * a + (W s + b)
    """
    if not isinstance(x, Scaled) or not is_mixed_along(x, -1) or not isinstance(weight, Const):
        return None
    if not (bias is None or isinstance(bias, Const)):
        return None
    out = walk.materialise(walk.apply(aten.linear.default, x.x, weight)) * x.gain.tensor
    if x.shift is not None:
        shift = x.shift
        moved = walk.fold(lambda: weight.tensor @ shift.tensor, f"{weight.name}_shift")
        bias = moved if bias is None else combine(walk, torch.add, moved, bias)
    return Cand(out if bias is None else out + walk.use(bias), x.rows)


@rule(aten.rms_norm.default)
def rms_norm(
    walk: Walk, x: Form, shape: Sequence[int], weight: Form | None = None, eps: Any = None
) -> Scaled | None:
    """A4: an RMSNorm over mixed features is a gain.

    before: rms_norm(cat([expand(u), c], -1), [K], w)
    after:  Scaled(Concat(-1, [u, c]) * w, rsqrt((sum(u * u) at U + sum(c * c)) / K + eps))
    """
    if not isinstance(x, Concat) or not is_mixed_along(x, -1) or len(shape) != 1:
        return None
    if not (weight is None or isinstance(weight, Const)):
        return None
    square = walk.apply(aten.mul.Tensor, x, x)
    total = walk.materialise(walk.apply(aten.mean.dim, square, [-1], True))
    floor = torch.finfo(f.dtype(x)).eps if eps is None else eps
    inside = x if weight is None else affine(walk, x, weight, None)
    return Scaled(inside, Cand(torch.rsqrt(total + floor), x.rows), None)
