# SPDX-License-Identifier: Apache-2.0
"""Plain layers of a lowered program, written as the libraries of a device compute them fastest.

| layer | on | becomes |
|---|---|---|
| `relu(linear(x, w, bias))` | a GPU | one call of cuBLASLt |
| `linear(x, w, bias)` that is a part of a `cat` | a GPU | the product, then an addition |
| `linear` of rows that do not lie one after the other | the CPU | the rows copied, one product |

Inductor takes apart an `addmm` whose result goes into an element-wise operator: a product of
cuBLAS, then a kernel that reads and writes `[B, width]` once more for bias and activation.
cuBLASLt does both before it writes the product; `aten._addmm_activation` is PyTorch's name for it.

A layer whose result is a part of a concatenation writes it there, between other columns. PyTorch
adds a bias in such a place by filling it with the bias first: one more pass over the result. An
addition by itself fuses into what fills the rest of the concatenation.

PyTorch makes one product of strided rows only where the weight requires a gradient, else a batched
one. A model's parameters do, the parts that the transformation makes of them do not; and only a
weight of a product of two matrices is packed for oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

aten = torch.ops.aten

# The element types that cuBLASLt has these epilogues for.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def with_epilogues(program: ExportedProgram) -> ExportedProgram:
    """Makes one operator of each layer and the ReLU that alone reads it, in place.

    `relu(linear(x, w, bias))` becomes `_addmm_activation(bias, x, w.t())`, its rows flattened where
    x has several axes. Layers without a bias stay: the epilogue has no form for them. The bias of a
    layer that is a part of a concatenation is added apart from its product.
    """
    for relu in program.graph.find_nodes(op="call_function", target=aten.relu.default):
        layer = relu.args[0]
        if _has_bias(layer) and len(layer.users) == 1:
            _replace(program, relu, partial(_activated, operands=layer.args))
            program.graph.erase_node(layer)
    for layer in program.graph.find_nodes(op="call_function", target=aten.linear.default):
        if _has_bias(layer) and any(map(_joins_columns, layer.users)):
            _replace(program, layer, partial(_added, operands=layer.args))
    program.graph_module.recompile()
    return program


def with_one_product(program: ExportedProgram) -> ExportedProgram:
    """Makes one product of each layer whose rows do not lie one after the other, in place."""
    for layer in program.graph.find_nodes(op="call_function", target=aten.linear.default):
        x = layer.args[0].meta["val"]
        if _has_fixed_row(x) and x.dim() > 2 and not x.is_contiguous():
            _replace(program, layer, partial(_copied, operands=layer.args))
    program.graph_module.recompile()
    return program


def _has_fixed_row(x: Tensor) -> bool:
    return x.dim() >= 2 and all(isinstance(size, int) for size in x.shape[1:])


def _joins_columns(node: Node) -> bool:
    return node.target is aten.cat.default and (node.args[1:] or (0,))[0] != 0


def _has_bias(node: Node) -> bool:
    if node.target is not aten.linear.default or len(node.args) < 3 or node.args[2] is None:
        return False
    x, weight, bias = (operand.meta["val"] for operand in node.args)
    return (
        weight.dtype in _DTYPES
        and x.dtype == weight.dtype == bias.dtype
        and x.is_contiguous()
        and _has_fixed_row(x)
    )


Call = Callable[..., Any]


def _replace(program: ExportedProgram, node: Node, write: Callable[[Call], Node]) -> None:
    """Puts what `write` calls in the place of a node, with the source of that node."""
    graph: Graph = program.graph

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        written = graph.call_function(target, args, kwargs)
        given = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        written.meta |= node.meta | {"val": target(*given[0], **given[1])}
        return written

    with graph.inserting_before(node):
        written = write(call)
    node.replace_all_uses_with(written)
    program.graph_signature.replace_all_uses(node.name, written.name)
    graph.erase_node(node)


def _activated(call: Call, operands: Sequence[Node]) -> Node:
    x, weight, bias = operands
    row = x.meta["val"].shape[1:]
    flat = x if len(row) == 1 else call(aten.view.default, x, [-1, row[-1]])
    out = call(aten._addmm_activation.default, bias, flat, call(aten.t.default, weight))
    return out if len(row) == 1 else _unflattened(call, out, row)


def _added(call: Call, operands: Sequence[Node]) -> Node:
    x, weight, bias = operands
    row = x.meta["val"].shape[1:]
    flat = x if len(row) == 1 else call(aten.view.default, x, [-1, row[-1]])
    product = call(aten.mm.default, flat, call(aten.t.default, weight))
    # NOTE: the axis of length 1 hides `mm + add` from Inductor, which would make an addmm of it.
    total = call(aten.add.Tensor, call(aten.unsqueeze.default, product, 1), bias)
    out = call(aten.squeeze.dim, total, 1)
    return out if len(row) == 1 else _unflattened(call, out, row)


def _copied(call: Call, operands: Sequence[Node]) -> Node:
    x, *weight_and_bias = operands
    row = x.meta["val"].shape[1:]
    copy = call(aten.clone.default, x, memory_format=torch.contiguous_format)
    flat = call(aten.view.default, copy, [-1, row[-1]])
    return _unflattened(call, call(aten.linear.default, flat, *weight_and_bias), row)


def _unflattened(call: Call, out: Node, row: torch.Size) -> Node:
    return call(aten.view.default, out, [-1, *row[:-1], out.meta["val"].shape[-1]])
