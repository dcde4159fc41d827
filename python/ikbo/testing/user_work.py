# SPDX-License-Identifier: Apache-2.0
"""What users alone determine in a captured model, found by numbers and not by the pass.

The graph is run on one request, then again with other candidates for the same users. An element
that never changes is user-only. A product of two such elements is work for the user: how many of an
operator's there are is counted by the operator itself, run on ones and zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ikbo.transform.capture import Captured
from ikbo.transform.cost import COUNTER_FORMULAS, FLOPS
from ikbo.transform.interpret import _ASSERTIONS

aten = torch.ops.aten
USERS, CANDIDATES = 5, 23
# So many that none of an output's values is 0 for all of them by chance.
_MANY = (16, 48)

# Sums of products of two operands; where their bias is among the arguments.
_PRODUCTS: dict[Any, int | None] = {
    aten.linear: 2,
    aten.matmul: None,
    aten.mm: None,
    aten.bmm: None,
    aten.einsum: None,
    aten.tensordot: None,
    aten.conv1d: 2,
    aten.conv2d: 2,
}


@dataclass(frozen=True)
class Work:
    """FLOPs per candidate of one operator of the unmodified model, and how many are the user's."""

    node: str
    flops: float
    user: float


def request_of(
    captured: Captured, num_users: int = USERS, num_candidates: int = CANDIDATES
) -> tuple[list[Any], Tensor]:
    """Flat inputs of a request, user inputs at U, others at B rows; and the index."""
    sizes = {"user": num_users, "candidate": num_candidates}
    flat = [
        x if role is None else x[torch.arange(sizes[role]) % len(x)]
        for x, role in zip(captured.flat, captured.flat_roles, strict=True)
    ]
    generator = torch.Generator().manual_seed(11)
    return flat, torch.randint(num_users, (num_candidates,), generator=generator, dtype=torch.int32)


def unchanged(
    captured: Captured, flat: list[Any], index: Tensor, resamples: int = 6
) -> dict[Node, Tensor]:
    """Per tensor of the graph, at B, which elements stay the same with other candidates.

    Args:
        captured: the graph; its candidate inputs have the rows to draw from.
        flat, index: as `request_of` gives them.
        resamples: how often other candidates are drawn.
    """
    generator = torch.Generator().manual_seed(11)
    first: dict[Node, Tensor] = {}
    same: dict[Node, Tensor] = {}
    for run in range(resamples + 1):
        inputs = []
        order = torch.arange(len(index)) + 1 + run
        noise = torch.randint(1000, (len(index),), generator=generator)
        for x, example, role in zip(flat, captured.flat, captured.flat_roles, strict=True):
            if role == "candidate":
                x = example[(order + noise) % len(example)]
            inputs.append(x[index.long()] if role == "user" else x)
        for node, value in node_values(captured, inputs).items():
            if node not in first:
                first[node], same[node] = value, torch.ones_like(value, dtype=torch.bool)
            same[node] &= (value == first[node]) | (value.isnan() & first[node].isnan())
    return same


def node_values(captured: Captured, flat: list[Any]) -> dict[Node, Tensor]:
    """The tensors of the captured graph, for flat inputs that all have one batch size."""
    values = _run(captured, flat)
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def user_work(captured: Captured, resamples: int = 12) -> list[Work]:
    """The FLOPs of each operator, and how many of them users alone determine.

    Products are followed element by element; of any other operator that has FLOPs, such as an
    attention or a recurrent net, the user's share is that of its first result.

    Errors: ValueError: an operator has FLOPs that `ikbo.transform.cost` does not know.
    """
    flat, index = request_of(captured, *_MANY)
    at_candidates = [
        x[index.long()] if role == "user" else x
        for x, role in zip(flat, captured.flat_roles, strict=True)
    ]
    whole = _counter()
    with whole:
        values = _run(captured, at_candidates)
    masks = {
        node: _in_all_rows(node, mask, values[node], len(index))
        for node, mask in unchanged(captured, flat, index, resamples).items()
    }
    found = []
    for node in values:
        if getattr(node.target, "overloadpacket", None) not in FLOPS:
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with _counter() as counter, torch.no_grad():
            node.target(*args, **kwargs)
        flops = counter.get_total_flops()
        share = _user_share(node, masks, values)
        found.append(Work(node.name, flops / len(index), share * flops / len(index)))
    missing = whole.get_total_flops() - len(index) * sum(work.flops for work in found)
    if abs(missing) > 0.5:
        raise ValueError(
            "ikbo.testing.user_work: every operator that has FLOPs must be in ikbo.transform.cost; "
            f"{missing:.0f} of {whole.get_total_flops()} FLOPs are of others"
        )
    return found


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS)


def _user_share(node: Node, masks: Mapping[Node, Tensor], values: Mapping[Node, Any]) -> float:
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in _PRODUCTS:
        result = next((n for n in (node, *node.users) if n in masks), None)
        return 0.0 if result is None else float(masks[result].double().mean())
    bias = _PRODUCTS[packet]
    args = [None if place == bias else arg for place, arg in enumerate(node.args)]

    def count(tensor_of: Any) -> float:
        def read(n: Node) -> Any:
            return tensor_of(masks[n]) if n in masks else values[n]

        operands, kwargs = torch.fx.map_arg((args, node.kwargs), read)
        return float(node.target(*operands, **kwargs).sum())  # type: ignore[operator]

    return count(Tensor.double) / count(lambda mask: torch.ones_like(mask).double())


def _in_all_rows(node: Node, mask: Tensor, value: Tensor, num_candidates: int) -> Tensor:
    """An element is the user's if it is so in every row, and not 0 in all of them.

    Outputs of a ReLU that no candidate here reaches do not change either.
    """
    dims = node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else ()
    batch = [axis for axis, dim in enumerate(dims) if isinstance(dim, torch.SymInt)]
    if len(batch) != 1 or mask.shape[batch[0]] != num_candidates:
        return mask
    held = mask.all(batch[0], keepdim=True)
    if value.is_floating_point():
        held = held & (value != 0).any(batch[0], keepdim=True)
    return held.expand_as(mask)


def _run(captured: Captured, flat: list[Any]) -> dict[Node, Any]:
    args, kwargs = captured.nest_joined(flat)
    program = captured.program
    values: dict[Node, Any] = {}
    inputs = iter(pytree.tree_leaves((args, kwargs)))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        stored = program.state_dict.get(spec.target, program.constants.get(spec.target))
        values[node] = next(inputs) if spec.kind is InputKind.USER_INPUT else stored
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "call_function" and node.target not in _ASSERTIONS:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values
