# SPDX-License-Identifier: Apache-2.0
"""ikbo::prepack, and the operators on what it makes: accuracy, and that nothing else is taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import DTYPES, LAYOUTS, Case, case, make_inputs

LCE_SIZES = {"M": 11, "N": 6, "K_user": 29, "K_cand": 17}
LINEAR_SIZES = {"M": 13, "K_user": 37, "K_cand": 21}
CASES = [
    case(op, dtype, "shuffled", layout, {"U": users, "B": candidates, **sizes}, **options)
    for dtype in DTYPES
    for layout in LAYOUTS
    for users, candidates in ((5, 47), (1, 1), (3, 0))
    for op, sizes, options in (
        ("lce", LCE_SIZES, {}),
        ("lce", LCE_SIZES, {"parts": 3}),
        ("lce", {**LCE_SIZES, "K_cand": 1}, {"parts": 2}),
        ("linear", LINEAR_SIZES, {"activation": "silu"}),
    )
]
EVERY_CASE = pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
# One call of each operator that takes a packed weight.
CALLS = {
    "lce": case("lce", "fp32", "gaps", "contiguous", {"U": 5, "B": 12, **LCE_SIZES}, parts=3),
    "linear": case("linear", "fp32", "gaps", "contiguous", {"U": 5, "B": 12, **LINEAR_SIZES}),
}
EVERY_CALL = pytest.mark.parametrize("this", CALLS.values(), ids=CALLS.keys())


def k_cand_of(inputs: dict[str, Any]) -> list[int]:
    cand = inputs.get("e_cand", inputs.get("x_cand"))
    return [part.size(1) for part in ([cand] if isinstance(cand, Tensor) else cand)]


def packed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same call with its candidate weight packed."""
    return {**inputs, "w_cand": ikbo.prepack(inputs["w_cand"], k_cand_of(inputs))}


def operator_of(this: Case) -> Callable[..., Tensor]:
    return getattr(ikbo, this.op)


@EVERY_CASE
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this)
    result = operator_of(this)(**packed(inputs))
    check_against_reference(this, inputs, result, getattr(reference, this.op))


@EVERY_CALL
def test_one_weight_serves_many_calls(this: Case) -> None:
    """The packed weight is a tensor of its own: the plain one may change or go."""
    inputs = make_inputs(this)
    want = operator_of(this)(**inputs)
    with_packed = packed(inputs)
    inputs["w_cand"].fill_(torch.nan)
    for _ in range(3):
        torch.testing.assert_close(operator_of(this)(**with_packed), want, equal_nan=True)


def test_result_is_bytes_of_one_fingerprint() -> None:
    weights = torch.randn(2, 11, 17)
    first, second = (ikbo.prepack(w, [1, 16]) for w in weights)
    assert first.dtype == torch.uint8
    assert first.is_contiguous()
    assert first.shape == second.shape
    assert 2**15 <= first.size(0) < 2**16
    assert not torch.equal(first, second)
    assert torch.equal(first, ikbo.prepack(weights[0].clone(), [1, 16]))


def test_sizes_tell_formats_apart() -> None:
    """What a GPU's host side compares: no two of many formats may have the same sizes."""
    formats = [
        (device, dtype, m, [k, 64 - k])
        for device in ("cpu", "meta")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for m in (433, 434, 440)
        for k in (8, 24, 32, 40, 56)
    ]
    sizes = {tuple(torch.ops.ikbo._packed_sizes(*this)) for this in formats}
    assert len(sizes) == len(formats)


@pytest.mark.parametrize("parts", [[17], [1, 16], [5, 0, 12]])
def test_fake_has_the_sizes_of_the_result(parts: list[int]) -> None:
    w_cand = torch.randn(11, 17)
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake = ikbo.prepack(mode.from_tensor(w_cand), parts)
    real = ikbo.prepack(w_cand, parts)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_opcheck_of_prepack() -> None:
    torch.library.opcheck(torch.ops.ikbo.prepack.default, (torch.randn(11, 17), [1, 16]))


@EVERY_CALL
def test_opcheck(this: Case) -> None:
    inputs = packed(make_inputs(this))
    inputs["w_cand_packed"] = inputs.pop("w_cand")
    user = next(iter(inputs))
    inputs[user] = inputs[user].nan_to_num()
    torch.library.opcheck(getattr(torch.ops.ikbo, this.op).prepacked, (), inputs)


