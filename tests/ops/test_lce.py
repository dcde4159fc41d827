# SPDX-License-Identifier: Apache-2.0
"""ikbo::lce on the CPU: accuracy, gradients, errors."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, make_inputs, standard_cases

SIZES = {"M": 11, "N": 6, "K_user": 29, "K_cand": 17}
LARGE = {"M": 130, "N": 64, "K_cand": 600}
CASES = [
    *standard_cases("lce", SIZES),
    *standard_cases("lce", SIZES, parts=3),
    *(
        case("lce", dtype, "sorted", "contiguous", {"U": 3, "B": 20, **SIZES, letter: size})
        for dtype in ("fp32", "bf16")
        for letter in SIZES
        for size in (0, 1)
    ),
    *(
        case("lce", dtype, "sorted", "padded", {"U": 3, "B": 20, **SIZES, "K_cand": k}, parts=2)
        for dtype in ("fp32", "bf16")
        for k in (0, 1, 2)
    ),
    # Matrices so large that each candidate is a call of its own, of oneDNN where that is faster.
    *(
        case("lce", dtype, "shuffled", layout, {"U": 2, "B": 5, **SIZES, **LARGE}, **options)
        for dtype in ("fp64", "fp32", "bf16")
        for layout in ("contiguous", "padded", "transposed")
        for options in ({}, {"parts": 2})
    ),
]


def small_inputs(**changes: Any) -> dict[str, Any]:
    sizes = {"U": 3, "B": 8, "M": 4, "N": 2, "K_user": 5, "K_cand": 3}
    return {**make_inputs(case("lce", "fp64", "shuffled", "contiguous", sizes)), **changes}


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this)
    check_against_reference(this, inputs, ikbo.lce(**inputs), reference.lce)


@pytest.mark.parametrize("this", CASES[:1], ids=lambda c: c.id)
def test_without_bias(this: Case) -> None:
    inputs = {**make_inputs(this), "bias": None}
    check_against_reference(this, inputs, ikbo.lce(**inputs), reference.lce)


@pytest.mark.parametrize("has_bias", [True, False])
def test_gradcheck(has_bias: bool) -> None:
    inputs = small_inputs()
    index, bias = inputs.pop("cand_to_user"), inputs.pop("bias")
    tensors = [t.nan_to_num().requires_grad_() for t in inputs.values()]
    if has_bias:
        assert torch.autograd.gradcheck(
            functools.partial(ikbo.lce, cand_to_user=index), [*tensors, bias.requires_grad_()]
        )
    else:
        operator = functools.partial(ikbo.lce, bias=None, cand_to_user=index)
        assert torch.autograd.gradcheck(operator, tensors)


def in_list(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same call with e_cand as a list of one row and two."""
    return {**inputs, "e_cand": list(inputs["e_cand"].split([1, 2], dim=1))}


def test_gradcheck_of_a_list() -> None:
    inputs = in_list(small_inputs())
    index, parts = inputs["cand_to_user"], inputs["e_cand"]
    tensors = [inputs[n].nan_to_num() for n in ("e_user", "w_user", "w_cand", "bias")] + parts

    def operator(e_user: Tensor, w_user: Tensor, w_cand: Tensor, bias: Tensor, *e: Tensor) -> Any:
        return ikbo.lce(e_user, e, w_user, w_cand, bias, index)

    assert torch.autograd.gradcheck(operator, [t.requires_grad_() for t in tensors])


def test_gradient_of_some_parts() -> None:
    inputs = in_list(small_inputs())
    plain = {**inputs, "e_cand": torch.cat(inputs["e_cand"], dim=1).requires_grad_()}
    inputs["e_cand"][1].requires_grad_()
    ikbo.lce(**plain).square().nan_to_num().sum().backward()
    ikbo.lce(**inputs).square().nan_to_num().sum().backward()
    assert inputs["e_cand"][0].grad is None
    torch.testing.assert_close(inputs["e_cand"][1].grad, plain["e_cand"].grad[:, 1:])


def test_slices_of_one_embedding_output() -> None:
    """Parts of one tensor with other rows between them, the gradient through the slices."""
    inputs = small_inputs()
    table = torch.randn(8, 10, 2, dtype=torch.float64, requires_grad=True)
    inputs["w_cand"] = torch.randn(4, 6, dtype=torch.float64)
    slices = [table[:, 1:3], table[:, 5:9]]
    inputs["e_user"] = inputs["e_user"].nan_to_num()
    out = ikbo.lce(**{**inputs, "e_cand": slices})
    joined = {**inputs, "e_cand": torch.cat(slices, dim=1)}
    torch.testing.assert_close(out, ikbo.lce(**joined))
    out.sum().backward()
    used = torch.tensor([1, 2, 5, 6, 7, 8])
    per_row = inputs["w_cand"].sum(0)[:, None].expand(8, 6, 2)
    torch.testing.assert_close(table.grad[:, used], per_row)
    assert table.grad[:, [0, 3, 4, 9]].count_nonzero() == 0


