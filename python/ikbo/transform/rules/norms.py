# SPDX-License-Identifier: Apache-2.0
"""LayerNorm over user and candidate features, and the layer behind it (A4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Product, Sum, User
from ikbo.transform.pending import Normed
from ikbo.transform.rules.linear import columns_of, is_mixed_along, side_of
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.layer_norm.default)
def layer_norm(
    walk: Walk, x: Form, shape: Sequence[int], weight: Form | None = None,
    bias: Form | None = None, eps: float = 1e-5, *_: bool,
) -> Normed | None:  # fmt: skip
    """A4: before: layer_norm(cat([expand(u), c], -1), [K]); after: Normed(Concat(-1, [u, c]))."""
    if not isinstance(x, Concat) or not is_mixed_along(x, -1) or len(shape) != 1:
        return None
    if not all(v is None or isinstance(v, Const) for v in (weight, bias)):
        return None
    return Normed(x, weight, bias, eps, walk.node)  # type: ignore[arg-type]


@rule(aten.linear.default)
def linear(walk: Walk, x: Form, weight: Form, bias: Form | None = None) -> Cand | None:
    """A4: the statistics of both sides are merged behind the layer.

    before: linear(layer_norm(cat([expand(u), c], -1)) * g + k, W, b)
    after:  (linear(u - mean(u), W g) at U + linear(c - mean(c), W g) + d v) / std + (W k + b)

    `d` is the difference of the two means; `v` is a constant. The deviations are merged as sums of
    squares about each side's own mean, so that a large common mean costs no accuracy.
    """
    if not isinstance(x, Normed) or not isinstance(weight, Const):
        return None
    if not (bias is None or isinstance(bias, Const)):
        return None
    gain, concat = x.weight, x.x
    scaled = weight
    if gain is not None:
        scaled = walk.fold(lambda: weight.tensor * gain.tensor, f"{weight.name}_scaled")
    user, cand, difference, rstd = walk.once("norm", x, lambda: _statistics(walk, x))
    w_user, w_cand = (columns_of(walk, concat, scaled, side) for side in (User, Cand))
    vector = walk.fold(lambda: _of_means(w_user.tensor, w_cand.tensor), f"{weight.name}_means")
    products = [
        Product("linear", y, w, None, walk.node) for y, w in ((user, w_user), (cand, w_cand))
    ]
    out = walk.materialise(Sum(products[0], products[1], concat.rows))
    out = (out + difference * walk.use(vector)) * rstd
    shift = _shift(walk, x, weight, bias)
    return Cand(out if shift is None else out + walk.use(shift), concat.rows)


def _statistics(walk: Walk, x: Normed) -> tuple[User, Cand, Tensor, Tensor]:
    """Both sides about their own means; the difference of the means; 1 / std, of all features."""
    centred, means, squares, counts = [], [], [], []
    for side in (User, Cand):
        value = side_of(walk, x.x, side)
        mean = value.tensor.mean(-1, keepdim=True)
        about = value.tensor - mean
        centred.append(side(about, value.rows))
        means.append(walk.materialise(side(mean, value.rows)))
        squares.append(walk.materialise(side((about * about).sum(-1, keepdim=True), value.rows)))
        counts.append(f.width(value, x.x.axis))
    total = sum(counts)
    difference = means[1] - means[0]
    variance = squares[0] + squares[1] + difference**2 * (counts[0] * counts[1] / total)
    rstd = torch.rsqrt(variance / total + x.eps)
    return centred[0], centred[1], difference, rstd  # type: ignore[return-value]


def _of_means(w_user: Tensor, w_cand: Tensor) -> Tensor:
    """What the layer makes of the step between the means: that of each side is known."""
    total = w_user.shape[1] + w_cand.shape[1]
    return (w_cand.sum(1) * w_user.shape[1] - w_user.sum(1) * w_cand.shape[1]) / total


def _shift(walk: Walk, x: Normed, weight: Const, bias: Const | None) -> Const | None:
    inner = x.bias
    if inner is None:
        return bias
    return walk.fold(
        lambda: weight.tensor @ inner.tensor + (0 if bias is None else bias.tensor),
        f"{weight.name}_shift",
    )
