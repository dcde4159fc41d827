# SPDX-License-Identifier: Apache-2.0
"""Which range of an axis of each value is read, found backwards over the model's graph (A16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ikbo.transform import forms as f
from ikbo.transform.rowwise import is_pointwise, result_axis
from ikbo.transform.rowwise_table import Axis

aten = torch.ops.aten

# Axis, first position, end.
Range = tuple[int, int, int]


def live_ranges(graph: Graph) -> dict[Node, Range]:
    """Per value of which not all is read: the one range of one axis that is."""
    live: dict[Node, Range] = {}
    for node in reversed(graph.nodes):
        if not isinstance(node.meta.get("val"), Tensor) or not node.users:
            continue
        found = [_read(user, node, live.get(user)) for user in node.users]
        axes = {None if some is None else some[0] for some in found}
        if len(axes) == 1 and None not in axes:
            low, high = min(x[1] for x in found if x), max(x[2] for x in found if x)
            live[node] = (axes.pop(), low, high)  # type: ignore[assignment]
    return live


def _read(user: Node, node: Node, out: Range | None) -> Range | None:
    """What `user`, of whose result `out` is read, reads of `node`; None for all, or unknown."""
    target, args = user.target, user.args
    size = node.meta["val"].shape
    if target in (aten.select.int, aten.slice.Tensor) and args[0] is node:
        chosen = _chosen(target, args[1:], size)
        return out if chosen == "all" else chosen
    if out is None or user.op != "call_function" or not isinstance(user.meta.get("val"), Tensor):
        return None
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
    if target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return _axis_before_view(node.meta["val"].shape, user.meta["val"].shape, axis)
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


def _axis_before_view(old: Any, new: Any, axis: int) -> int | None:
    for before in range(len(old)):
        ahead, wanted = _product(old[:before]), _product(new[:axis])
        if ahead == wanted and old[before] == new[axis]:
            return before
    return None


def _product(sizes: Any) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * (size.node.expr if isinstance(size, torch.SymInt) else size)
    return total
