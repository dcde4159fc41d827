# SPDX-License-Identifier: Apache-2.0
"""Branches (`torch.cond`) as fast as the programs they hold: what TorchInductor leaves out there.

Inductor (torch 2.11.0) does three things to the program around branches alone, and
`branches_as_programs` teaches it each for the branches, too:

| what | without it |
|---|---|
| freezing: weights are constants, and packed for oneDNN | products run on weights as they are |
| one list of constants | a constant inside a branch is not in the package |
| reuse of buffers, after looking up the memory's peak | compiling fails |
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node


def has_branches(program: ExportedProgram) -> bool:
    return bool(_branchings(program.graph_module))


@contextlib.contextmanager
def branches_as_programs() -> Iterator[None]:
    """While it is entered, Inductor compiles branches as it does the program around them."""
    from torch._inductor import freezing, graph
    from torch._inductor.codegen import wrapper

    freeze, begin = freezing.freeze, graph.SubgraphLowering.__init__

    def freeze_all(*args: Any) -> Any:
        around, kept = freeze(*args)
        with freezing.enter_freezing():
            _freeze_branches(around)
        return around, kept

    def with_constants_of_parent(self: Any, parent: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, parent, *args, **kwargs)
        for name in ("constants", "constant_reprs", "allocated_constant_name"):
            setattr(self, name, getattr(parent, name))

    with (
        mock.patch.object(freezing, "freeze", freeze_all),
        mock.patch.object(graph.SubgraphLowering, "__init__", with_constants_of_parent),
        mock.patch.object(graph, "is_same_tensor", _is_one),
        mock.patch.object(wrapper, "EfficientPeakEstimate", _AnyReuse),
    ):
        yield


class _AnyReuse:
    """In the place of Inductor's estimate: no reuse of a buffer exceeds the memory's peak.

    The estimate looks up the steps of a branch among those of the program around it, which may have
    fewer.
    """

    overall_peak_memory = math.inf

    def __init__(self, *_: Any) -> None:
        pass

    def peak_between(self, *_: Any) -> int:
        return 0

    def update_peak_between(self, *_: Any) -> None:
        pass


def _branchings(around: GraphModule) -> list[Node]:
    target = torch.ops.higher_order.cond
    return list(around.graph.find_nodes(op="call_function", target=target))


def _freeze_branches(around: GraphModule) -> None:
    """Freezes the branches of a frozen graph; its constants move into those that read them."""
    held: list[Tensor] = []
    for branching in _branchings(around):
        condition, *branches, operands = branching.args
        constants = {
            i: attrgetter(node.target)(around)
            for i, node in enumerate(operands)
            if node.op == "get_attr"
        }
        for branch in branches:
            _freeze_branch(getattr(around, branch.target), constants, held)
        left = tuple(node for i, node in enumerate(operands) if i not in constants)
        branching.args = (condition, *branches, left)
    around.graph.eliminate_dead_code()
    around.recompile()


def _freeze_branch(branch: GraphModule, constants: dict[int, Tensor], held: list[Tensor]) -> None:
    from torch._inductor.constant_folding import constant_fold, replace_node_with_constant
    from torch._inductor.fx_passes.freezing_patterns import freezing_passes
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    inputs = branch.graph.find_nodes(op="placeholder")
    for i, value in constants.items():
        replace_node_with_constant(branch, inputs[i], value)
    view_to_reshape(branch)
    freezing_passes(branch, [x.meta["val"] for i, x in enumerate(inputs) if i not in constants])
    constant_fold(branch)
    # Each constant is held once, packed or not.
    for node in branch.graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(branch)
        if not isinstance(value, Tensor):
            continue
        same = next((other for other in held if _is_equal(value, other)), None)
        if same is None:
            held.append(value)
        elif same is not value:
            replace_node_with_constant(branch, node, same)
    branch.recompile()


def _is_one(a: Tensor, b: Tensor) -> bool:
    """Whether two constants lie in the same memory; Inductor asks that of unpacked ones alone."""
    from torch._inductor.utils import is_same_mkldnn_tensor, is_same_tensor

    if a.is_mkldnn != b.is_mkldnn:
        return False
    return (is_same_mkldnn_tensor if a.is_mkldnn else is_same_tensor)(a, b)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    kinds = [(x.shape, x.dtype, x.device, x.layout, x.is_mkldnn) for x in (a, b)]
    if kinds[0] != kinds[1]:
        return False
    if not a.is_mkldnn:
        return a.stride() == b.stride() and torch.equal(a, b)
    formats = [torch.ops.mkldnn._get_mkldnn_serialized_md(x) for x in (a, b)]
    return torch.equal(*formats) and _packed_bytes(a) == _packed_bytes(b)


def _packed_bytes(x: Tensor) -> bytes:
    return ctypes.string_at(torch.ops.mkldnn.data_ptr(x), torch.ops.mkldnn._nbytes(x))
