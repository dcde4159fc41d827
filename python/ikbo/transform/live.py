# SPDX-License-Identifier: Apache-2.0
"""Which range of an axis of each value is read, found backwards over the model's graph (A16)."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from ikbo.transform import forms as f
from ikbo.transform.rowwise import is_pointwise, result_axis
from ikbo.transform.rowwise_table import Axis

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)

# Axis, first position, end.
Range = tuple[int, int, int]

# The same, and how many elements a position has: more than 1 where axes were merged into one.
_Merged = tuple[int, int, int, Any]


def live_ranges(graph: Graph) -> dict[Node, Range]:
    """Per value of which not all is read: the one range of one axis that is."""
    live = _live(graph)
    return {node: (axis, low, high) for node, (axis, low, high, unit) in live.items() if unit == 1}


def _live(graph: Graph) -> dict[Node, _Merged]:
    live: dict[Node, _Merged] = {}
    for node in reversed(graph.nodes):
        if not isinstance(node.meta.get("val"), Tensor) or not node.users:
            continue
        found = [_read(user, node, live.get(user)) for user in node.users]
        axes = {None if some is None else (some[0], some[3]) for some in found}
        if len(axes) == 1 and None not in axes:
            low, high = min(x[1] for x in found if x), max(x[2] for x in found if x)
            axis, unit = axes.pop()  # type: ignore[misc]
            live[node] = (axis, low, high, unit)
    return live


def _read(user: Node, node: Node, out: _Merged | None) -> _Merged | None:
    """What `user`, of whose result `out` is read, reads of `node`; None for all, or unknown."""
    target, args = user.target, user.args
    size = node.meta["val"].shape
    if target in (aten.select.int, aten.slice.Tensor) and args[0] is node:
        chosen = _chosen(target, args[1:], size)
        return out if chosen == "all" else chosen and (*chosen, 1)
    if out is None or user.op != "call_function" or not isinstance(user.meta.get("val"), Tensor):
        return None
    if target in _VIEWS:
        return _before_view(size, user.meta["val"].shape, out)
    axis = _axis_before(user, node, out[0])
    if axis is None or size[axis] != user.meta["val"].shape[out[0]]:
        return None
    return (axis, *out[1:])


def _chosen(target: Any, args: Any, size: Any) -> Any:
    dim = f.normal_axis(args[0] if args else 0, len(size))
    if not isinstance(size[dim], int):
        is_whole = target is aten.slice.Tensor and list(args[1:]) in ([], [0], [0, f.LAST])
        return "all" if is_whole else None
    if target is aten.select.int:
        place = f.normal_axis(args[1], size[dim])
        return dim, place, place + 1
    low, high, step = slice(*args[1:3], *args[3:4]).indices(size[dim])
    return (dim, low, high) if step == 1 and low < high else None


def _axis_before(user: Node, node: Node, axis: int) -> int | None:
    """The axis of an operand that became an axis of the result, position by position."""
    target, args, ndim = user.target, user.args, node.meta["val"].ndim
    others = [x for x in user.all_input_nodes if x is not node]
    if target is aten.permute.default:
        return f.normal_axis(args[1][axis], ndim)  # type: ignore[index,arg-type]
    if target is aten.transpose.int:
        pair = [f.normal_axis(a, ndim) for a in args[1:3]]  # type: ignore[arg-type]
        return pair[1 - pair.index(axis)] if axis in pair else axis
    if is_pointwise(target):
        return None if (before := axis - user.meta["val"].ndim + ndim) < 0 else before
    if target in (aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default):
        is_first = args[0] is node and node not in others and args[1:].count(node) == 0
        return axis if is_first and axis == ndim - 2 == user.meta["val"].ndim - 2 else None
    for before in range(ndim):
        operands = torch.fx.map_arg(
            (user.args, user.kwargs),
            lambda x, a=before: (
                Axis(x.meta["val"].ndim, a if x is node else None)
                if isinstance(x.meta.get("val"), Tensor)
                else x
            ),
        )
        if result_axis(target, *operands) == axis:
            return before
    return None


def _before_view(old: Any, new: Any, out: _Merged) -> _Merged | None:
    """A range before a view, which may have merged its axis with others, or taken it apart."""
    axis, low, high, unit = out
    position = unit * _product(new[axis + 1 :])  # elements, those of the axes behind it included
    found = None
    for before in range(len(old)):
        if _product(old[:before]) != _product(new[:axis]):
            continue
        units = sympy.sympify(position) / _product(old[before + 1 :])
        if units == 1:
            return (before, low, high, 1)
        if units.is_integer:
            found = (before, low, high, units)
    return found


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * (size.node.expr if isinstance(size, torch.SymInt) else size)
    return total
