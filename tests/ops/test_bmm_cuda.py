# SPDX-License-Identifier: Apache-2.0
"""ikbo::bmm through PyTorch on a GPU: accuracy, gradients, the kernel that runs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import DTYPES, Case, case, make_inputs
from tests.ops.test_bmm import CASES, TRANSPOSES
from tests.ops.test_library import traced_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def of_sizes(dtype: str, p: int, r: int, n: int, a: bool = False, b: bool = False) -> Case:
    sizes = {"U": 7, "B": 150, "P": p, "R": r, "N": n}
    return case("bmm", dtype, "gaps", "contiguous", sizes, transpose_a=a, transpose_b=b)


OURS = [
    of_sizes(dtype, p, r, n, a, b)
    for dtype in ("fp16", "bf16")
    for p, r, n in ((72, 64, 24), (256, 128, 64), (40, 200, 8), (200, 64, 1), (72, 1032, 64))
    for a, b in TRANSPOSES
]
GENERIC = [
    of_sizes(dtype, p, r, n, a, b)
    for dtype in ("fp16", "bf16", "fp32")
    for p, r, n in ((33, 47, 5), (1, 65, 130))
    for a, b in TRANSPOSES
]


@pytest.mark.parametrize("this", [*CASES, *OURS, *GENERIC], ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    check_against_reference(this, inputs, ikbo.bmm(**inputs), reference.bmm)


def selected(inputs: dict[str, Any], dtype: str, dims: list[int]) -> str:
    """The kernel that is named for these very tensors."""
    a, b = inputs["a_user"], inputs["b_cand"]
    layout = [number for t in (a, b) for number in (t.storage_offset(), *t.stride())]
    layout += [int(inputs["transpose_a"]), int(inputs["transpose_b"])]
    name = str(DTYPES[dtype]).removeprefix("torch.")
    return torch.ops.ikbo._select_kernel("bmm", "cuda", name, len(a), len(b), dims, layout)


@pytest.mark.parametrize("this", [*OURS, *GENERIC], ids=lambda c: c.id)
def test_selected_kernel_is_the_one_that_runs(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    with traced_kernels() as launches:
        ikbo.bmm(**inputs)
    kernel = selected(inputs, this.dtype, [this.size(letter) for letter in "PRN"])
    assert launches == [("bmm", kernel)]
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    generic = "bmm_simt" if this.dtype == "fp32" else "bmm_mma"
    assert kernel.startswith("bmm_sm90<" if is_hopper and this in OURS else generic)


def test_fp64_is_composed() -> None:
    inputs = make_inputs(of_sizes("fp64", 16, 16, 16), "cuda")
    with traced_kernels() as launches:
        ikbo.bmm(**inputs)
    assert launches == []
    assert selected(inputs, "fp64", [16, 16, 16]) == "composite"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("a", "b"), TRANSPOSES)
def test_gradients_are_those_on_the_cpu(dtype: str, a: bool, b: bool) -> None:
    inputs = make_inputs(of_sizes(dtype, 72, 64, 24, a, b))
    gradients = []
    for device, wide in (("cuda", DTYPES[dtype]), ("cpu", torch.float64)):
        moved = {
            name: value.nan_to_num().to(device, wide).requires_grad_()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value.to(device)
            if isinstance(value, Tensor)
            else value
            for name, value in inputs.items()
        }
        (ikbo.bmm(**moved).square().sum() / 64).backward()
        gradients.append({n: moved[n].grad.cpu().double() for n in ("a_user", "b_cand")})
    ours, expected = gradients
    bound = 8 * torch.finfo(DTYPES[dtype]).eps
    for name in ours:
        assert (ours[name] - expected[name]).norm() <= bound * expected[name].norm(), name


@pytest.mark.parametrize("n", [24, 64, 5])
def test_replays_in_a_graph(n: int) -> None:
    inputs = make_inputs(of_sizes("fp16", 72, 64, n), "cuda")
    expected = ikbo.bmm(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ikbo.bmm(**inputs)
    for _ in range(3):
        result.fill_(float("nan"))
        graph.replay()
        assert torch.equal(result, expected)
