# SPDX-License-Identifier: Apache-2.0
"""Operators on a `Merged`: applied to each of its parts, where they treat each row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Merged, Rows, User
from ikbo.transform.parts import cut, joint_borders

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


def distribute(walk: Walk, target: Any, args: Any, kwargs: Any, where: Any) -> Any:
    """Applies an operator that treats each row alone to each part, if that keeps a part at U.

    before: op(Merged(Concat(User u, Cand c)))                    at B
    after:  Merged(Concat(op(u merged) at U, op(c merged) at B))
    """
    values = [x for x in f.leaves((args, kwargs)) if isinstance(x, f.FORMS)]
    batched = [x for x in values if x.rows is not None]
    if any(not isinstance(x, Merged | Const | User | Cand) for x in values):
        return None
    is_inner = next(x for x in batched if isinstance(x, Merged)).is_inner
    split = {id(x): _unmerged(walk, x, is_inner) for x in batched}
    borders = joint_borders(list(split.values()))
    pieces = {key: cut(walk, x, borders) for key, x in split.items()}
    if not any(all(map(f.is_user_only, some)) for some in zip(*pieces.values(), strict=True)):
        return None

    results = []
    for i in range(len(borders) - 1):

        def piece(x: Any, i: int = i) -> Any:
            return _merge(walk, pieces[id(x)][i], x.rows, is_inner) if id(x) in pieces else x

        piece_args, piece_kwargs = f.map_leaves(piece, (args, kwargs))
        results.append(walk.apply(target, *piece_args, **piece_kwargs))
    if not isinstance(results[0], tuple):
        return _joined(walk, results, where, is_inner)
    where_of = where if isinstance(where, tuple) else (where,) * len(results[0])
    return tuple(
        None if rows is None else _joined(walk, list(some), rows, is_inner)
        for some, rows in zip(zip(*results, strict=True), where_of, strict=True)
    )


def _unmerged(walk: Walk, x: Any, is_inner: bool) -> Concat:
    """A value whose rows are merged with an axis, with that axis beside the batch."""
    if isinstance(x, Merged):
        return x.x
    count, rows = x.rows.apart(is_inner)
    dims, axis = f.shape(x), x.rows.axis
    pair = [rows.length(), count] if is_inner else [count, rows.length()]
    apart = walk.apply(aten.view.default, x, [*dims[:axis], *pair, *dims[axis + 1 :]])
    return Concat(axis + is_inner, (apart,), rows)


def _merge(walk: Walk, piece: Any, rows: Rows, is_inner: bool) -> Any:
    """A piece with the axis beside its batch merged into it."""
    dims, axis = f.shape(piece), rows.axis
    count = dims[axis + is_inner]
    whole = replace(rows, inner=count) if is_inner else replace(rows, outer=count)
    shape = [*dims[:axis], whole.length(), *dims[axis + 2 :]]
    return walk.apply(aten.view.default, piece, shape)


def _joined(walk: Walk, results: list[Any], rows: Rows, is_inner: bool) -> Merged:
    parts: list[Const | User | Cand] = []
    for x in results:
        if not isinstance(x, Const | User | Cand):
            x = Cand(walk.materialise(x), x.rows)
        parts += _unmerged(walk, x, is_inner).parts
    return Merged(Concat(rows.axis + is_inner, tuple(parts), rows.apart(is_inner)[1]))
