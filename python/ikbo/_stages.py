# SPDX-License-Identifier: Apache-2.0
"""A program with the batches U and B as two: what users alone determine, and the rest.

    user inputs --> user stage --> state --+--> candidate stage --> outputs
                                           |
    the other inputs, and passed ones -----+

A server may keep a user's rows of the state from one request to the next (docs/serving.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx import Node

from ikbo import _programs
from ikbo._manifest import (
    CANDIDATE,
    CANDIDATE_STAGE,
    DTYPE_NAMES,
    USER,
    USER_STAGE,
    TensorSpec,
    UserStage,
)
from ikbo._served import ServedModel
from ikbo.transform.cut import graph_of

aten = torch.ops.aten


class _Stage(nn.Module):
    """Some nodes of a program over flat inputs; returns dense tensors that are no inputs."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.steps = graph

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            x.clone(memory_format=torch.contiguous_format) if any(x is y for y in tensors) else x
            for x in (output.contiguous() for output in self.steps(*tensors))
        )


@dataclass(frozen=True)
class Stages:
    """Both programs by name, what they hand over, and the bytes of weights that both hold."""

    programs: dict[str, ExportedProgram]
    user_stage: UserStage
    shared_bytes: int


def take_apart(served: ServedModel, program: ExportedProgram) -> Stages:
    """The stages of a served model.

    Args:
        program: of the served model's flat inputs, in the form that is compiled; where a size is
            read may change.

    Errors:
        ValueError: users alone determine nothing that candidates read.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = {
        name: nodes[node]
        for name, node in zip(served.roles, program.graph_signature.user_inputs, strict=True)
    }
    users = [node for name, node in inputs.items() if served.roles[name] == USER]
    candidates = [node for node in inputs.values() if node not in users]
    if not users:
        raise ValueError(
            "ikbo.package: user_stage must come with user inputs; all inputs are candidates'"
        )
    _count_in_least(program, users)
    of_users, of_candidates = _sides(program, users, candidates)
    state, passed = _crossing(program, users, of_users, of_candidates)
    if not state:
        raise ValueError(
            "ikbo.package: user_stage must have something to compute of users alone that "
            "candidates read; there is nothing beyond the inputs "
            f"{[name for name, node in inputs.items() if node in users]}"
        )
    (outputs,) = program.graph.output_node().args
    first = graph_of(program, users, _behind(state, of_users), state)
    reads = [node for node in inputs.values() if node in candidates or node in passed]
    second = graph_of(program, [*reads, *state], of_candidates, outputs)
    specs = tuple(_spec_of(node) for node in state)
    names = tuple(name for name, node in inputs.items() if node in passed)
    rows = _example_rows(served, inputs)
    with torch.no_grad():
        states = [x.contiguous() for x in first(*(rows[node] for node in users))]
    roles = dict(zip(inputs.values(), served.roles.values(), strict=True))
    return Stages(
        {
            USER_STAGE: _programs.export_over(
                served, _Stage(first), [rows[node] for node in users], [USER] * len(users)
            ),
            CANDIDATE_STAGE: _programs.export_over(
                served,
                _Stage(second),
                [*(rows[node] for node in reads), *states],
                [*(roles[node] for node in reads), *[USER] * len(state)],
            ),
        },
        UserStage(specs, names),
        _shared_bytes(first, second),
    )


def _sides(
    program: ExportedProgram, users: Sequence[Node], candidates: Sequence[Node]
) -> tuple[list[Node], list[Node]]:
    """The operators that read of users alone, and those that candidates have a part in."""
    sides = dict.fromkeys(users, USER) | dict.fromkeys(candidates, CANDIDATE)
    for node in program.graph.nodes:
        if node.op == "call_function":
            found = {sides[source] for source in node.all_input_nodes if source in sides}
            if found:
                sides[node] = CANDIDATE if CANDIDATE in found else USER
    calls = {node: side for node, side in sides.items() if node.op == "call_function"}
    return (
        [node for node, side in calls.items() if side == USER],
        [node for node, side in calls.items() if side == CANDIDATE],
    )


def _crossing(
    program: ExportedProgram,
    users: Sequence[Node],
    of_users: Sequence[Node],
    of_candidates: list[Node],
) -> tuple[list[Node], list[Node]]:
    """What the candidate stage reads of the users': computed values, and inputs.

    What is no rows of users, a size or a matrix with the rows of all users' histories, and what is
    an input seen in another way is computed in the candidate stage too, from what it is made of:
    `of_candidates` gets it.
    """
    (outputs,) = program.graph.output_node().args
    num_users = users[0].meta["val"].shape[0]
    known = set(of_users) | set(users)
    pending = [*outputs, *(x for node in of_candidates for x in node.all_input_nodes)]
    crossing: dict[Node, None] = {}
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or node not in known or node in crossing:
            continue
        if node.op == "placeholder" or (_has_rows(node, num_users) and not _is_seen_input(node)):
            crossing[node] = None
        elif node not in of_candidates:
            of_candidates.append(node)
            pending.extend(node.all_input_nodes)
    found = [node for node in program.graph.nodes if node in crossing]
    inputs = [node for node in found if node.op == "placeholder"]
    return [node for node in found if node not in inputs], inputs


def _behind(results: Sequence[Node], nodes: Sequence[Node]) -> set[Node]:
    """Those of the nodes that the results need."""
    among, found = set(nodes), set()
    pending = [node for node in results if node in among]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(source for source in node.all_input_nodes if source in among)
    return found


def _count_in_least(program: ExportedProgram, users: Sequence[Node]) -> None:
    """Reads the number of users off their smallest input, where a size of any of them is it.

    The candidate stage then needs no large input for its size alone.
    """
    num_users = users[0].meta["val"].shape[0]
    least = min(users, key=lambda node: math.prod(node.meta["val"].shape[1:]))
    for node in program.graph.nodes:
        if node.target is aten.sym_size.int and str(node.meta["val"]) == str(num_users):
            node.args = (least, 0)


def _has_rows(node: Node, num_users: int | torch.SymInt) -> bool:
    """Whether a value is a tensor with a row of fixed size for each user."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0 or value.dtype not in DTYPE_NAMES:
        return False
    rows, *fixed = value.shape
    return str(rows) == str(num_users) and all(isinstance(size, int) for size in fixed)


def _is_seen_input(node: Node) -> bool:
    """Whether a value is the bytes of an input, or some of them, in whatever order."""
    while node.op != "placeholder":
        target = node.target
        is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
        if not (is_view or target is aten.clone.default) or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def _spec_of(node: Node) -> TensorSpec:
    value = node.meta["val"]
    name, dtype = f"user_state.{node.name}", DTYPE_NAMES[value.dtype]
    return TensorSpec(name, dtype, (-1, *value.shape[1:]), USER)


def _example_rows(served: ServedModel, inputs: dict[str, Node]) -> dict[Node, Tensor]:
    num_users, num_candidates = served.export_sizes()
    index = torch.arange(num_candidates, dtype=torch.int32) % num_users
    return dict(zip(inputs.values(), served.make_inputs(num_users, index, seed=0), strict=True))


def _shared_bytes(first: fx.GraphModule, second: fx.GraphModule) -> int:
    held = {x.data_ptr() for x in first.buffers()}
    return sum(x.nbytes for x in second.buffers() if x.data_ptr() in held)
