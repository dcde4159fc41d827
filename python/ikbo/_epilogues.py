# SPDX-License-Identifier: Apache-2.0
"""Layers whose activation the product's own kernel computes, for packages on a GPU.

Inductor takes apart an `addmm` whose result goes into an element-wise operator: a product of
cuBLAS, then a kernel that reads and writes `[B, width]` once more for bias and activation.
cuBLASLt does both before it writes the product; `aten._addmm_activation` is PyTorch's name for it.
"""

from __future__ import annotations

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
    x has several axes. Layers without a bias stay: the epilogue has no form for them.
    """
    graph = program.graph
    for relu in graph.find_nodes(op="call_function", target=aten.relu.default):
        layer = relu.args[0]
        if _is_layer(layer) and len(layer.users) == 1:
            with graph.inserting_before(relu):
                fused = _fused(graph, layer, relu)
            relu.replace_all_uses_with(fused)
            program.graph_signature.replace_all_uses(relu.name, fused.name)
            graph.erase_node(relu)
            graph.erase_node(layer)
    program.graph_module.recompile()
    return program


def _is_layer(node: Node) -> bool:
    if node.target is not aten.linear.default or len(node.args) < 3 or node.args[2] is None:
        return False
    x, weight, bias = (operand.meta["val"] for operand in node.args)
    return (
        weight.dtype in _DTYPES
        and x.dtype == weight.dtype == bias.dtype
        and x.dim() >= 2
        and x.is_contiguous()
        and all(isinstance(size, int) for size in x.shape[1:])
    )


def _fused(graph: Graph, layer: Node, relu: Node) -> Node:
    x, weight, bias = layer.args
    rows, columns = x.meta["val"], weight.meta["val"]

    def call(target: torch._ops.OpOverload, value: Tensor, *args: object) -> Node:
        node = graph.call_function(target, args)
        node.meta |= relu.meta | {"val": value}
        return node

    transposed = call(aten.t.default, columns.t(), weight)
    if rows.dim() == 2:
        return call(aten._addmm_activation.default, relu.meta["val"], bias, x, transposed)
    flat = call(aten.view.default, rows.view(-1, rows.shape[-1]), x, [-1, rows.shape[-1]])
    width = columns.shape[0]
    value = relu.meta["val"].view(-1, width)
    product = call(aten._addmm_activation.default, value, bias, flat, transposed)
    return call(aten.view.default, relu.meta["val"], product, [-1, *rows.shape[1:-1], width])