def test_list_of_one_is_the_tensor() -> None:
    inputs = small_inputs()
    alone = {**inputs, "e_cand": [inputs["e_cand"]]}
    assert torch.equal(ikbo.lce(**alone).nan_to_num(), ikbo.lce(**inputs).nan_to_num())


def test_list_may_be_a_tuple() -> None:
    inputs = in_list(small_inputs())
    as_tuple = {**inputs, "e_cand": tuple(inputs["e_cand"])}
    assert torch.equal(ikbo.lce(**as_tuple).nan_to_num(), ikbo.lce(**inputs).nan_to_num())


DOUBLE = functools.partial(torch.zeros, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"e_cand": []}, r"e_cand must hold at least one tensor \[B, K_i, N\]; got an empty list"),
        (
            {"e_cand": [DOUBLE(8, 1, 2), torch.zeros(8, 2, 2)]},
            r"e_cand\[1\] must have the dtype of e_user, float64; got float32",
        ),
        (
            {"e_cand": [DOUBLE(8, 1, 2), DOUBLE(8, 2, 2, device="meta")]},
            r"e_cand\[1\] must be on .*cpu.*; got meta",
        ),
        (
            {"e_cand": [DOUBLE(8, 1, 2), DOUBLE(8, 2)]},
            r"e_cand\[1\] must have rank 3, \[B, K_i, N\]; got rank 2",
        ),
        (
            {"e_cand": [DOUBLE(8, 1, 2), DOUBLE(7, 2, 2)]},
            r"e_cand\[1\] must have sizes \[B = 8, K_i = 2, N = 2\]; got \[7, 2, 2\]",
        ),
        (
            {"e_cand": [DOUBLE(8, 1, 2), DOUBLE(8, 2, 3)]},
            r"e_cand\[1\] must have sizes \[B = 8, K_i = 2, N = 2\]; got \[8, 2, 3\]",
        ),
        (
            {"e_cand": [DOUBLE(8, 1, 2), DOUBLE(8, 3, 2)]},
            r"w_cand must have sizes \[M = 4, sum of K_i = 4\]; got \[4, 3\]",
        ),
    ],
)
def test_bad_lists(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"ikbo::lce: .*{message}"):
        ikbo.lce(**small_inputs(**changes))


@pytest.mark.parametrize(
    ("e_cand", "message"),
    [
        ([], "e_cand must hold at least one tensor"),
        ([(8, 1, 2), (7, 2, 2)], r"e_cand\[1\] must have B = 8; got 7"),
        ([(8, 1, 2), (8, 3, 2)], "w_cand must have sum of K_i = 4; got 3"),
    ],
)
def test_fake_refuses_bad_lists(e_cand: list[tuple[int, ...]], message: str) -> None:
    inputs = small_inputs(e_cand=[DOUBLE(size) for size in e_cand])
    with pytest.raises(RuntimeError, match=f"ikbo::lce: .*{message}"):
        ikbo.lce(**pytree.tree_map(lambda t: t.to("meta"), inputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"e_cand": torch.zeros(8, 3, 2)},
            r"e_cand must have the dtype of e_user, float64; got float32",
        ),
        (
            {"e_cand": torch.zeros(8, 3, dtype=torch.float64)},
            r"e_cand must have rank 3, \[B, K_cand, N\]",
        ),
        (
            {"e_user": torch.zeros(3, 5, 4, dtype=torch.float64)},
            r"e_user .* N = 2\]; got \[3, 5, 4\]",
        ),
        (
            {"w_user": torch.zeros(4, 6, dtype=torch.float64)},
            r"w_user .* K_user = 5\]; got \[4, 6\]",
        ),
        (
            {"w_cand": torch.zeros(4, 6, dtype=torch.float64)},
            r"w_cand .* K_cand = 3\]; got \[4, 6\]",
        ),
        (
            {"bias": torch.zeros(4, 2, dtype=torch.float64)},
            r"bias must have rank 1, \[M\]; got rank 2",
        ),
        (
            {"bias": torch.zeros(2, dtype=torch.float64)},
            r"bias must have sizes \[M = 4\]; got \[2\]",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"ikbo::lce: .*{message}"):
        ikbo.lce(**small_inputs(**changes))
