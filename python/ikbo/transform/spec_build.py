# SPDX-License-Identifier: Apache-2.0
"""Step 5: the compilation spec of a transformed program, read off both graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo import _inductor
from ikbo._kernels import kernels_at
from ikbo._source_line import source_line
from ikbo.transform import cost
from ikbo.transform.advice import advice_for
from ikbo.transform.capture import Captured
from ikbo.transform.cost import Formula
from ikbo.transform.origin import ORIGIN
from ikbo.transform.spec import KernelRange, Row, Spec
from ikbo.transform.spec_graph import GraphNode, graph_nodes, module_path

# How a package runs an ikbo operator that Inductor serves better in parts.
_LOWERED = "torch: two products, gather, add"


def build_spec(
    captured: Captured,
    program: ExportedProgram,
    broadcasts: list[tuple[str, str]],
    limits: tuple[int, int],
) -> Spec:
    """The spec of a transformed program.

    Args:
        captured: the unmodified model.
        program: the transformed model; each node says which node of the model it comes from.
        broadcasts: (node of the model, why a user value had to be broadcast there).
        limits: (max_users, max_candidates).
    """
    symbols = batch_symbols(program, captured)
    names = {symbols[0]: "U", symbols[1]: "B"}
    emitted = by_origin(program)
    kernels = _kernels(captured, program, limits)
    before = {captured.batch: "B"}
    rows = []
    for node in captured.program.graph.nodes:
        if not is_operator(node):
            continue
        nodes = emitted.pop(node.name, [])
        blocked = _blocked(node.name, broadcasts)
        row = Row(
            name=node.name,
            op=str(node.target),
            source=source_line(node),
            batch=_batches(nodes, names),
            emitted=tuple(str(n.target) for n in nodes if _moves(n)),
            kernels=tuple(kernels.get(node.name, ())),
            flops_before=cost.flops(node, before),
            flops_after=_sum(cost.flops(n, names) for n in nodes),
            bytes_before=cost.moved_bytes(node, before),
            bytes_after=_sum(cost.moved_bytes(n, names) for n in nodes),
            blocked=blocked,
            advice=tuple(map(advice_for, blocked)),
        )
        if any(f.terms for f in (row.bytes_before, row.bytes_after)) or row.blocked:
            rows.append(row)
    rows += _output_row(emitted.pop("output", []), names, broadcasts)
    graphs = _graphs(captured, program, before, names)
    return Spec(*limits, *_typical(limits), tuple(rows), captured.columns, *graphs)


def _graphs(
    captured: Captured, program: ExportedProgram, before: dict[Any, str], after: dict[Any, str]
) -> tuple[tuple[GraphNode, ...], tuple[GraphNode, ...]]:
    """The operators before and after."""
    modules = {node.name: module_path(node) for node in captured.program.graph.nodes}

    def by_origin(node: Node) -> tuple[str, str]:
        return _origin(node), modules.get(_origin(node), "")

    roles = zip(captured.program.graph_signature.user_inputs, captured.input_roles, strict=True)
    new_roles = zip(
        program.graph_signature.user_inputs, [*captured.flat_roles, "mixed"], strict=True
    )
    return (
        graph_nodes(
            captured.program,
            {str(name): role for name, role in roles if role is not None},
            before,
            lambda node: (node.name, modules[node.name]),
        ),
        graph_nodes(
            program,
            {str(name): role for name, role in new_roles if role is not None},
            after,
            by_origin,
        ),
    )


def _blocked(name: str, broadcasts: list[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(why for at, why in broadcasts if at == name))


def _output_row(
    nodes: list[Node], names: dict[Any, str], broadcasts: list[tuple[str, str]]
) -> list[Row]:
    """What is computed because the model returns it: sums not added up before, users broadcast."""
    blocked = _blocked("output", broadcasts)
    moved = _sum(cost.moved_bytes(n, names) for n in nodes)
    if not moved.terms:
        return []
    ops = tuple(str(n.target) for n in nodes if _moves(n))
    flops = _sum(cost.flops(n, names) for n in nodes)
    zero = cost.ZERO
    return [
        Row(
            "output",
            "output",
            "the model's result",
            _batches(nodes, names),
            ops,
            (),
            zero,
            flops,
            zero,
            moved,
            blocked,
            tuple(map(advice_for, blocked)),
        )
    ]


def _typical(limits: tuple[int, int]) -> tuple[int, int]:
    """Sizes to show: a few users with 64 candidates each, within the range."""
    users = min(limits[0], 4)
    return users, min(limits[1], 64 * users)


def batch_symbols(program: ExportedProgram, captured: Captured) -> tuple[Any, Any]:
    """The symbols U and B of a transformed program, read off its inputs."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[str, set[Any]] = {"user": set(), "candidate": set()}
    roles = [*captured.flat_roles, "candidate"]
    for name, role in zip(program.graph_signature.user_inputs, roles, strict=True):
        if role is not None:
            size = nodes[str(name)].meta["val"].shape[0]
            found[role].add(size.node.expr if isinstance(size, torch.SymInt) else size)
    users, candidates = found["user"], found["candidate"]
    if len(users) != 1 or len(candidates) != 1 or users == candidates:
        raise RuntimeError(f"the batches U and B must be two symbols; got {users} and {candidates}")
    return users.pop(), candidates.pop()


