# SPDX-License-Identifier: Apache-2.0
"""The kernel that `ikbo::_select_kernel` names is the one that a GPU runs."""

import pytest
import torch

import ikbo
from ikbo.testing.inputs import DTYPES, case, make_inputs
from tests.ops.test_library import TRACED, traced_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("op", ["expand", "linear", "lce"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("num_candidates", [1, 600])
def test_of_contiguous_tensors(op: str, dtype: str, num_candidates: int) -> None:
    sizes, letters = TRACED[op]
    sizes = {"U": 3, "B": num_candidates, **sizes, **({"N": 8} if "N" in sizes else {})}
    this = case(op, dtype, "shuffled", "contiguous", sizes)
    with traced_kernels() as launches:
        getattr(ikbo, op)(**make_inputs(this, "cuda"))
    dims = [this.size(letter) for letter in letters]
    name = str(DTYPES[dtype]).removeprefix("torch.")
    kernel = torch.ops.ikbo._select_kernel(op, "cuda", name, 3, num_candidates, dims)
    is_composite = dtype == "fp64" and op != "expand"
    assert launches == ([] if is_composite else [(op, kernel)])
    assert kernel.startswith("composite" if is_composite else f"{op}_")


def test_of_rows_at_odd_addresses() -> None:
    x_user, x_cand = (torch.randn(3, 33, device="cuda").half()[:, 1:] for _ in range(2))
    weights = [torch.randn(24, 32, device="cuda").half() for _ in range(2)]
    index = torch.zeros(3, dtype=torch.int32, device="cuda")
    with traced_kernels() as launches:
        ikbo.linear(x_user, x_cand, *weights, None, index)
    place = {"aligned": [0, 32, 1], "odd": [1, 33, 1]}
    layout = [*place["odd"], *place["odd"], *place["aligned"], *place["aligned"]]
    select = torch.ops.ikbo._select_kernel
    kernel = select("linear", "cuda", "float16", 3, 3, [24, 32, 32], layout)
    assert launches == [("linear", kernel)]
    assert kernel != select("linear", "cuda", "float16", 3, 3, [24, 32, 32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_of_candidates_in_parts(dtype: torch.dtype) -> None:
    """Only Hopper's kernel takes a list; elsewhere the operator is a composite."""
    e_user, *parts = (torch.randn(4, k, 16, device="cuda", dtype=dtype) for k in (3, 2, 5))
    w_user, w_cand = (torch.randn(8, k, device="cuda", dtype=dtype) for k in (3, 7))
    index = torch.zeros(4, dtype=torch.int32, device="cuda")
    with traced_kernels() as launches:
        ikbo.lce(e_user, parts, w_user, w_cand, None, index)
    layout = [0, 48, 16, 1, 0, 3, 1, 0, 7, 1, 2, 0, 32, 16, 1, 5, 0, 80, 16, 1]
    name = str(dtype).removeprefix("torch.")
    kernel = torch.ops.ikbo._select_kernel("lce", "cuda", name, 4, 4, [8, 16, 3, 7], layout)
    assert launches == ([] if kernel == "composite" else [("lce", kernel)])
    with pytest.raises(RuntimeError, match="layout of lce must have a number more for each offset"):
        torch.ops.ikbo._select_kernel("lce", "cuda", name, 4, 4, [8, 16, 3, 7], layout[:-1])
