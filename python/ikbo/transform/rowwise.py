# SPDX-License-Identifier: Apache-2.0
"""Which operators treat each position of an axis alone, and where that axis is in the result.

The question is asked of the batch axis (may a user-only value be computed at U?) and of the axis of
a `Concat` (may the operator be applied to each part?). Element-wise operators are those that
PyTorch tags `pointwise` and a few that lack the tag; `rowwise_table` lists the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform import rowwise_products  # noqa: F401  (adds the products to the table)
from ikbo.transform.forms import Cand, Concat, Const, Rows, User
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


# Pieces of one concatenation that an operator is applied to one by one; of more, neighbours at one
# batch are joined before, since each costs a call.
MAX_PIECES = 32


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
    pieces = {id(x): cut(walk, x, borders) for x in concats}
    if len(borders) > MAX_PIECES:
        borders, pieces = _coarser(
            walk, concats, borders, pieces, f"{target} mixes user and candidate values"
        )
    others = [x for x in values if not isinstance(x, Concat)]
    stays = [all(map(f.is_user_only, some)) for some in zip(*pieces.values(), strict=True)]
    if not any(stays) or not all(map(f.is_user_only, others)):
        return None

    results = []
    for i, (start, end) in enumerate(pairwise(borders)):

        def part(x: Any, i: int = i, start: int = start, length: int = end - start) -> Any:
            if isinstance(x, Concat):
                return pieces[id(x)][i]
            along = axes.get(id(x)) if isinstance(x, f.FORMS) else None
            return x if along is None else narrow(walk, x, along, start, length)

        part_args, part_kwargs = f.map_leaves(part, (args, kwargs))
        results.append(walk.apply(target, *part_args, **part_kwargs))
    if not isinstance(results[0], tuple):
        return joined(walk, results, axis, where)
    axis_of = axis if isinstance(axis, tuple) else (axis,) * len(results[0])
    where_of = where if isinstance(where, tuple) else (where,) * len(results[0])
    return tuple(
        None if a is None or w is None else joined(walk, list(pieces), a, w)
        for pieces, a, w in zip(zip(*results, strict=True), axis_of, where_of, strict=True)
    )


def narrow(walk: Walk, form: Any, axis: int, start: int, length: int) -> Any:
    """A range of a non-batch axis of a `Const`, `User` or `Cand`."""
    if isinstance(form, Const):
        return walk.fold(
            lambda: form.tensor.narrow(axis, start, length), f"{form.name}_part", form.rows
        )
    return type(form)(form.tensor.narrow(axis, start, length), form.rows)


def joined(walk: Walk, parts: list[Any], axis: int, where: Rows) -> Concat:
    """A concatenation of results, computed where they are pending."""
    plain = (
        x if isinstance(x, Const | User | Cand) else Cand(walk.materialise(x), x.rows)
        for x in parts
    )
    return Concat(axis, tuple(plain), where)


def _coarser(
    walk: Walk,
    concats: list[Concat],
    borders: list[int],
    pieces: dict[int, list[Any]],
    reason: str,
) -> tuple[list[int], dict[int, list[Any]]]:
    """Borders and pieces with neighbours joined that are all at U, or all at B."""
    stays = [all(map(f.is_user_only, some)) for some in zip(*pieces.values(), strict=True)]
    runs = [[i for i, _ in run] for _, run in groupby(enumerate(stays), key=lambda pair: pair[1])]
    joint = {
        id(x): [side_by_side(walk, [pieces[id(x)][i] for i in run], x, reason) for run in runs]
        for x in concats
    }
    return [0, *(borders[run[-1] + 1] for run in runs)], joint


def side_by_side(walk: Walk, parts: Sequence[Any], x: Concat, reason: str | None = None) -> Any:
    """Parts of a concatenation as one value: at U if all are there, else at B."""
    if len(parts) == 1:
        return parts[0]
    if all(map(f.is_user_only, parts)):
        return User(torch.cat([walk.at_users(part) for part in parts], x.axis), x.rows)
    return Cand(torch.cat([walk.materialise(part, reason) for part in parts], x.axis), x.rows)


def joint_borders(concats: Sequence[Concat]) -> list[int]:
    """Where a part of one of several concatenations of equal width begins, and the end."""
    widths = [[f.width(part, x.axis) for part in x.parts] for x in concats]
    return sorted({0, *(end for some in widths for end in accumulate(some))})


def cut(walk: Walk, x: Concat, borders: Sequence[int]) -> list[Any]:
    """The pieces of a concatenation between borders, which include its own."""
    start, pieces = 0, []
    for part in x.parts:
        end = start + f.width(part, x.axis)
        inside = [b for b in borders if start <= b <= end]
        for low, high in pairwise(inside):
            whole = (low, high) == (start, end)
            pieces.append(part if whole else narrow(walk, part, x.axis, low - start, high - low))
        start = end
    return pieces


def _tracked_axis(x: Any, concat: Concat, target: Any) -> int | None:
    """The axis of `x` that runs along the axis of `concat`."""
    if x is concat or target is aten.cat.default:
        return concat.axis
    if not is_pointwise(target):
        return None
    axis = f.rank(x) - (f.rank(concat) - concat.axis)
    return axis if axis >= 0 and not f.same(f.shape(x)[axis], 1) else None
