# SPDX-License-Identifier: Apache-2.0
"""Layers as a device computes them fastest: the same values, and no other layer is written so."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from examples.nets import NETS
from examples.nets import contestants as forms
from ikbo import _inductor
from ikbo._layers import with_epilogues, with_one_product
from ikbo._programs import export
from ikbo._served import from_transformed

aten = torch.ops.aten
FUSED = aten._addmm_activation.default


class Layers(nn.Module):
    """One layer for each way in which `forward` reads it."""

    def __init__(self, forward: Callable[..., object], bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias), nn.Linear(5, 3, bias)
        self.reads = forward

    def forward(self, x: Tensor) -> object:
        return self.reads(self, x)


def exported(net: nn.Module, x: Tensor) -> ExportedProgram:
    batch = Dim("B", min=1, max=100)
    return torch.export.export(net.eval(), (x,), dynamic_shapes={"x": {0: batch}})


def calls_of(program: ExportedProgram, target: Any) -> list[Node]:
    return list(program.graph.find_nodes(op="call_function", target=target))


def count(program: ExportedProgram, target: Any) -> int:
    return len(calls_of(program, target))


TAKEN: dict[str, tuple[Callable[..., object], tuple[int, ...], int]] = {
    "two layers": (lambda m, x: m.second(m.first(x).relu()).relu(), (7, 6), 2),
    "last without": (lambda m, x: m.second(m.first(x).relu()), (7, 6), 1),
    "result read twice": (lambda m, x: m.first(x).relu() * 2 + m.first(x).relu(), (7, 6), 2),
    "several axes": (lambda m, x: m.second(m.first(x).relu()).relu(), (7, 2, 4, 6), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TAKEN)
def test_a_layer_and_its_relu_are_one_operator(name: str, dtype: torch.dtype) -> None:
    forward, shape, fused = TAKEN[name]
    net = Layers(forward).to(dtype)
    program = exported(net, torch.randn(shape, dtype=dtype))
    layers, relus = count(program, aten.linear.default), count(program, aten.relu.default)
    program = with_epilogues(program)
    assert count(program, FUSED) == fused
    assert count(program, aten.linear.default) == layers - fused
    assert count(program, aten.relu.default) == relus - fused
    for rows in (1, 9):
        x = torch.randn(rows, *shape[1:], dtype=dtype)
        torch.testing.assert_close(program.module()(x), net(x))


JOINED: dict[str, tuple[Callable[..., object], tuple[int, ...], int]] = {
    "with a product": (lambda m, x: torch.cat([y := m.first(x), y * x[:, :5]], dim=1), (7, 6), 1),
    "several axes": (lambda m, x: torch.cat([m.first(x), x], dim=-1), (7, 4, 6), 1),
    "activated": (lambda m, x: torch.cat([m.first(x).relu(), x], dim=1), (7, 6), 0),
    "rows": (lambda m, x: torch.cat([y := m.first(x), y]), (7, 6), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", JOINED)
def test_a_part_of_a_concatenation_is_a_product_and_an_addition(
    name: str, dtype: torch.dtype
) -> None:
    forward, shape, taken = JOINED[name]
    net = Layers(forward).to(dtype)
    program = with_epilogues(exported(net, torch.randn(shape, dtype=dtype)))
    assert count(program, aten.mm.default) == taken
    for rows in (1, 9):
        x = torch.randn(rows, *shape[1:], dtype=dtype)
        exact = Layers(forward)
        exact.load_state_dict({k: v.double() for k, v in net.state_dict().items()})
        want = exact.double()(x.double())
        # The product is rounded, then the sum.
        error = (program.module()(x).double() - want).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * want.abs().max()


LEFT: dict[str, tuple[Callable[..., object], tuple[int, ...], bool, torch.dtype]] = {
    "the sum is read, too": (
        lambda m, x: (y := m.first(x)) + y.relu(), (7, 6), True, torch.float32
    ),
    "no bias": (lambda m, x: m.first(x).relu(), (7, 6), False, torch.float32),
    "another activation": (lambda m, x: m.first(x).sigmoid(), (7, 6), True, torch.float32),
    "no layer before": (lambda m, x: m.first(x.relu()), (7, 6), True, torch.float32),
    "rows that lie apart": (
        lambda m, x: m.first(x.transpose(1, 2)).relu(), (7, 6, 4), True, torch.float32
    ),
    "fp64": (lambda m, x: m.first(x).relu(), (7, 6), True, torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    forward, shape, bias, dtype = LEFT[name]
    program = exported(Layers(forward, bias).to(dtype), torch.randn(shape, dtype=dtype))
    before = str(program.graph)
    assert str(with_epilogues(program).graph) == before


ROWS_APART: dict[str, tuple[Callable[..., object], tuple[int, ...], int]] = {
    "transposed": (lambda m, x: m.first(x.transpose(1, 2)).transpose(1, 2), (7, 6, 4), 1),
    "four axes": (lambda m, x: m.first(x.permute(0, 3, 1, 2)), (7, 2, 6, 3), 1),
    "in place": (lambda m, x: m.second(m.first(x)), (7, 4, 6), 0),
    "a matrix": (lambda m, x: m.first(x[:, ::2]), (7, 12), 0),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ROWS_APART)
def test_rows_that_lie_apart_are_one_product(name: str, bias: bool) -> None:
    forward, shape, copied = ROWS_APART[name]
    net = Layers(forward, bias).double()
    program = exported(net, torch.randn(shape).double())
    layers = count(program, aten.linear.default)
    program = with_one_product(program)
    assert count(program, aten.clone.default) == copied
    assert count(program, aten.linear.default) == layers
    ranks = [n.args[0].meta["val"].dim() for n in calls_of(program, aten.linear.default)]
    assert ranks.count(2) >= copied
    for rows in (1, 9):
        x = torch.randn(rows, *shape[1:]).double()
        torch.testing.assert_close(program.module()(x), net(x))


def test_meta_is_that_of_the_relu() -> None:
    program = exported(Layers(TAKEN["several axes"][0]), torch.randn(7, 2, 4, 6))
    relu = program.graph.find_nodes(op="call_function", target=aten.relu.default)[-1]
    expected = relu.meta["val"].shape, relu.meta["stack_trace"]
    program = with_epilogues(program)
    last = next(n for n in program.graph.nodes if n.name == program.graph_signature.user_outputs[0])
    assert (last.meta["val"].shape, last.meta["stack_trace"]) == expected
    for node in program.graph.nodes:
        if node.op == "call_function":
            given = torch.fx.map_arg(node.args, lambda n: n.meta["val"])
            assert node.target(*given).shape == node.meta["val"].shape


def test_it_is_one_call_in_the_code(tmp_path: Path) -> None:
    """Neither the decompositions nor Inductor take it apart."""
    path = tmp_path / "layers.pt2"
    program = with_epilogues(exported(Layers(TAKEN["two layers"][0]), torch.randn(7, 6)))
    with path.open("w+b") as file:
        _inductor.compile_to({"model": (program, _inductor.compile_options("cpu"))}, file)
    with zipfile.ZipFile(path) as archive:
        (wrapper,) = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        calls = re.findall(
            "aoti_torch_cpu_(addmm|_addmm_activation|mkl)", archive.read(wrapper).decode()
        )
    assert calls == ["_addmm_activation"] * 2


def test_the_layers_of_a_transformed_net() -> None:
    """As a package for a GPU has them: three in the towers, one in the head."""
    made = NETS["early_ranking"]
    net = forms.plain_net("early_ranking", made.small, torch.float32, "cpu")
    module = forms.transformed(net, made.small, (4, 64), torch.float32, "cpu")
    served = from_transformed(module, None, None, both_forms=False)
    lowered = _inductor.lowered(export(served, served.module), torch.device("cuda"))
    assert count(lowered, FUSED) == 4
    index = torch.tensor([2, 0, 1, 1, 2, 2], dtype=torch.int32)
    inputs = served.make_inputs(3, index, seed=1)
    torch.testing.assert_close(lowered.module()(*inputs), served.module(*inputs))
