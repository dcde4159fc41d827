# SPDX-License-Identifier: Apache-2.0
"""What every operator must fulfil, whatever it computes."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ikbo
from ikbo import ops
from ikbo.testing.inputs import Case, case, make_inputs

CASES = {
    "expand": case("expand", "fp32", "gaps", "contiguous", {"U": 5, "B": 12, "K_user": 3}),
    "linear": case(
        "linear", "fp32", "gaps", "contiguous", {"U": 5, "B": 12, "K_user": 7, "K_cand": 6, "M": 4}
    ),
    "lce": case(
        "lce",
        "fp32",
        "gaps",
        "contiguous",
        {"U": 5, "B": 12, "K_user": 7, "K_cand": 6, "M": 4, "N": 8},
    ),
    "lce.list": case(
        "lce",
        "fp32",
        "gaps",
        "contiguous",
        {"U": 5, "B": 12, "K_user": 7, "K_cand": 6, "M": 4, "N": 8},
        parts=3,
    ),
    "bmm": case("bmm", "fp32", "gaps", "contiguous", {"U": 5, "B": 12, "P": 4, "R": 6, "N": 8}),
}
EVERY_OP = pytest.mark.parametrize("this", CASES.values(), ids=CASES.keys())


def finite_inputs(this: Case) -> dict[str, Any]:
    return pytree.tree_map(
        lambda t: t.nan_to_num() if t.is_floating_point() else t, make_inputs(this)
    )


def requiring_grad(inputs: dict[str, Any]) -> list[Tensor]:
    """The floating-point tensors among the inputs, made to require gradients."""
    return [t.requires_grad_() for t in pytree.tree_leaves(inputs) if t.is_floating_point()]


def operator_of(this: Case) -> Any:
    overloads = getattr(torch.ops.ikbo, this.op)
    return overloads.list if "parts" in dict(this.options) else overloads.default


def test_every_op_is_covered() -> None:
    # Attention has several results, prepack no index; each has a file of its own.
    named = {this.op for this in CASES.values()}
    assert {*named, "target_attention", "self_target_attention", "prepack"} == set(ops.__all__)


@pytest.mark.parametrize("name", ops.__all__)
def test_signature_is_the_schema(name: str) -> None:
    packet = getattr(torch.ops.ikbo, name)
    schema = packet.default._schema
    parameters = list(inspect.signature(getattr(ops, name)).parameters.values())
    # A keyword of its own chooses the overload that has such an argument.
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    names = {argument.name for other in schemas for argument in other.arguments}
    for keyword in [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]:
        assert keyword.name in names and keyword.default is None
        parameters.remove(keyword)
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        default = (
            argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        )
        assert parameter.default == default, argument.name


@EVERY_OP
def test_opcheck(this: Case) -> None:
    inputs = finite_inputs(this)
    requiring_grad(inputs)
    torch.library.opcheck(operator_of(this), (), inputs)


@EVERY_OP
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_index_out_of_range(this: Case, bad: int) -> None:
    inputs = make_inputs(this)
    inputs["cand_to_user"][7] = bad
    message = (
        f"ikbo::{this.op}: cand_to_user values must be in [0, U) with U = 5; "
        f"got cand_to_user[7] = {bad}"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        operator_of(this)(**inputs)


@EVERY_OP
def test_index_is_int32(this: Case) -> None:
    inputs = make_inputs(this)
    inputs["cand_to_user"] = inputs["cand_to_user"].long()
    with pytest.raises(RuntimeError, match=r"cand_to_user must be int32; got int64; convert"):
        operator_of(this)(**inputs)


@EVERY_OP
def test_index_on_another_device(this: Case) -> None:
    inputs = make_inputs(this)
    inputs["cand_to_user"] = inputs["cand_to_user"].to("meta")
    with pytest.raises(RuntimeError, match=r"cand_to_user must be on cpu .*; got meta"):
        operator_of(this)(**inputs)


@EVERY_OP
def test_two_runs_are_bitwise_equal(this: Case) -> None:
    inputs = make_inputs(this)
    assert torch.equal(operator_of(this)(**inputs), operator_of(this)(**inputs))


@EVERY_OP
def test_second_order_gradients_are_refused(this: Case) -> None:
    inputs = finite_inputs(this)
    x_user = next(iter(inputs.values())).requires_grad_()
    out = operator_of(this)(**inputs)
    (grad,) = torch.autograd.grad((out * out).sum(), x_user, create_graph=True)
    (first_order,) = torch.autograd.grad((operator_of(this)(**inputs) ** 2).sum(), x_user)
    assert torch.equal(grad, first_order)
    with pytest.raises(RuntimeError, match=f"ikbo::{this.op}: second-order gradients are not"):
        grad.sum().backward()


@EVERY_OP
def test_runs_in_inference_mode(this: Case) -> None:
    inputs = make_inputs(this)
    want = operator_of(this)(**inputs)
    with torch.inference_mode():
        assert torch.equal(operator_of(this)(**inputs), want)


@EVERY_OP
def test_calls_from_several_threads_agree(this: Case) -> None:
    inputs = make_inputs(this)
    want = operator_of(this)(**inputs)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: operator_of(this)(**inputs), range(40)))
    assert all(torch.equal(result, want) for result in results)


@EVERY_OP
def test_compiled_training_step(this: Case) -> None:
    torch._dynamo.reset()

    def loss(**inputs: Any) -> Tensor:
        return operator_of(this)(**inputs).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_candidates in (12, 20):
        sizes = {**dict(this.sizes), "B": num_candidates}
        other = case(this.op, "fp64", "shuffled", "contiguous", sizes, **dict(this.options))
        inputs = finite_inputs(other)
        leaves = requiring_grad(inputs)
        got = torch.autograd.grad(compiled(**inputs), leaves)
        for compiled_grad, grad in zip(
            got, torch.autograd.grad(loss(**inputs), leaves), strict=True
        ):
            torch.testing.assert_close(compiled_grad, grad)


class _Model(torch.nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, *inputs: Any) -> Tensor:
        return self.operator(*inputs)


@EVERY_OP
def test_export_keeps_users_and_candidates_dynamic(this: Case) -> None:
    inputs = tuple(finite_inputs(this).values())
    users, candidates = torch.export.Dim("U", max=64), torch.export.Dim("B", max=4096)
    by_size = {this.size("U"): {0: users}, this.size("B"): {0: candidates}}
    shapes = {"inputs": pytree.tree_map(lambda t: by_size.get(t.size(0), {}), inputs)}
    program = torch.export.export(_Model(operator_of(this)), inputs, dynamic_shapes=shapes)
    for num_users, num_candidates in ((1, 1), (1, 9), (7, 30)):
        sizes = {**dict(this.sizes), "U": num_users, "B": num_candidates}
        options = dict(this.options)
        other = make_inputs(
            case(this.op, this.dtype, "shuffled", this.layout, sizes, **options)
        ).values()
        assert torch.equal(program.module()(*other), operator_of(this)(*other))


@EVERY_OP
def test_fake_refuses_what_the_kernel_refuses(this: Case) -> None:
    inputs = pytree.tree_map(lambda t: t.to("meta"), make_inputs(this))
    inputs["cand_to_user"] = inputs["cand_to_user"].expand(2, -1)
    with pytest.raises(RuntimeError, match=rf"{this.op}: cand_to_user must have rank 1, \[B\]"):
        operator_of(this)(**inputs)


def test_ikbo_exposes_every_op() -> None:
    for name in ops.__all__:
        assert getattr(ikbo, name) is getattr(ops, name)
