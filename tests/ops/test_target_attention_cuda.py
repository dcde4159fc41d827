# SPDX-License-Identifier: Apache-2.0
"""ikbo::target_attention through PyTorch on a GPU: accuracy, gradients, the kernel that runs."""

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import DTYPES, Case
from tests.ops import test_target_attention_packed as packed
from tests.ops.test_library import traced_kernels
from tests.ops.test_target_attention import CASES, Inputs, inputs_of, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = {"user_lengths": True, "cand_lengths": True}
OURS = [
    small(dtype, D=d, S=s, Q=q, **masks)
    for dtype in ("fp16", "bf16")
    for masks in ({}, LENGTHS)
    for d, s, q in ((64, 37, 2), (128, 300, 1), (96, 129, 8), (256, 70, 5), (40, 1, 64))
]


def on_gpu(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in inputs.items()}


@pytest.mark.parametrize("this", [*CASES, *OURS], ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = on_gpu(this)
    # The kernel's weights are rounded before they are multiplied with the values.
    roundings = 2 if this.dtype in ("fp16", "bf16") else 1
    check_against_reference(
        this,
        inputs,
        ikbo.target_attention(**inputs),
        reference.target_attention,
        roundings=roundings,
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("options", [{}, {"cand_lengths": True}], ids=["whole", "by-candidate"])
@pytest.mark.parametrize(("d", "s", "q"), [(64, 37, 2), (128, 300, 1), (96, 129, 8)])
def test_packed(dtype: str, options: dict[str, bool], d: int, s: int, q: int) -> None:
    this = packed.small(dtype, D=d, S=s, Q=q, **options)
    inputs = {n: v.cuda() for n, v in packed.inputs_of(this).items()}
    with traced_kernels() as launches:
        result = ikbo.target_attention(**inputs)
    check_against_reference(this, inputs, result, reference.target_attention, roundings=2)
    name = str(DTYPES[dtype]).removeprefix("torch.")
    dims = [this.size(letter) for letter in ("Q", "H", "H_kv", "D")]
    select = torch.ops.ikbo._select_kernel
    kernel = select("target_attention.packed", "cuda", name, this.size("U"), this.size("B"), dims)
    assert launches == ([] if kernel == "composite" else [("target_attention", kernel)])


@pytest.mark.parametrize("this", OURS, ids=lambda c: c.id)
def test_selected_kernel_is_the_one_that_runs(this: Case) -> None:
    with traced_kernels() as launches:
        ikbo.target_attention(**on_gpu(this))
    name = str(DTYPES[this.dtype]).removeprefix("torch.")
    dims = [this.size(letter) for letter in ("Q", "S", "H", "H_kv", "D")]
    users, candidates = this.size("U"), this.size("B")
    select = torch.ops.ikbo._select_kernel
    kernel = select("target_attention", "cuda", name, users, candidates, dims)
    assert launches == ([] if kernel == "composite" else [("target_attention", kernel)])
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert kernel.startswith("target_attention_sm90" if is_hopper else "composite")


@pytest.mark.parametrize("change", ["user_mask", "scale", "layout"])
def test_what_no_kernel_takes_is_composed(change: str) -> None:
    inputs = on_gpu(small("fp16", D=64))
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    layout = [n for t in (q, k, v) for n in (0, *t.stride())] + [0, 1]
    if change == "user_mask":
        inputs["user_mask"] = torch.ones(k.shape[:2], dtype=torch.bool, device="cuda")
        layout[-2] = 1
    elif change == "scale":
        inputs["scale"] = -1.0
        layout[-1] = 0
    else:
        inputs["q"] = q.transpose(2, 3).contiguous().transpose(2, 3)
        layout[1:5] = inputs["q"].stride()
    with traced_kernels() as launches:
        ikbo.target_attention(**inputs)
    assert launches == []
    dims = [q.size(1), k.size(1), q.size(2), *k.shape[2:]]
    select = torch.ops.ikbo._select_kernel
    named = select("target_attention", "cuda", "float16", len(k), len(q), dims, layout)
    assert named == "composite"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("masks", [{}, LENGTHS], ids=["whole", "ragged"])
def test_gradients_are_those_on_the_cpu(dtype: str, masks: dict[str, bool]) -> None:
    inputs = inputs_of(small(dtype, D=64, **masks))
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
        out, lse = ikbo.target_attention(**moved)
        (out.square().sum() + lse.where(lse.isfinite(), 0).sum() / 8).backward()
        gradients.append({n: moved[n].grad.cpu().double() for n in ("q", "k", "v")})
    ours, expected = gradients
    bound = 8 * torch.finfo(DTYPES[dtype]).eps
    for name in ours:
        assert (ours[name] - expected[name]).norm() <= bound * expected[name].norm(), name


def test_replays_in_a_graph() -> None:
    inputs = on_gpu(small("fp16", D=64, **LENGTHS))
    expected = ikbo.target_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ikbo.target_attention(**inputs)
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
