# SPDX-License-Identifier: Apache-2.0
"""ikbo::linear on the CPU: accuracy, gradients, errors."""

import functools
import time
from typing import Any

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, make_inputs, standard_cases

SIZES = {"M": 13, "K_user": 37, "K_cand": 21}
LARGE = {"M": 170, "K_cand": 200}
ACTIVATIONS = ("none", "relu", "gelu", "silu", "sigmoid")
CASES = [
    *standard_cases("linear", SIZES),
    *(
        case("linear", dtype, "shuffled", "contiguous", {"U": 4, "B": 40, **SIZES}, activation=a)
        for dtype in ("fp64", "fp32", "bf16", "fp16")
        for a in ACTIVATIONS
    ),
    *(
        case("linear", dtype, "sorted", "contiguous", {"U": 3, "B": 20, **SIZES, letter: size})
        for dtype in ("fp32", "bf16")
        for letter in SIZES
        for size in (0, 1)
    ),
    # More candidates than are converted or multiplied at a time, and not a multiple.
    *(
        case("linear", dtype, "shuffled", layout, {"U": 9, "B": 615, **SIZES, **LARGE})
        for dtype in ("fp64", "fp32", "bf16")
        for layout in ("contiguous", "padded", "transposed")
    ),
]


def small_inputs(**changes: Any) -> dict[str, Any]:
    sizes = {"U": 3, "B": 8, "M": 4, "K_user": 5, "K_cand": 3}
    return {**make_inputs(case("linear", "fp64", "shuffled", "contiguous", sizes)), **changes}


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this)
    check_against_reference(this, inputs, ikbo.linear(**inputs), reference.linear)


@pytest.mark.parametrize("this", CASES[:1], ids=lambda c: c.id)
def test_without_bias(this: Case) -> None:
    inputs = {**make_inputs(this), "bias": None}
    check_against_reference(this, inputs, ikbo.linear(**inputs), reference.linear)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation: str) -> None:
    inputs = small_inputs()
    index = inputs.pop("cand_to_user")
    tensors = [t.nan_to_num().requires_grad_() for t in inputs.values()]
    operator = functools.partial(ikbo.linear, cand_to_user=index, activation=activation)
    assert torch.autograd.gradcheck(operator, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_users_without_candidates_is_zero(dtype: torch.dtype) -> None:
    x_user = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    index = torch.tensor([2, 0, 2], dtype=torch.int32)
    x_cand, w_user, w_cand = (torch.randn(*s, dtype=dtype) for s in ((3, 2), (5, 3), (5, 2)))
    ikbo.linear(x_user, x_cand, w_user, w_cand, None, index).sum().backward()
    assert x_user.grad is not None
    assert x_user.grad.dtype == dtype
    assert x_user.grad[[1, 3]].count_nonzero() == 0
    assert x_user.grad[[0, 2]].count_nonzero() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_cand": torch.zeros(8, 3)},
            r"x_cand must have the dtype of x_user, float64; got float32",
        ),
        (
            {"x_user": torch.zeros(3, 5, dtype=torch.int32)},
            r"x_user must be float64, .*; got int32",
        ),
        ({"bias": torch.zeros(4, device="meta")}, r"bias must be on cpu .*; got meta"),
        (
            {"x_user": torch.zeros(5, dtype=torch.float64)},
            r"x_user must have rank 2, \[U, K_user\]",
        ),
        ({"w_user": torch.zeros(4, 6, dtype=torch.float64)}, r"K_user = 5\]; got \[4, 6\]"),
        ({"w_cand": torch.zeros(4, 6, dtype=torch.float64)}, r"K_cand = 3\]; got \[4, 6\]"),
        ({"w_user": torch.zeros(6, 5, dtype=torch.float64)}, r"w_user .* \[M = 4, .*got \[6, 5\]"),
        (
            {"bias": torch.zeros(6, dtype=torch.float64)},
            r"bias must have sizes \[M = 4\]; got \[6\]",
        ),
        ({"activation": "tanh"}, r"activation must be one of none, relu, .*; got 'tanh'"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"ikbo::linear: .*{message}"):
        ikbo.linear(**small_inputs(**changes))


def test_views_of_one_weight_cost_what_dense_weights_cost() -> None:
    """GEMM libraries drop to reference code, hundreds of times slower, for layouts they dislike."""
    weight = torch.randn(512, 1024 + 1024)
    users, candidates = torch.randn(8, 1024), torch.randn(512, 1024)
    index = torch.arange(512, dtype=torch.int32) % 8

    def seconds(w_user: torch.Tensor, w_cand: torch.Tensor) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            ikbo.linear(users, candidates, w_user, w_cand, None, index)
            times.append(time.perf_counter() - start)
        return min(times)

    views = weight[:, :1024], weight[:, 1024:]
    dense = seconds(*(view.contiguous() for view in views))
    assert seconds(*views) < 20 * dense
