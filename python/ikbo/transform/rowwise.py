# SPDX-License-Identifier: Apache-2.0
"""Which operators treat each position of an axis alone, and where that axis is in the result.

The question is asked of the batch axis (may a user-only value be computed at U?) and of the axis of
a `Concat` (may the operator be applied to each part?). Element-wise operators are those that
PyTorch tags `pointwise` and a few that lack the tag; `rowwise_table` lists the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform import rowwise_products  # noqa: F401  (adds the products to the table)
from ikbo.transform.forms import Cand, Concat, Const, Rows, User
from ikbo.transform.parts import Sides, cut, joined, joint_borders
from ikbo.transform.rowwise_table import TABLE, Axis, pointwise_axis

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

_POINTWISE = {
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten._to_copy.default,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.leaky_relu.default,
    aten.log_sigmoid.default,
    aten.masked_fill.Tensor,
    aten.rsub.Tensor,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.alias.default,
    aten.detach.default,
}
# Second names of operators that have the tag under their first.
_ALIASES = (
    "absolute", "divide", "greater", "greater_equal", "less", "less_equal", "multiply", "negative",
    "not_equal", "special_expit", "subtract", "true_divide",
)  # fmt: skip
_POINTWISE |= {
    getattr(getattr(aten, name), overload)
    for name in _ALIASES
    for overload in getattr(aten, name).overloads()
    if overload in ("default", "Tensor", "Scalar", "Tensor_mode")
}


# Pieces of one concatenation that an operator is applied to one by one, since each costs a call; of
# more, all at one batch are put side by side before.
MAX_PIECES = 8


def is_pointwise(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    return target in _POINTWISE or (
        torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    )


def is_random(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers when it is called with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    named = dict(zip((a.name for a in target._schema.arguments), args, strict=False)) | kwargs
    off = named.get("train") is False or named.get("dropout") == 0
    is_sdpa = target is aten.scaled_dot_product_attention.default
    return not (off or (is_sdpa and not named.get("dropout_p")))


def result_axis(target: Any, args: Any, kwargs: Any) -> Any:
    """The axis in the result(s) of an operator whose tensors are given as `Axis`, or None."""
    if is_pointwise(target):
        leaves = f.leaves((args, kwargs))
        return pointwise_axis([x for x in leaves if isinstance(x, Axis)])
    entry = TABLE.get(target)
    return None if entry is None else entry(*args, **kwargs)


def batch_rows(target: Any, args: Any, kwargs: Any) -> Any:
    """Where the batch is in the result(s) if every row is treated alone, else None."""
    values = [x for x in f.leaves((args, kwargs)) if isinstance(x, f.FORMS)]
    batched = [x for x in values if not (isinstance(x, Const) and x.rows is None)]
    if not batched or any(x.rows is None for x in batched):
        return None
    factors = {(x.rows.outer, x.rows.inner) for x in batched}
    if len(factors) != 1:
        return None
    outer, inner = factors.pop()

    def as_axis(x: Any) -> Any:
        if not isinstance(x, f.FORMS):
            return x
        return Axis(f.rank(x), None if x.rows is None else x.rows.axis)

    args, kwargs = f.map_leaves(as_axis, (args, kwargs))
    axis = result_axis(target, args, kwargs)
    if isinstance(axis, tuple):
        return tuple(None if a is None else Rows(a, outer, inner) for a in axis)
    return None if axis is None else Rows(axis, outer, inner)


def distribute(walk: Walk, target: Any, args: Any, kwargs: Any, where: Any) -> Any:
    """Applies an operator to each part of a `Concat`, if that keeps a part at U.

    before: op(Concat(User u, Cand c), ...)        at B
    after:  Concat(op(u, ...) at U, op(c, ...) at B)
    """
    values = [x for x in f.leaves((args, kwargs)) if isinstance(x, f.FORMS)]
    concats = [x for x in values if isinstance(x, Concat)]
    if not concats or any(not isinstance(x, Concat | Const | User | Cand) for x in values):
        return None
    if len(concats) > 1 and not (is_pointwise(target) or target is aten.cat.default):
        return None
    axes = {id(x): _tracked_axis(x, concats[0], target) for x in values}
    operands = f.map_leaves(
        lambda x: Axis(f.rank(x), axes[id(x)]) if isinstance(x, f.FORMS) else x, (args, kwargs)
    )
    axis = result_axis(target, *operands)
    if axis is None or any(x.axis != axes[id(x)] for x in concats):
        return None
    borders = joint_borders(concats)
    tracked = {id(x): _as_concat(x, a) for x in values if (a := axes[id(x)]) is not None}
    pieces = {key: cut(walk, x, borders) for key, x in tracked.items()}
    stays = [
        all(f.is_user_only(pieces[id(x)][i]) for x in concats) for i in range(len(borders) - 1)
    ]
    others = [x for x in values if not isinstance(x, Concat)]
    if not any(stays) or not all(map(f.is_user_only, others)):
        return None
    sides = Sides(stays, borders) if len(stays) > MAX_PIECES and not all(stays) else None
    if sides is not None:
        reason = f"{target} mixes user and candidate values"
        pieces = {
            key: sides.split(walk, some, tracked[key].axis, reason) for key, some in pieces.items()
        }

    def result(i: int) -> Any:
        some_args, some_kwargs = f.map_leaves(
            lambda x: pieces[id(x)][i] if id(x) in pieces else x, (args, kwargs)
        )
        return walk.apply(target, *some_args, **some_kwargs)

    def as_one(results: Any, axis: int | None, rows: Rows | None) -> Concat | None:
        if axis is None or rows is None:
            return None
        some = list(results) if sides is None else sides.merge(walk, list(results), axis)
        return joined(walk, some, axis, rows)

    results = [result(i) for i in range(2 if sides is not None else len(stays))]
    if not isinstance(results[0], tuple):
        return as_one(results, axis, where)
    axis_of = axis if isinstance(axis, tuple) else (axis,) * len(results[0])
    where_of = where if isinstance(where, tuple) else (where,) * len(results[0])
    return tuple(map(as_one, zip(*results, strict=True), axis_of, where_of))


def _as_concat(x: Any, axis: int) -> Concat:
    return x if isinstance(x, Concat) else Concat(axis, (x,), x.rows)


def _tracked_axis(x: Any, concat: Concat, target: Any) -> int | None:
    """The axis of `x` that runs along the axis of `concat`."""
    if x is concat or target is aten.cat.default:
        return concat.axis
    if not is_pointwise(target):
        return None
    axis = f.rank(x) - (f.rank(concat) - concat.axis)
    return axis if axis >= 0 and not f.same(f.shape(x)[axis], 1) else None