@EVERY_CALL
def test_gradients_are_refused(this: Case) -> None:
    inputs = packed(make_inputs(this))
    inputs["w_user"].requires_grad_()
    out = operator_of(this)(**inputs)
    with pytest.raises(RuntimeError, match=f"ikbo::{this.op}: a packed weight is for inference"):
        out.sum().backward()


def changed(field: int, value: int) -> Callable[[Tensor], Tensor]:
    """Another value in the packed tensor's header."""

    def change(weight: Tensor) -> Tensor:
        weight = weight.clone()
        weight.flatten()[8 * field : 8 * field + 8].view(torch.int64).fill_(value)
        return weight

    return change


@EVERY_CALL
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (changed(0, 5), "is no packed weight"),
        (changed(1, 99), "was packed by another version of ikbo"),
        (changed(2, 2), "was packed for float32 on cuda"),
        (changed(4, 12), r"was packed for float32 on cpu with M = 12"),
        (changed(6, 2**40), "is no packed weight"),
        (lambda w: w[:-1], "was packed for float32 on cpu"),
        (lambda w: w.flatten(), "was packed for float32 on cpu"),
        (lambda w: torch.stack([w, w], dim=2)[..., 0], "is no packed weight"),
        (torch.zeros_like, "is no packed weight"),
        (lambda w: w[:8, :1], "is no packed weight"),
    ],
)
def test_another_tensor_is_refused(
    this: Case, change: Callable[[Tensor], Tensor], got: str
) -> None:
    inputs = packed(make_inputs(this))
    inputs["w_cand"] = change(inputs["w_cand"])
    expected = f"ikbo::{this.op}: w_cand_packed must be packed for float32 on cpu with M = 1[13], "
    with pytest.raises(RuntimeError, match=rf"{expected}.*; got a tensor that .*{got}"):
        getattr(torch.ops.ikbo, this.op).prepacked(*inputs.values())


@EVERY_CALL
def test_another_call_s_weight_is_refused(this: Case) -> None:
    inputs = make_inputs(this)
    total = inputs["w_cand"].size(1)
    others = {
        "dtype": ikbo.prepack(inputs["w_cand"].half(), k_cand_of(inputs)),
        "M": ikbo.prepack(inputs["w_cand"][:-1], k_cand_of(inputs)),
        "parts": ikbo.prepack(inputs["w_cand"], [2, total - 2]),
        "order": ikbo.prepack(inputs["w_cand"], [total - 1, 1]),
        "device": torch.zeros(
            torch.ops.ikbo._packed_sizes("meta", torch.float32, 11, k_cand_of(inputs)),
            dtype=torch.uint8,
        ),
    }
    for what, weight in others.items():
        with pytest.raises(RuntimeError, match="w_cand_packed must be packed for float32 on cpu"):
            operator_of(this)(**{**inputs, "w_cand": weight})
            pytest.fail(f"{what}: not refused")


@EVERY_CALL
def test_weight_on_another_device_is_refused(this: Case) -> None:
    inputs = packed(make_inputs(this))
    inputs["w_cand"] = inputs["w_cand"].to("meta")
    with pytest.raises(RuntimeError, match=rf"ikbo::{this.op}: w_cand_packed must be on .*cpu"):
        operator_of(this)(**inputs)


@pytest.mark.parametrize(
    ("w_cand", "k_cand", "message"),
    [
        (torch.zeros(4, 8), [3, 4], r"with the sum 8 \(= w_cand.size\(1\)\); got \[3, 4\]"),
        (torch.zeros(4, 8), [9, -1], r"got \[9, -1\]"),
        (torch.zeros(4, 0), [], r"k_cand must be the K_i of one part or more.*got \[\]"),
        (torch.zeros(8), [8], r"w_cand must have rank 2, \[M, K_cand\]; got rank 1"),
        (torch.zeros(4, 8, dtype=torch.int32), [8], "w_cand must be float64, .*; got int32"),
    ],
)
def test_bad_arguments(w_cand: Tensor, k_cand: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"ikbo::prepack: .*{message}"):
        ikbo.prepack(w_cand, k_cand)
