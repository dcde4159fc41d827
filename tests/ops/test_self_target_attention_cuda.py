# SPDX-License-Identifier: Apache-2.0
"""ikbo::self_target_attention through PyTorch on a GPU: accuracy, gradients, the kernel that
runs."""

import functools

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import DTYPES, Case
from tests.ops.test_library import traced_kernels
from tests.ops.test_self_target_attention import (
    CASES,
    CAUSAL,
    LENGTHS,
    NAMES,
    OP,
    Inputs,
    inputs_of,
    small,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OURS = [
    small(dtype, D=d, S=s, Q=q, H=h, **options)
    for dtype in ("fp16", "bf16")
    for options in ({}, CAUSAL, LENGTHS, CAUSAL | LENGTHS)
    for d, s, q, h in ((64, 37, 2, 4), (128, 300, 1, 2), (96, 129, 8, 6), (256, 70, 5, 4))
]


def on_gpu(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in inputs.items()}


def selected(inputs: Inputs, layout: list[int] | None = None) -> str:
    q_user, q_cand, k = (inputs[name] for name in ("q_user", "q_cand", "k"))
    name = str(k.dtype).removeprefix("torch.")
    dims = [q_cand.size(1), *q_user.shape[1:3], *k.shape[2:]]
    select = functools.partial(torch.ops.ikbo._select_kernel, OP, "cuda", name)
    return select(len(q_user), len(q_cand), dims, layout or [])


@pytest.mark.parametrize("this", [*CASES, *OURS], ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = on_gpu(this)
    # The kernel's weights are rounded before they are multiplied with the values.
    roundings = 2 if this.dtype in ("fp16", "bf16") else 1
    results = ikbo.self_target_attention(**inputs)
    check_against_reference(
        this, inputs, results, reference.self_target_attention, roundings=roundings
    )


@pytest.mark.parametrize("this", OURS, ids=lambda c: c.id)
def test_selected_kernel_is_the_one_that_runs(this: Case) -> None:
    inputs = on_gpu(this)
    with traced_kernels() as launches:
        ikbo.self_target_attention(**inputs)
    kernel = selected(inputs)
    assert launches == ([] if kernel == "composite" else [(OP, kernel)])
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert kernel.startswith("self_target_attention_sm90" if is_hopper else "composite")


@pytest.mark.parametrize("change", ["scale", "layout"])
def test_what_no_kernel_takes_is_composed(change: str) -> None:
    inputs = on_gpu(small("fp16", D=64))
    if change == "scale":
        inputs["scale"] = -1.0
    else:
        inputs["q_user"] = inputs["q_user"].transpose(2, 3).contiguous().transpose(2, 3)
    with traced_kernels() as launches:
        ikbo.self_target_attention(**inputs)
    assert launches == []
    layout = [n for name in NAMES for n in (0, *inputs[name].stride())]
    assert selected(inputs, [*layout, int(change != "scale")]) == "composite"


@pytest.mark.parametrize("options", [{}, CAUSAL, CAUSAL | LENGTHS], ids=str)
@pytest.mark.parametrize("size", [{"B": 0}, {"Q": 0}, {"U": 1, "B": 3, "S": 1}], ids=str)
def test_of_few(options: dict[str, bool], size: dict[str, int]) -> None:
    this = small("fp16", D=64, **size, **options)
    inputs = on_gpu(this)
    results = ikbo.self_target_attention(**inputs)
    check_against_reference(this, inputs, results, reference.self_target_attention, roundings=2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, CAUSAL | LENGTHS], ids=["whole", "ragged"])
def test_gradients_are_those_on_the_cpu(dtype: str, options: dict[str, bool]) -> None:
    inputs = inputs_of(small(dtype, D=64, **options))
    gradients = []
    for device, wide in (("cuda", DTYPES[dtype]), ("cpu", torch.float64)):
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        for name in NAMES:
            moved[name] = moved[name].nan_to_num().to(wide).requires_grad_()
        *outs, lse_user, lse_cand = ikbo.self_target_attention(**moved)
        loss = sum(out.square().sum() for out in outs)
        loss = loss + sum(t.where(t.isfinite(), 0).sum() / 8 for t in (lse_user, lse_cand))
        loss.backward()
        gradients.append({n: moved[n].grad.cpu().double() for n in NAMES})
    ours, expected = gradients
    bound = 8 * torch.finfo(DTYPES[dtype]).eps
    for name in ours:
        assert (ours[name] - expected[name]).norm() <= bound * expected[name].norm(), name


def test_backward_never_replicates_histories() -> None:
    """Its peak stays below what one tensor [B, S, H, D] takes."""
    users, candidates, keys, heads, dim = 4, 2048, 512, 2, 64

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True)

    q_user, k, v = (randn(users, keys, heads, dim) for _ in range(3))
    q_cand = randn(candidates, 1, heads, dim)
    index = (torch.arange(candidates, device="cuda") % users).int()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out_user, out_cand, *_ = ikbo.self_target_attention(q_user, q_cand, k, v, index, is_causal=True)
    (out_user.sum() + out_cand.sum()).backward()
    replicated = candidates * keys * heads * dim * 2
    assert torch.cuda.max_memory_allocated() - before < replicated


def test_replays_in_a_graph() -> None:
    inputs = on_gpu(small("fp16", D=64, **CAUSAL, **LENGTHS))
    expected = ikbo.self_target_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ikbo.self_target_attention(**inputs)
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
