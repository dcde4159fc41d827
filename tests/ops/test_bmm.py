# SPDX-License-Identifier: Apache-2.0
"""ikbo::bmm on the CPU: accuracy, gradients, errors."""

import functools

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, make_inputs, standard_cases

SIZES = {"P": 7, "R": 12, "N": 5}
TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]
CASES = [
    *standard_cases("bmm", SIZES),
    *(
        case(
            "bmm",
            dtype,
            "shuffled",
            layout,
            {"U": 4, "B": 40, **SIZES},
            transpose_a=a,
            transpose_b=b,
        )
        for dtype in ("fp32", "bf16")
        for layout in ("contiguous", "padded")
        for a, b in TRANSPOSES
    ),
    *(
        case("bmm", dtype, "sorted", "contiguous", {"U": 3, "B": 20, **SIZES, letter: size})
        for dtype in ("fp32", "bf16")
        for letter in SIZES
        for size in (0, 1)
    ),
    # Matrices so large that each candidate is a call of its own.
    case("bmm", "fp32", "sorted", "padded", {"U": 2, "B": 5, "P": 9, "R": 600, "N": 64}),
]


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this)
    check_against_reference(this, inputs, ikbo.bmm(**inputs), reference.bmm)


@pytest.mark.parametrize(("transpose_a", "transpose_b"), TRANSPOSES)
@pytest.mark.parametrize(("num_users", "num_candidates"), [(3, 7), (1, 3), (2, 0)])
def test_gradcheck(
    num_users: int, num_candidates: int, transpose_a: bool, transpose_b: bool
) -> None:
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    sizes = {"U": num_users, "B": num_candidates, "P": 2, "R": 3, "N": 2}
    inputs = make_inputs(case("bmm", "fp64", "shuffled", "padded", sizes, **options))
    tensors = [inputs[name].nan_to_num().requires_grad_() for name in ("a_user", "b_cand")]
    operator = functools.partial(ikbo.bmm, cand_to_user=inputs["cand_to_user"], **options)
    assert torch.autograd.gradcheck(operator, tensors)


@pytest.mark.parametrize(
    ("a_sizes", "b_sizes", "message"),
    [
        ((3, 2), (4, 2, 5), r"a_user must have rank 3, \[U, P, R\]; got rank 2"),
        ((3, 2, 6), (4, 5, 5), r"b_cand must have R = 6 rows .*; got 5"),
        ((3, 2, 6), (5, 6, 5), r"cand_to_user must have sizes \[B = 5\]; got \[4\]"),
    ],
)
def test_bad_sizes(a_sizes: tuple[int, ...], b_sizes: tuple[int, ...], message: str) -> None:
    index = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"ikbo::bmm: {message}"):
        ikbo.bmm(torch.zeros(a_sizes), torch.zeros(b_sizes), index)
