# SPDX-License-Identifier: Apache-2.0
"""A transformed program taken apart where users meet candidates: what runs at U, what at B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node
from torch.fx import traceback as fx_traceback

from ikbo._inductor import lce_in_parts
from ikbo.reference import ACTIVATIONS
from ikbo.transform.errors import TransformError
from ikbo.transform.inputs import INDEX


def _linear(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    user = torch.nn.functional.linear(x_user, w_user, bias)
    cand = torch.nn.functional.linear(x_cand, w_cand)
    return ACTIVATIONS[activation](torch.ops.ikbo.expand(user, cand_to_user) + cand)


@dataclass(frozen=True)
class Cut:
    """A program with U and B, taken apart.

    Attributes:
        inputs: the program's flat inputs, None for what is no tensor; the last is the index.
        crossing: inputs and values at U that the part at B reads, or that the program returns.
        at_users: the part that computes those of them that are no inputs, of the user inputs.
        at_candidates: the nodes of the part at B.
        outputs: what the program returns.
    """

    program: ExportedProgram
    inputs: tuple[Node | None, ...]
    crossing: tuple[Node, ...]
    at_users: Part | None
    at_candidates: tuple[Node, ...]
    outputs: tuple[Any, ...]


class Part(nn.Module):
    """Some nodes of a program as a module over named inputs; returns a tuple."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str]) -> None:
        super().__init__()
        self.steps, self.names = graph, tuple(names)

    def forward(self, values: dict[str, Tensor]) -> Any:
        # An export of the part keeps where its nodes come from.
        with fx_traceback.preserve_node_meta():
            return fx.Interpreter(self.steps).run(*[values[name] for name in self.names])


def cut(program: ExportedProgram, names: Sequence[str | None], roles: Sequence[str | None]) -> Cut:
    """Takes a transformed program apart.

    Args:
        names, roles: of its flat inputs without the index: "user", "candidate", or None.
    """
    # Inside of these the user's product would be out of reach for the level around it.
    table = {torch.ops.ikbo.linear.default: _linear, torch.ops.ikbo.lce.default: lce_in_parts}
    program = program.run_decompositions(table)
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    flat = [
        None if isinstance(s.arg, ConstantArgument) else placeholders[s.arg.name]
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT
    ]
    sides: dict[Node, str] = {}
    for node, role in zip(flat, [*roles, "candidate"], strict=True):
        if node is not None and role is not None:
            sides[node] = role
    for node in program.graph.nodes:
        if node.op == "call_function":
            found = {sides[n] for n in node.all_input_nodes if n in sides}
            if found:
                sides[node] = "candidate" if "candidate" in found else "user"
    (output,) = program.graph.output_node().args
    read = [n for node, side in sides.items() if side == "candidate" for n in node.all_input_nodes]
    read += [n for n in output if isinstance(n, Node)]
    crossing = tuple(dict.fromkeys(n for n in read if sides.get(n) == "user"))
    for node in crossing:
        if not isinstance(node.meta.get("val"), Tensor):
            raise TransformError(
                f"ikbo.transform: {node.target} gives a size of the users' batch that candidates "
                "need; a chain of levels cannot follow it"
            )
    named = {node: str(name) for node, name in zip(flat, [*names, INDEX], strict=True) if node}
    computed = [node for node in crossing if node.op != "placeholder"]
    users = {node: named[node] for node in named if sides.get(node) == "user"}
    at_users = None
    if computed:
        nodes = [n for n, side in sides.items() if side == "user" and n.op == "call_function"]
        graph = graph_of(program, list(users), nodes, computed)
        at_users = Part(graph, list(users.values()))
    at_candidates = tuple(
        n for n, side in sides.items() if side == "candidate" and n.op == "call_function"
    )
    return Cut(program, tuple(flat), crossing, at_users, at_candidates, tuple(output))


def graph_of(
    program: ExportedProgram,
    inputs: Sequence[Node],
    nodes: Iterable[Node],
    outputs: Sequence[Any],
    emit: Callable[[fx.Graph, Node, dict[Node, Node]], Node] | None = None,
) -> fx.GraphModule:
    """Some nodes of a program as a graph of their own, with what they need of its constants.

    Args:
        inputs: what becomes a placeholder, in this order.
        nodes: operators, in the program's order.
        outputs: what it returns, nodes or constants.
        emit: copies one node into the graph, given what its inputs became; None copies as it is.
    """
    wanted = set(nodes)
    tensors = _constants(program)
    root, graph = nn.Module(), fx.Graph()
    done: dict[Node, Node] = {}
    for node in inputs:
        done[node] = graph.placeholder(node.name)
        done[node].meta = dict(node.meta)

    def fetch(node: Node) -> Node:
        """A constant, or what is computed from constants alone."""
        if node in done:
            return done[node]
        if node in tensors:
            name = f"constant_{node.name}"
            root.register_buffer(name, tensors[node])
            done[node] = graph.get_attr(name)
        else:
            done[node] = graph.node_copy(node, fetch)
        return done[node]

    for node in program.graph.nodes:
        if node in wanted:
            for operand in node.all_input_nodes:
                fetch(operand)
            done[node] = graph.node_copy(node, fetch) if emit is None else emit(graph, node, done)
    graph.output(tuple(fetch(x) if isinstance(x, Node) else x for x in outputs))
    return fx.GraphModule(root, graph)


def _constants(program: ExportedProgram) -> dict[Node, Tensor]:
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            stored = program.state_dict.get(spec.target, program.constants.get(spec.target))
            assert isinstance(stored, Tensor), f"{spec.target} is no tensor"
            found[placeholders[spec.arg.name]] = stored.detach()
    return found
