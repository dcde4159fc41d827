# SPDX-License-Identifier: Apache-2.0
"""Attention that a model spells out, in a sequence of user and candidate tokens (A17).

What a row sees is found by numbers: the model's own steps between the two products are run on
random products, and where the result is zero in all of them the value behind it is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Concat, Const, Form, Scores
from ikbo.transform.origin import at_origin
from ikbo.transform.parts import cut, joined, joint_borders
from ikbo.transform.rules.registry import rule
from ikbo.transform.scores import run, started

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

Span = tuple[int, int]


@rule(aten.matmul.default, aten.bmm.default)
def scores(walk: Walk, q: Form, k: Form) -> Scores | None:
    """A17: before: matmul(Concat(-2, [q_u, q_c]), Concat(-1, [k_u, k_c])); after: Scores(q, k)."""
    rank = f.rank(q)
    if not (isinstance(q, Concat) and isinstance(k, Concat)) or f.rank(k) != rank or rank < 3:
        return None
    is_product = q.axis == rank - 2 and k.axis == rank - 1 and q.rows == k.rows
    return started(walk, q, k) if is_product and q.rows.axis < rank - 2 else None


@rule(aten.baddbmm.default)
def biased_scores(
    walk: Walk, bias: Form, q: Form, k: Form, *, beta: Any = 1, alpha: Any = 1
) -> Form | None:
    """A17: before: baddbmm(mask, q, k); after: Scores(q, k) + mask."""
    found = scores(walk, q, k) if beta == alpha == 1 and isinstance(bias, Const) else None
    return None if found is None else walk.apply(aten.add.Tensor, found, bias)


@rule(aten.einsum.default)
def spelled_product(walk: Walk, equation: str, operands: Sequence[Form], **_: Any) -> Form | None:
    """A17: a product of two mixed values, row by row, as permutations around a matmul.

    before: einsum("bnhd,bmhd->bhnm", q, k)    after: matmul(permute(q), permute(k))
    """
    equation = equation.replace(" ", "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    if not all(isinstance(x, Concat | Scores) for x in operands):
        return None
    inputs, output = equation.split("->")
    a, b = inputs.split(",")
    shared = [x for x in a if x in b and x in output]
    summed, left, right = (
        [x for x in some if x not in others and x not in shared]
        for some, others in ((a, output), (a, b), (b, a))
    )
    names = [*shared, *left, *right]
    if not len(summed) == len(left) == len(right) == 1 or sorted(output) != sorted(names):
        return None
    if len(set(a)) != len(a) or len(set(b)) != len(b) or len(a) != len(shared) + 2:
        return None
    orders = (
        [a.index(x) for x in [*shared, *left, *summed]],
        [b.index(x) for x in [*shared, *summed, *right]],
    )
    turned = [
        walk.apply(aten.permute.default, x, order)
        for x, order in zip(operands, orders, strict=True)
    ]
    out = walk.apply(aten.matmul.default, *turned)
    return walk.apply(aten.permute.default, out, [names.index(x) for x in output])


@rule(aten.matmul.default, aten.bmm.default)
def attended(walk: Walk, weights: Form, v: Form) -> Concat | None:
    """A17: rows of the user that see user keys alone stay at the user's batch.

    before: matmul(softmax(Scores(q, k) + mask), Concat(-2, [v_user, v_cand]))    at B
    after:  Concat(-2, [the same of q_user, k_user, v_user at U, the same of q_cand at B])
    """
    if not isinstance(weights, Scores) or not isinstance(v, Concat):
        return None
    x, rank = weights, f.rank(weights)
    if f.rank(v) != rank or v.axis != rank - 2 or v.rows != x.rows:
        return None
    borders = joint_borders([x.k, v])
    spans = list(pairwise(borders))
    keys = list(zip(cut(walk, x.k, borders), cut(walk, v, borders), spans, strict=True))
    bands = list(pairwise(joint_borders([x.q])))
    seen = walk.constants.fold(lambda: [_seen(x, band, spans) for band in bands])
    plan = []
    for part, band, flags in zip(x.q.parts, bands, seen, strict=True):
        some = [key for key, is_seen in zip(keys, flags, strict=True) if is_seen]
        is_of_user = all(map(f.is_user_only, [part, *[y for key in some for y in key[:2]]]))
        plan.append((part, band, some if is_of_user and some else keys))
    if not any(len(some) < len(keys) for _, _, some in plan):
        return None
    parts = [_band(walk, x, part, band, some, v.axis) for part, band, some in plan]
    return joined(walk, parts, x.q.axis, x.rows)


def _seen(x: Scores, band: Span, spans: list[Span]) -> list[bool]:
    """Per range of keys, whether the rows of a band see it; all, where they cannot do without."""
    rows = x.probe[..., band[0] : band[1], :]
    flags = [bool((rows[..., low:high] != 0).any()) for low, high in spans]
    some = [span for span, is_seen in zip(spans, flags, strict=True) if is_seen]
    alone = _narrowed(x.products, band, some)
    for step in x.steps:
        alone = run(step, alone, lambda const: _narrowed(const.tensor, band, some))
    same = torch.allclose(alone.double(), _narrowed(x.probe, band, some).double(), equal_nan=True)
    return flags if same else [True] * len(spans)


def _narrowed(x: Tensor, band: Span, spans: list[Span]) -> Tensor:
    """The rows and keys of a tensor that has them as its last axes, or has one for all."""
    if x.ndim > 1 and x.shape[-2] != 1:
        x = x[..., band[0] : band[1], :]
    if x.ndim > 0 and x.shape[-1] != 1:
        x = torch.cat([x[..., low:high] for low, high in spans], -1)
    return x


def _band(walk: Walk, x: Scores, part: Form, band: Span, keys: list[Any], axis: int) -> Form:
    """The attention of some rows over some keys."""
    k, v = (
        some[0] if len(some) == 1 else walk.apply(aten.cat.default, some, along)
        for some, along in (([key[0] for key in keys], x.k.axis), ([key[1] for key in keys], axis))
    )
    spans = [key[2] for key in keys]
    with at_origin(x.origin):
        out = walk.apply(aten.matmul.default, part, k)
    for step in x.steps:

        def value(const: Const) -> Const:
            return walk.fold(lambda: _narrowed(const.tensor, band, spans), f"{const.name}_part")

        with at_origin(step.origin):
            out = run(step, out, value, walk.apply)
    return walk.apply(aten.matmul.default, out, v)
