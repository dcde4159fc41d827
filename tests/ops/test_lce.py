# SPDX-License-Identifier: Apache-2.0
"""ikbo::lce on the CPU: accuracy, gradients, errors."""

import functools
from typing import Any

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, make_inputs, standard_cases

SIZES = {"M": 11, "N": 6, "K_user": 29, "K_cand": 17}
LARGE = {"M": 130, "N": 64, "K_cand": 600}
CASES = [
    *standard_cases("lce", SIZES),
    *(
        case("lce", dtype, "sorted", "contiguous", {"U": 3, "B": 20, **SIZES, letter: size})
        for dtype in ("fp32", "bf16")
        for letter in SIZES
        for size in (0, 1)
    ),
    # Matrices so large that each candidate is a call of its own, of oneDNN where that is faster.
    *(
        case("lce", dtype, "shuffled", layout, {"U": 2, "B": 5, **SIZES, **LARGE})
        for dtype in ("fp64", "fp32", "bf16")
        for layout in ("contiguous", "padded", "transposed")
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
