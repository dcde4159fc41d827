# SPDX-License-Identifier: Apache-2.0
"""A `Scores`: the steps that it takes, and its value where no rule could split it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import HOLE, Concat, Const, Scores, Step
from ikbo.transform.origin import at_origin
from ikbo.transform.rowwise import is_pointwise

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

# How large the random products are that a chain of steps is tried on: small ones, whose weights do
# not vanish in a softmax in any type; large ones, against which a mask must hold. In millions of
# them two differ by less than 11 times this size: a fill of -1e4 is a mask, whatever the scale.
_PROBE_SIZES = (1.0, 500.0) * 4

_SOFTMAX = (aten.softmax.int, aten._softmax.default)


def started(walk: Walk, q: Concat, k: Concat) -> Scores:
    """The product of queries and keys, without a step."""
    like = f.sample(q)
    sizes = [*[1] * (f.rank(q) - 2), f.width(q, q.axis), f.width(k, k.axis)]

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(sizes, generator=generator) * size for size in _PROBE_SIZES]
        return torch.stack(drawn).to(device=like.device, dtype=like.dtype)

    products = walk.constants.fold(draw)
    return Scores(q, k, (), products, products, walk.node)


def followed(walk: Walk, target: Any, args: Any, kwargs: Any) -> Scores | None:
    """A `Scores` with one step more; None where the operator is no step on one `Scores`."""
    leaves = f.leaves((args, kwargs))
    found = [x for x in leaves if isinstance(x, Scores)]
    others = [x for x in leaves if isinstance(x, (*f.FORMS, f.Size)) and x not in found]
    if len(found) != 1 or not all(_fits(x, found[0]) for x in others):
        return None
    x = found[0]
    if target in _SOFTMAX:
        if f.normal_axis(args[1], f.rank(x)) != f.rank(x) - 1:
            return None
        args = (args[0], -1, *args[2:])
    elif not is_pointwise(target):
        return None
    args, kwargs = f.map_leaves(lambda y: HOLE if y is x else y, (args, kwargs))
    step = Step(target, tuple(args), kwargs, walk.node)
    probe = walk.constants.fold(lambda: run(step, x.probe, lambda const: const.tensor))
    return replace(x, steps=(*x.steps, step), probe=probe)


def _fits(x: Any, scores: Scores) -> bool:
    """Whether a constant meets every score alone, the same in every row of the batch."""
    if not isinstance(x, Const) or x.rows is not None or x.tensor.ndim > f.rank(scores):
        return False
    have, sizes = x.tensor.shape, f.shape(scores)[f.rank(scores) - x.tensor.ndim :]
    return all(n == 1 or f.same(n, size) for n, size in zip(have, sizes, strict=True))


def run(step: Step, x: Any, read: Callable[[Const], Any], apply: Any = None) -> Any:
    """The result of a step on `x`; `read` gives what stands for a constant, `apply` computes."""

    def value(leaf: Any) -> Any:
        return x if leaf is HOLE else read(leaf) if isinstance(leaf, Const) else leaf

    args, kwargs = f.map_leaves(value, (step.args, step.kwargs))
    return apply(step.target, *args, **kwargs) if apply else step.target(*args, **kwargs)


def computed(walk: Walk, x: Scores) -> Tensor:
    """The value at B, as the unmodified model computes it."""
    reason = "scores mix user and candidate tokens"
    with at_origin(x.origin):
        out = torch.matmul(walk.materialise(x.q, reason), walk.materialise(x.k, reason))
    for step in x.steps:
        with at_origin(step.origin):
            out = run(step, out, walk.use)
    return out
