# SPDX-License-Identifier: Apache-2.0
"""How long a graph takes, estimated from its operators, in the number of users and candidates.

An operator costs the longer of its arithmetic and its traffic, and a launch. In a package
element-wise operators are fused with what makes or reads their values: no launch, no traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ikbo._inductor import is_lowered
from ikbo.transform import cost
from ikbo.transform.cost import Formula
from ikbo.transform.device_costs import DeviceCosts
from ikbo.transform.rowwise import is_pointwise

ops = torch.ops.ikbo

# Operators of which the user's product is added to the candidate's behind both: one more pass that
# reads both and writes the result. Our kernels for GPUs add it where they have the sums.
_ADDED_UP = (ops.linear, ops.lce)
# Operators that read a user's matrix again for each candidate.
_READ_BY_INDEX = (ops.bmm, ops.target_attention)


@dataclass(frozen=True)
class Piece:
    """One kernel: FLOPs and bytes as formulas, their rates, and what it costs whatever its size."""

    flops: Formula
    flops_per_s: float
    bytes: Formula
    bytes_per_s: float
    fixed_s: float

    def seconds(self, num_users: int, num_candidates: int) -> float:
        sizes = (num_users, num_candidates)
        flops, moved = self.flops(*sizes), self.bytes(*sizes)
        return max(flops / self.flops_per_s, moved / self.bytes_per_s) + self.fixed_s


def total(pieces: Iterable[Piece], num_users: int, num_candidates: int) -> float:
    """Seconds of some pieces, one after the other."""
    return sum(piece.seconds(num_users, num_candidates) for piece in pieces)


def pieces_of(
    node: Node, symbols: Mapping[Any, Any], costs: DeviceCosts, *, in_package: bool
) -> list[Piece]:
    """The kernels of one call; `symbols` maps the graph's batch symbols to "U" and "B"."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    value = node.meta.get("val")
    moved = cost.moved_bytes(node, symbols)
    if not moved.terms:
        return [] if in_package else [_fixed(costs.view_us)]
    is_expand = target is ops.expand.default
    if in_package and is_pointwise(target):
        return []
    launch = _launch_us(target, costs, in_package) / 1e6
    dtype = str(_first(value).dtype).removeprefix("torch.")
    is_own = target.namespace == "ikbo" and not (in_package and _is_lowered(node))
    rates = costs.own_flops_per_s if is_own else costs.flops_per_s
    rate = rates.get(dtype, rates["float32"])
    flops = cost.flops(node, symbols, math.ceil(costs.vector_bytes / _first(value).element_size()))
    bytes_per_s = costs.gather_bytes_per_s if is_expand else costs.bytes_per_s
    found = [Piece(flops, rate, moved, bytes_per_s, launch)]
    packet = target.overloadpacket
    if packet in _ADDED_UP and not (is_own and costs.device == "cuda"):
        result = cost.bytes_of(_first(value), symbols)
        parts_us = costs.package_product_us + costs.package_kernel_us
        fixed = parts_us / 1e6 if in_package else 0.0
        found.append(Piece(cost.ZERO, rate, result + result + result, costs.bytes_per_s, fixed))
    if packet in _READ_BY_INDEX:
        again = _rows_per_candidate(node, symbols)
        found.append(Piece(cost.ZERO, rate, again, costs.bytes_per_s, 0.0))
    return found


def _is_lowered(node: Node) -> bool:
    if node.target.overloadpacket not in _ADDED_UP:
        return False
    w_cand = node.args[3]
    return isinstance(w_cand, Node) and is_lowered(node.target, w_cand.meta["val"])


def _launch_us(target: torch._ops.OpOverload, costs: DeviceCosts, in_package: bool) -> float:
    is_product = target.overloadpacket in cost.FLOPS
    if in_package:
        return costs.package_product_us if is_product else costs.package_kernel_us
    if target.namespace == "ikbo" and target is not ops.expand.default:
        return costs.own_op_us
    return costs.product_us if is_product else costs.op_us


def _rows_per_candidate(node: Node, symbols: Mapping[Any, Any]) -> Formula:
    """Bytes of the user's operands, once for each candidate."""
    names = {"bmm": (0,), "target_attention": (1, 2)}[node.target.overloadpacket.__name__]
    sums = cost.ZERO
    for place in names:
        sums = sums + cost.bytes_of(node.args[place].meta["val"], symbols)
    return Formula({(0, 1) if key == (1, 0) else key: c for key, c in sums.terms.items()})


def _fixed(us: float) -> Piece:
    return Piece(cost.ZERO, 1.0, cost.ZERO, 1.0, us / 1e6)


def _first(value: Any) -> Tensor:
    values = value if isinstance(value, tuple | list) else [value]
    return next(x for x in values if isinstance(x, Tensor))


def repeated(written: Formula, costs: DeviceCosts, *, in_package: bool) -> Piece:
    """The kernel that repeats rows of users, one for each candidate: so many bytes of them."""
    launch = (costs.package_kernel_us if in_package else costs.op_us) / 1e6
    return Piece(cost.ZERO, 1.0, written, costs.gather_bytes_per_s, launch)