def is_operator(node: Node) -> bool:
    """Whether a node calls an operator that gives tensors."""
    is_call = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_call and isinstance(node.meta.get("val"), Tensor | tuple | list)


def _moves(node: Node) -> bool:
    return (
        is_operator(node)
        and isinstance(node.meta.get("val"), Tensor | tuple | list)
        and not node.target.is_view
    )


def by_origin(program: ExportedProgram) -> dict[str, list[Node]]:
    """The operators of a transformed program, by the node of the model that they come from."""
    groups: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if is_operator(node):
            groups.setdefault(_origin(node), []).append(node)
    return groups


def _batches(nodes: list[Node], names: dict[Any, str]) -> str:
    """The batches of the results of nodes, and of the operands of ikbo's own operators."""
    values = [node.meta.get("val") for node in nodes]
    for node in nodes:
        if node.target.namespace == "ikbo":
            values += [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]
    sizes: list[Any] = [d for x in tensors for d in x.shape if isinstance(d, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    return "+".join(name for symbol, name in names.items() if symbol in symbols)


def _sum(formulas: Iterable[Formula]) -> Formula:
    return functools.reduce(Formula.__add__, formulas, cost.ZERO)


def _kernels(
    captured: Captured, program: ExportedProgram, limits: tuple[int, int]
) -> dict[str, list[KernelRange]]:
    """Per node of the model, the kernels that a package runs for it over the range."""
    lowered = _inductor.lower_operators(program)
    calls = [node for node in lowered.graph.nodes if _is_ikbo(node)]
    roles = [*captured.flat_roles, "candidate"]
    flat = [*captured.flat, torch.zeros(1, dtype=torch.int32)]
    inputs = [(x, r) for x, r in zip(flat, roles, strict=True) if r is not None]

    @functools.cache
    def chosen(users: int, candidates: int) -> tuple[str, ...]:
        sizes = {"user": users, "candidate": candidates}
        shapes = [torch.empty((sizes[r], *x.shape[1:]), device="meta") for x, r in inputs]
        return tuple(run.kernel for run in kernels_at(lowered, shapes))

    result: dict[str, list[KernelRange]] = {}
    for i, node in enumerate(calls):
        ranges = _partition(functools.partial(lambda i, u, b: chosen(u, b)[i], i), limits)
        result.setdefault(_origin(node), []).extend(
            KernelRange(f"ikbo::{node.target._opname}", *where) for where in ranges
        )
    full = ((1, limits[0]), (1, limits[1]))
    for node in program.graph.nodes:
        if _is_ikbo(node) and _origin(node) not in result:
            result[_origin(node)] = [KernelRange(f"ikbo::{node.target._opname}", *full, _LOWERED)]
    return result


def _is_ikbo(node: Node) -> bool:
    """Whether a node calls an operator with kernels of ours; `expand` is always a gather."""
    return is_operator(node) and node.target.namespace == "ikbo" and node.target._opname != "expand"


def _origin(node: Node) -> str:
    return str((node.meta.get("custom") or {}).get(ORIGIN))


def _partition(
    choose: Callable[[int, int], str], limits: tuple[int, int]
) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """Rectangles of the range (users, candidates) that have one kernel each.

    A choice changes at few sizes: it is probed at powers of two and each change is then located
    exactly.
    """

    def along(users: int) -> tuple[tuple[tuple[int, int], str], ...]:
        return tuple(_segments(lambda b: choose(users, b), limits[1]))

    return [
        (users, candidates, kernel)
        for users, row in _segments(along, limits[0])
        for candidates, kernel in row
    ]


def _segments(choose: Callable[[int], Any], limit: int) -> list[tuple[tuple[int, int], Any]]:
    probes = [2**p for p in range(limit.bit_length()) if 2**p < limit] + [limit]
    result, start = [], 1
    for low, high in pairwise(probes):
        while choose(low) != choose(high):
            first = low
            inside, outside = low, high
            while outside - inside > 1:
                middle = (inside + outside) // 2
                inside, outside = (
                    (middle, outside) if choose(middle) == choose(first) else (inside, middle)
                )
            result.append(((start, inside), choose(first)))
            start = low = outside
    return [*result, ((start, limit), choose(limit))]
