# SPDX-License-Identifier: Apache-2.0
"""Programs as modules for eager calls: functions of torch in the place of its operators."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ikbo
from ikbo.transform import direct, fields
from ikbo.transform.direct import FlatModule


class Model(nn.Module):
    """Slices of all kinds, conversions, methods, parameters and buffers with close or odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"a+b": nn.Embedding(10, 4)})
        self.a = nn.Module()
        self.a.register_buffer("b", torch.randn(4))
        self.register_buffer("a_b", torch.randn(4))
        self.scale = nn.Parameter(torch.randn(4))
        self.forward_ = nn.Linear(4, 2)

    def forward(self, x: Tensor, n: int) -> dict[str, Any]:
        ids = x[:, 1:3].abs().long()
        e = self.tables["a+b"](ids % 10)
        whole, odd, last, none = x[:], x[:, ::2], x[:, -2:], x[:, 5:3]
        same = (x * self.scale[0]).to(torch.float32, copy=True)
        out = self.forward_(e.sum(1) * self.scale + self.a.b - self.a_b)
        return {
            "out": [out, (odd, last)], "none": none, "whole": whole + n, "same": same,
            "view": e.view(-1, 8).expand(-1, 8).repeat(1, 2),
        }  # fmt: skip


@pytest.fixture
def made() -> tuple[Model, torch.export.ExportedProgram, FlatModule]:
    torch.manual_seed(0)
    model = Model().eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        model, (torch.randn(6, 6), 2), dynamic_shapes={"x": {0: batch}, "n": None}
    ).run_decompositions({})
    return model, program, FlatModule(program)


def test_results_are_those_of_the_program(made: Any) -> None:
    model, _, flat = made
    for module in (flat, copy.deepcopy(flat)):
        for rows in (1, 5):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(module(x, 2), model(x, 2), rtol=0, atol=0)


def test_functions_in_the_place_of_operators(made: Any) -> None:
    _, program, flat = made
    before = [str(node.target) for node in program.graph.nodes]
    assert "aten._assert_tensor_metadata.default" in before
    assert before.count("aten.slice.Tensor") > 5
    left = {n.target for n in flat.steps.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    # What has a step, what only copies, and what no function of torch is for.
    known = {"slice.Tensor", "_to_copy.default", "remainder.Scalar"}
    assert {str(t).removeprefix("aten.") for t in left} == known
    assert not flat.steps.graph.find_nodes(op="get_attr")


def test_constants_are_held_and_moved(made: Any) -> None:
    model, program, flat = made
    names = dict(flat.named_parameters())
    assert sorted(names) == ["forward__bias", "forward__weight", "scale", "tables_a_b_weight"]
    assert sorted(dict(flat.named_buffers())) == ["a_b", "a_b_"]
    assert names["scale"].data_ptr() == model.scale.data_ptr()
    x = torch.randn(3, 6, dtype=torch.float64)
    double = FlatModule(program).double()
    torch.testing.assert_close(
        double(x, 2)["out"][0], copy.deepcopy(model).double()(x, 2)["out"][0]
    )


def test_functions_of_torch_exist_in_its_python_interface() -> None:
    for name in direct._SAME:
        assert type(getattr(torch, name)) is types.BuiltinFunctionType, name


@pytest.mark.parametrize("width", [1, 2, 8, 9])
@pytest.mark.parametrize("batch", [(5,), (5, 3), (0,)])
def test_products_along_fields_of_any_width(width: int, batch: tuple[int, ...]) -> None:
    weight, bias = torch.randn(7, 4, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    x = torch.randn(*batch, 4, width, dtype=torch.float64)
    expected = torch.matmul(weight, x)
    torch.testing.assert_close(fields.product(weight, x), expected)
    torch.testing.assert_close(fields.product(weight, x, bias), expected + bias[:, None])
    assert fields.product(weight, x).is_contiguous()
    torch.testing.assert_close(
        fields.called(torch.ops.aten.matmul.default, (weight, x), {}), expected
    )


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("batch", [(5, 3), (2, 5, 3), (0, 3), (1, 3)])
def test_layers_over_transposed_fields_are_one_product(
    batch: tuple[int, ...], has_bias: bool
) -> None:
    weight = torch.randn(7, 4, dtype=torch.float64)
    bias = torch.randn(7, dtype=torch.float64) if has_bias else None
    x = torch.randn(*batch[:-1], 4, batch[-1], dtype=torch.float64).mT
    with Products() as seen:
        out = fields.called(torch.ops.aten.linear.default, (x, weight, bias), {})
    assert seen.names == ["aten.addmm.default" if has_bias else "aten.mm.default"]
    torch.testing.assert_close(out, x @ weight.mT if bias is None else x @ weight.mT + bias)


class Products(TorchDispatchMode):
    """The names of the products that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Fields(nn.Module):
    """A layer over the fields of a candidate's value, as DLRM's and Wukong's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fields = nn.Linear(12, 12), nn.Linear(6, 5)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.relu(self.embed(item)).unsqueeze(1) + user
        return self.fields(rows.transpose(1, 2)).transpose(1, 2)


def test_a_package_multiplies_transposed_fields_as_one_product() -> None:
    """As of the unmodified model, whose weight requires gradients; else as a product per row."""
    inputs = torch.randn(16, 6, 12), torch.randn(16, 12)
    module = ikbo.transform(_Fields().eval(), inputs, ["user"])
    decomposed = module.exported_program.run_decompositions()
    shapes = [
        (str(n.target), n.meta["val"].dim())
        for n in decomposed.graph.nodes
        if str(n.target).startswith(("aten.mm", "aten.addmm", "aten.bmm"))
    ]
    assert shapes == [("aten.addmm.default", 2)] * 2
