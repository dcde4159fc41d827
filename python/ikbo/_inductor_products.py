# SPDX-License-Identifier: Apache-2.0
"""Products with constant weights on the CPU: packed for oneDNN or not, and for how many rows.

| weight | product |
|---|---|
| fp32, at most `_SMALL` elements, for `_FEW` rows, MKL fast | PyTorch's own, then its bias |
| any other | packed for oneDNN, for as many rows as the package's largest batch has |

TorchInductor (torch 2.11.0) packs all of them, each for the rows of its own input. Two things are
slower that way:

- A call of oneDNN costs 15 us before it computes, one of PyTorch 2 us. A small weight stays in
  cache, packed or not; and the addition of the bias fuses into what reads the product. For many
  rows, as those of all users' histories, oneDNN is ahead: it adds the bias before it writes.
- oneDNN's layout for the few rows of an example's users is up to 1.5 times as slow for other few
  rows as its layout for many. One layout for both batches also lets the two forms of a package
  share what is packed, and a layer take as long in one as in the other. A weight that both batches
  read is packed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

# Where PyTorch's product, then a pass over its result, was as fast as oneDNN's: weights of 256 KiB,
# which the second cache level of a server's core holds, and 2000 rows. For 9000 rows it was not.
_SMALL = 1 << 16
_FEW = 2048  # in the example, of 17 users and 1021 candidates unless the limits are smaller
_CPU = Path("/proc/cpuinfo")


@contextlib.contextmanager
def chosen_products(rows: int) -> Iterator[None]:
    """While it is entered, Inductor writes the products of programs for the CPU as above.

    Args:
        rows: of the largest batch, in the examples of the package's programs.
    """
    from torch._inductor.fx_passes import mkldnn_fusion

    class Products(mkldnn_fusion.CpuMkldnnDeviceOp):
        """What Inductor asks how a product is packed; `weight` is `[M, K]`, made of a constant."""

        def __init__(self) -> None:
            self.packed: dict[Any, Node] = {}

        def pack_linear_weight(
            self, graph: Graph, is_lp_weight: bool, weight: Node, batch_size: Any
        ) -> Node:
            is_small = weight.args[0].meta["val"].numel() <= _SMALL
            if is_small and _hint(batch_size) <= _FEW and not is_lp_weight and _has_fast_mkl():
                return weight
            packed_for = _with_batch(batch_size, rows)
            key = (graph, packed_for, *_place(weight.args[0]))
            if key in self.packed:
                graph.erase_node(weight)
            else:
                pack = super().pack_linear_weight
                self.packed[key] = pack(graph, is_lp_weight, weight, packed_for)
            return self.packed[key]

        def pack_linear(
            self,
            graph: Graph,
            is_lp_weight: bool,
            batch_size: Any,
            x: Node,
            weight: Node,
            bias: Node | None,
        ) -> Node:
            if weight.target is not aten.permute.default:
                return super().pack_linear(graph, is_lp_weight, batch_size, x, weight, bias)
            product = _plain(graph, x, weight.args[0], bias)
            graph.erase_node(weight)
            return product

    products = Products()
    with mock.patch.object(mkldnn_fusion, "_get_mkldnn_device_op", lambda _: products):
        yield


def _has_fast_mkl() -> bool:
    """Not with AVX-512 of another vendor than Intel, as `src/cpu/onednn.cpp` has it."""
    return not torch.cpu._is_avx512_supported() or "GenuineIntel" in _CPU.read_text()


def _hint(size: Any) -> int:
    """A size in the example."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.shape_env.size_hint(size.node.expr))


def _with_batch(size: Any, rows: int) -> int:
    """A size that depends on batches, where these have `rows` rows."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, rows)))


def _place(constant: Node) -> tuple[Any, ...]:
    """What two constants have in common that lie in the same memory."""
    if constant.op != "get_attr":
        return (constant,)
    value = attrgetter(constant.target)(constant.graph.owning_module)
    return value.data_ptr(), value.shape, value.stride()


def _plain(graph: Graph, x: Node, weight: Node, bias: Node | None) -> Node:
    def call(target: Any, *args: Any) -> Node:
        written = graph.call_function(target, args)
        written.meta["val"] = target(*torch.fx.map_arg(args, lambda node: node.meta["val"]))
        return written

    product = call(aten.mm.default, x, weight)
    if bias is None:
        return product
    # NOTE: the axis of length 1 hides `mm + add` from Inductor, which would make an addmm of it.
    total = call(aten.add.Tensor, call(aten.unsqueeze.default, product, 1), bias)
    return call(aten.squeeze.dim, total, 1)
