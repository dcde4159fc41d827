# SPDX-License-Identifier: Apache-2.0
"""ikbo::linear through PyTorch on a GPU: accuracy, gradients, the kernel that runs, graphs."""

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import DTYPES, Case, case, make_inputs
from tests.ops.test_library import traced_kernels
from tests.ops.test_linear import ACTIVATIONS, CASES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {"U": 5, "B": 300, "M": 170, "K_user": 130, "K_cand": 200}


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    check_against_reference(this, inputs, ikbo.linear(**inputs), reference.linear)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_on_the_cpu(dtype: str, activation: str) -> None:
    this = case("linear", dtype, "gaps", "contiguous", SIZES, activation=activation)
    gradients = []
    for device, wide in (("cuda", DTYPES[dtype]), ("cpu", torch.float64)):
        inputs = {
            name: value.nan_to_num().to(device, wide).requires_grad_()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value.to(device)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in make_inputs(this).items()
        }
        # Neither overflows fp16 nor reaches its subnormal numbers.
        (ikbo.linear(**inputs).square().sum() / 64).backward()
        gradients.append(
            {
                name: value.grad.cpu().double()
                for name, value in inputs.items()
                if isinstance(value, torch.Tensor) and value.grad is not None
            }
        )
    ours, expected = gradients
    assert ours.keys() == expected.keys() == {"x_user", "x_cand", "w_user", "w_cand", "bias"}
    # Two roundings to the dtype, of the output and of the gradient.
    bound = 4 * max(torch.finfo(DTYPES[dtype]).eps, 1e-6)
    for name in ours:
        assert (ours[name] - expected[name]).norm() <= bound * expected[name].norm(), name


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("num_candidates", [1, 300, 20000])
def test_selected_kernel_is_the_one_that_runs(dtype: str, num_candidates: int) -> None:
    this = case("linear", dtype, "shuffled", "contiguous", {**SIZES, "B": num_candidates})
    with traced_kernels() as launches:
        ikbo.linear(**make_inputs(this, "cuda"))
    name = str(DTYPES[dtype]).removeprefix("torch.")
    dims = [SIZES[letter] for letter in ("M", "K_user", "K_cand")]
    selected = torch.ops.ikbo._select_kernel(
        "linear", "cuda", name, SIZES["U"], num_candidates, dims
    )
    assert launches == ([] if dtype == "fp64" else [("linear", selected)])
    assert selected.startswith("composite" if dtype == "fp64" else "linear_")


def test_replays_in_a_graph() -> None:
    inputs = make_inputs(case("linear", "fp16", "shuffled", "contiguous", SIZES), "cuda")
    expected = ikbo.linear(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ikbo.linear(**inputs)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
