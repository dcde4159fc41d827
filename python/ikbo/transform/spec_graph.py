# SPDX-License-Identifier: Apache-2.0
"""The operators of a program and what feeds them, for the picture of the compilation spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo.transform import cost
from ikbo.transform.cost import Formula

KINDS = ("user", "candidate", "mixed", "constant")
_BOTH = frozenset(("user", "candidate"))


@dataclass(frozen=True)
class GraphNode:
    """An input or an operator that moves bytes.

    `kind` says what it is computed from: inputs of users alone, of candidates alone, of both, or of
    none; the index counts as both. `row` is the row of the spec that it belongs to, "" for inputs.
    `module` is the path of the submodule that calls it, `shape` that of its first result, with U
    and B. `inputs` are the nodes that it reads, through views.
    """

    name: str
    op: str
    kind: str
    row: str
    module: str
    shape: str
    inputs: tuple[str, ...]
    flops: Formula
    bytes: Formula


def graph_nodes(
    program: ExportedProgram,
    roles: Mapping[str, str],
    symbols: Mapping[Any, str],
    place_of: Callable[[Node], tuple[str, str]],
) -> tuple[GraphNode, ...]:
    """The nodes of a program in its order.

    Args:
        roles: placeholder to "user", "candidate" or "mixed"; what is not in it is a constant.
        symbols: batch symbol of the program to "U" or "B".
        place_of: the row of the spec that an operator belongs to, and its submodule.
    """
    nodes: list[GraphNode] = []
    origins: dict[Node, frozenset[str]] = {}
    reads: dict[Node, tuple[str, ...]] = {}  # what a node stands for: itself, or what it views
    for node in program.graph.nodes:
        sources = dict.fromkeys(name for n in node.all_input_nodes for name in reads[n])
        origin = frozenset[str]().union(*(origins[n] for n in node.all_input_nodes))
        if node.op == "placeholder" and node.name in roles:
            origin = _BOTH if roles[node.name] == "mixed" else frozenset((roles[node.name],))
        is_shown = node.op == "placeholder" and node.name in roles
        if node.op == "call_function" and not _holds_tensors(node):
            origins[node], reads[node] = frozenset(), ()  # a size, which is no data
            continue
        if node.op == "call_function":
            is_shown = bool(cost.moved_bytes(node, symbols).terms)
        origins[node], reads[node] = origin, (node.name,) if is_shown else tuple(sources)
        if not is_shown:
            continue
        is_input = node.op == "placeholder"
        row, module = ("", "") if is_input else place_of(node)
        nodes.append(
            GraphNode(
                name=node.name,
                op="input" if is_input else str(node.target),
                kind=_kind(origin),
                row=row,
                module=module,
                shape=_shape(node.meta.get("val"), symbols),
                inputs=tuple(sources),
                flops=cost.ZERO if is_input else cost.flops(node, symbols),
                bytes=cost.ZERO if is_input else cost.moved_bytes(node, symbols),
            )
        )
    return tuple(nodes)


def _kind(origin: frozenset[str]) -> str:
    return "mixed" if len(origin) > 1 else next(iter(origin), "constant")


def module_path(node: Node) -> str:
    """The path of the innermost submodule that calls a node, "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _holds_tensors(node: Node) -> bool:
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves(node.meta.get("val")))


def _shape(value: Any, symbols: Mapping[Any, str]) -> str:
    tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    return f"[{', '.join(_size(d, symbols) for d in tensors[0].shape)}]" if tensors else ""


def _size(size: Any, symbols: Mapping[Any, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    return str(cost.polynomial(size.node.expr, symbols))
