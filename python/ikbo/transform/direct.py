# SPDX-License-Identifier: Apache-2.0
"""A program as a module for eager calls, in which little happens beside its operators.

Torch calls the operators of an exported graph through a general way that costs some microseconds
more than the functions of its Python API do: a share of a model with hundreds of small operators.
"""

from __future__ import annotations

import keyword
import operator
import re
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

aten = torch.ops.aten

# Functions of torch that take what the ATen operator of that name takes.
_SAME = {
    "abs", "add", "addmm", "amax", "amin", "bmm", "cat", "clamp", "clone", "conv1d", "conv2d",
    "cumsum", "div", "embedding", "eq", "exp", "flatten", "gather", "ge", "gt", "index_select",
    "le", "log", "log1p", "logical_not", "lt", "matmul", "mean", "mm", "mul", "narrow", "ne",
    "neg", "permute", "pow", "relu", "reshape", "rsqrt", "select", "selu", "sigmoid", "softmax",
    "sqrt", "squeeze", "stack", "sub", "sum", "t", "tanh", "transpose", "unbind", "unsqueeze",
    "where",
}  # fmt: skip
_METHODS = ("view", "expand", "repeat")


class FlatModule(nn.Module):
    """A program as a module on flat inputs, without checks of its own.

    It returns what the program does, flat where that cannot be written out (`is_plain`).
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        module: Any = program.module(check_guards=False)
        graph = module.graph
        if is_plain(program.call_spec.out_spec):
            output = graph.output_node()
            output.args = (pytree.tree_unflatten(output.args[0], program.call_spec.out_spec),)
        _call_directly(graph)
        self._take(module, graph)
        graph.set_codegen(CodeGen())
        self.steps = GraphModule(nn.Module(), graph)

    def _take(self, module: nn.Module, graph: Graph) -> None:
        """Makes the constants of a graph its last inputs: a look-up by name takes a while."""
        nodes = [*graph.find_nodes(op="get_attr")]
        values = [operator.attrgetter(str(node.target))(module) for node in nodes]
        last = graph.find_nodes(op="placeholder")[-1]
        # In the order in which `forward` gives them.
        for is_parameter in (False, True):
            register: Any = self.register_parameter if is_parameter else self.register_buffer
            for node, value in zip(nodes, values, strict=True):
                if isinstance(value, nn.Parameter) is not is_parameter:
                    continue
                # The key of a ModuleDict may be any text.
                name = re.sub(r"\W", "_", str(node.target))
                while hasattr(self, name) or keyword.iskeyword(name):
                    name += "_"
                register(name, value)
                with graph.inserting_after(last):
                    last = graph.placeholder(name)
                last.meta = dict(node.meta)
                node.replace_all_uses_with(last)
                graph.erase_node(node)

    def forward(self, *flat: Any) -> Any:
        steps = self._modules["steps"]
        assert steps is not None
        return steps.forward(*flat, *self._buffers.values(), *self._parameters.values())


def is_plain(structure: pytree.TreeSpec) -> bool:
    """Whether a structure is of lists, tuples and dicts alone, which can be written out."""
    is_node = structure.type in (list, tuple, dict)
    return structure.is_leaf() or (is_node and all(map(is_plain, structure.children())))


def _call_directly(graph: Graph) -> None:
    """Replaces operators by functions and methods of torch that do the same."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
            continue
        name = node.target._opname
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is aten.slice.Tensor:
            _narrow(graph, node)
        elif node.target is aten._to_copy.default:
            if _changes_type(node):
                node.op, node.target = "call_method", "to"
                node.args, node.kwargs = (*node.args, node.kwargs["dtype"]), {}
        elif name in _METHODS:
            node.op, node.target = "call_method", name
        elif name == "linear":
            node.target = nn.functional.linear
        elif name in _SAME:
            node.target = getattr(torch, name)


def _narrow(graph: Graph, node: Node) -> None:
    """A slice as what it is: all of its operand, or a range of an axis of a known size."""
    given: list[Any] = list(node.args)
    defaults: list[Any] = [None, 0, None, None, 1]
    x, axis, start, end, step = given + defaults[len(given) :]
    like = x.meta["val"]
    size = like.shape[axis]
    is_whole = start in (None, 0) and end in (None, 2**63 - 1)
    if step == 1 and is_whole and not any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(x)
        graph.erase_node(node)
    elif step == 1 and all(isinstance(n, int | None) for n in (size, start, end)):
        low, high, _ = slice(start, end).indices(size)
        node.target, node.args = torch.narrow, (x, axis, low, max(0, high - low))


def _changes_type(node: Node) -> bool:
    """Whether a copy does nothing but to convert to another type."""
    (x,) = node.args
    is_other = isinstance(x, Node) and x.meta["val"].dtype != node.kwargs.get("dtype")
    return is_other and set(node.kwargs) == {"dtype"}
