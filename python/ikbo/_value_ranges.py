# SPDX-License-Identifier: Apache-2.0
"""Which values a program's integer inputs may have, and guards for values that are computed.

Compiled code uses row numbers unchecked: an id past its table reads foreign memory. A demand
starts where a value is used as a row number and walks back through operators that hand values on.

- Where it reaches a whole input, the range goes into the manifest, and the runtime refuses a
  request outside of it by name, position and value.
- Where it reaches a part of an input (a column of packed ids) or a computed value, no range of an
  input says the same; there the row number is clamped into the table, so that a bad id costs its
  own request a meaningless answer and nobody anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

aten = torch.ops.aten


class ValueRange(NamedTuple):
    """Allowed values, both ends included."""

    min: int
    max: int


Demand = tuple[Node, ValueRange]
_INT32_MAX = torch.iinfo(torch.int32).max

# Operators whose result holds all values of their first argument (of each tensor in it, for cat).
_KEEPS_ALL = {
    aten.view,
    aten.reshape,
    aten.unsqueeze,
    aten.squeeze,
    aten.flatten,
    aten.unflatten,
    aten.expand,
    aten.transpose,
    aten.permute,
    aten.t,
    aten.clone,
    aten.contiguous,
    aten.alias,
    aten.detach,
    aten.to,
    aten._to_copy,
    aten.repeat,
    aten.cat,
    aten.stack,
    torch.ops.ikbo.expand,
}


def bound_values(program: ExportedProgram) -> dict[str, ValueRange]:
    """Ranges of the program's integer inputs, by name of their placeholder; clamps what is left.

    An input that is nowhere used as a row number or a length is left out.

    Args:
        program: in the form that is compiled; changed in place where a row number is clamped.
    """
    ranges: dict[str, ValueRange] = {}
    inputs = set(program.graph_signature.user_inputs)
    for node in list(program.graph.nodes):
        for index, wanted in _demands(node):
            found: dict[str, ValueRange] = {}
            if _reaches_inputs((index, wanted), inputs, found):
                for name, one in found.items():
                    had = ranges.get(name, one)
                    ranges[name] = ValueRange(max(had.min, one.min), min(had.max, one.max))
            else:
                _clamp(program, node, index, wanted)
    program.graph.lint()
    return ranges


def both_ranges(one: dict[str, ValueRange], other: dict[str, ValueRange]) -> dict[str, ValueRange]:
    """The values that two programs with the same inputs both allow."""
    return {
        name: ValueRange(
            max(ranges[name].min for ranges in (one, other) if name in ranges),
            min(ranges[name].max for ranges in (one, other) if name in ranges),
        )
        for name in {**one, **other}
    }


def _reaches_inputs(demand: Demand, inputs: set[str], found: dict[str, ValueRange]) -> bool:
    """Collects the inputs behind a demand; False when something else is behind it too."""
    pending = [demand]
    while pending:
        node, wanted = pending.pop()
        if node.op == "placeholder":
            # What is no input is a weight or a buffer: the model answers for its values.
            if node.name in inputs:
                found[node.name] = wanted
        elif _packet(node) in _KEEPS_ALL or _is_whole_slice(node):
            pending.extend((source, wanted) for source in _tensors(node.args[0]))
        elif _packet(node) in (aten.add, aten.sub) and isinstance(node.args[1], int):
            shift = node.args[1] * int(node.kwargs.get("alpha", 1))
            if _packet(node) is aten.add:
                shift = -shift
            moved = ValueRange(wanted.min + shift, wanted.max + shift)
            pending.extend((source, moved) for source in _tensors(node.args[0]))
        else:
            return False
    return True


def _is_whole_slice(node: Node) -> bool:
    if _packet(node) is not aten.slice:
        return False
    start, end, step = [*node.args[2:], None, None, None][:3]
    return start in (None, 0) and end in (None, sys.maxsize) and step in (None, 1)


def _clamp(program: ExportedProgram, user: Node, index: Node, wanted: ValueRange) -> None:
    if _packet(index) is aten.clamp and index.args[1:] == tuple(wanted):
        return
    with program.graph.inserting_before(user):
        clamped = program.graph.call_function(aten.clamp.default, (index, *wanted))
    clamped.meta = dict(index.meta)
    user.replace_input_with(index, clamped)


def _demands(node: Node) -> list[Demand]:
    rule = _SINKS.get(_packet(node))
    return rule(node) if rule is not None else []


def _embedding(node: Node) -> list[Demand]:
    return _rows_of(node.args[0], 0, node.args[1])


def _index_along(node: Node) -> list[Demand]:
    dim = node.args[1]
    return _rows_of(node.args[0], dim, node.args[2]) if isinstance(dim, int) else []


def _index(node: Node) -> list[Demand]:
    demands: list[Demand] = []
    indices = node.args[1]
    for dim, index in enumerate(indices if isinstance(indices, (list, tuple)) else ()):
        demands += [
            (source, ValueRange(wanted.min - wanted.max - 1, wanted.max))
            for source, wanted in _rows_of(node.args[0], dim, index)
        ]
    return demands


def _lengths(node: Node) -> list[Demand]:
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "user_offsets" in given:  # any length: a history ends at its offset
        lengths = given.get("cand_lengths")
        return [(lengths, ValueRange(0, _INT32_MAX))] if isinstance(lengths, Node) else []
    demands: list[Demand] = []
    for name in ("user_lengths", "cand_lengths"):
        for source, rows in _rows_of(given["k"], 1, given.get(name)):
            demands.append((source, ValueRange(0, rows.max + 1)))
    return demands


_SINKS: dict[object, Callable[[Node], list[Demand]]] = {
    aten.embedding: _embedding,
    aten.index_select: _index_along,
    aten.gather: _index_along,
    aten.index: _index,
    torch.ops.ikbo.target_attention: _lengths,
    torch.ops.ikbo.self_target_attention: _lengths,
}


def _rows_of(table: object, dim: int, index: object) -> list[Demand]:
    """The demand that `index` names rows of `table` along `dim`, where their number is fixed."""
    if not (isinstance(table, Node) and isinstance(index, Node)):
        return []
    value = table.meta["val"]
    rows = value.shape[dim] if value.dim() else None
    return [(index, ValueRange(0, rows - 1))] if isinstance(rows, int) else []


def _tensors(argument: object) -> list[Node]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [item for item in items if isinstance(item, Node)]


def _packet(node: Node) -> object:
    target = node.target
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else None
