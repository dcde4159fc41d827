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
from tests.ops.test_target_attention import ALL_MASKS, CASES, Inputs, inputs_of, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = {"user_lengths": True, "cand_lengths": True}
OURS = [
    small(dtype, D=d, S=s, Q=q, **masks)
    for dtype in ("fp16", "bf16")
    for masks in ({}, LENGTHS)
    for d, s, q in ((64, 37, 2), (128, 300, 1), (96, 129, 8), (256, 70, 5), (40, 1, 64))
]


# What Hopper's kernel does not take.
GENERIC = [
    *(
        small(dtype, D=d, S=s, Q=q, **masks)
        for dtype in ("fp16", "bf16")
        for masks in ({"user_mask": True}, ALL_MASKS)
        for d, s, q in ((64, 37, 2), (128, 300, 1), (33, 129, 8), (250, 70, 5), (1, 1, 64))
    ),
    *(small(dtype, D=64, S=0) for dtype in ("fp16", "fp32")),
    *(
        small(dtype, D=64, S=200, scale=scale)
        for dtype in ("fp16", "fp32")
        for scale in (0.0, -0.2)
    ),
    *(
        small("fp32", D=d, S=s, Q=q, **masks)
        for masks in ({}, LENGTHS, ALL_MASKS)
        for d, s, q in ((64, 37, 2), (128, 300, 1), (33, 129, 8), (256, 70, 5), (40, 1, 64))
    ),
    *(
        small(dtype, D=72, S=80, layout=layout, **ALL_MASKS)
        for dtype in ("fp16", "bf16", "fp32")
        for layout in ("padded", "transposed")
    ),
    # One user's long history, which several CTAs share.
    *(
        small(dtype, U=1, B=3, S=3000, D=48, cand_lengths=True, user_mask=True)
        for dtype in ("fp16", "fp32")
    ),
]


def on_gpu(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in inputs.items()}


def named_kernel(inputs: Inputs) -> str:
    """The kernel that the operator says it takes for tensors that lie as these do."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    layout = [n for t in (q, k, v) for n in (t.storage_offset(), *t.stride())]
    layout += ["user_mask" in inputs, inputs.get("scale", 1) > 0]
    dims = [q.size(1), k.size(1), q.size(2), *k.shape[2:]]
    dtype = str(q.dtype).removeprefix("torch.")
    select = torch.ops.ikbo._select_kernel
    kernel: str = select("target_attention", "cuda", dtype, len(k), len(q), dims, layout)
    return kernel


@pytest.mark.parametrize("this", [*CASES, *OURS, *GENERIC], ids=lambda c: c.id)
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


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"cand_lengths": True}], ids=["whole", "by-candidate"])
@pytest.mark.parametrize(("d", "s", "q"), [(64, 37, 2), (128, 300, 1), (96, 129, 8), (33, 90, 3)])
def test_packed(dtype: str, options: dict[str, bool], d: int, s: int, q: int) -> None:
    this = packed.small(dtype, D=d, S=s, Q=q, **options)
    inputs = {n: v.cuda() for n, v in packed.inputs_of(this).items()}
    with traced_kernels() as launches:
        result = ikbo.target_attention(**inputs)
    roundings = 1 if dtype == "fp32" else 2
    check_against_reference(this, inputs, result, reference.target_attention, roundings=roundings)
    name = str(DTYPES[dtype]).removeprefix("torch.")
    dims = [this.size(letter) for letter in ("Q", "H", "H_kv", "D")]
    select = torch.ops.ikbo._select_kernel
    kernel = select("target_attention.packed", "cuda", name, this.size("U"), this.size("B"), dims)
    assert launches == [("target_attention", kernel)]


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
    assert kernel.startswith(f"target_attention_{'sm90' if is_hopper else 'generic'}<")


@pytest.mark.parametrize("this", GENERIC, ids=lambda c: c.id)
def test_what_hopper_does_not_take_is_generic(this: Case) -> None:
    inputs = on_gpu(this)
    with traced_kernels() as launches:
        ikbo.target_attention(**inputs)
    kernel = named_kernel(inputs)
    assert launches == [("target_attention", kernel)]
    assert kernel.startswith("target_attention_generic<")
    assert "splits=" in kernel or this.size("S") < 3000


@pytest.mark.parametrize("change", ["fp64", "width"])
def test_what_no_kernel_takes_is_composed(change: str) -> None:
    inputs = on_gpu(small("fp64") if change == "fp64" else small("fp16", D=264))
    with traced_kernels() as launches:
        ikbo.target_attention(**inputs)
    assert launches == []
    assert named_kernel(inputs) == "composite"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_place_in_memory_changes_no_bit(dtype: str) -> None:
    """Operands whose elements are copied one by one, and a mask with gaps."""
    inputs = on_gpu(small(dtype, D=40, S=150, **ALL_MASKS))
    expected = ikbo.target_attention(**inputs)
    for name in ("q", "k", "v"):
        # The feature dimension is the slowest one in memory.
        inputs[name] = inputs[name].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    mask = inputs["user_mask"]
    inputs["user_mask"] = torch.stack([mask, ~mask], dim=2)[:, :, 0]
    with traced_kernels() as launches:
        results = ikbo.target_attention(**inputs)
    assert launches == [("target_attention", named_kernel(inputs))]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_rows_of_the_generic_kernel_do_not_depend_on_their_batch(dtype: str) -> None:
    inputs = on_gpu(small(dtype, U=4, B=300, S=400, D=50, **ALL_MASKS))
    want = ikbo.target_attention(**inputs)
    picked = torch.randperm(300)[:101].cuda()
    for name in ("q", "cand_to_user", "cand_lengths"):
        inputs[name] = inputs[name][picked]
    with traced_kernels() as launches:
        results = ikbo.target_attention(**inputs)
    assert "generic" in launches[0][1]
    assert "splits" not in launches[0][1]
    assert all(torch.equal(a, b[picked]) for a, b in zip(results, want, strict=True))


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


BACKWARD = [
    small(dtype, D=d, S=s, Q=q, **masks)
    for dtype in ("fp16", "bf16")
    for masks in ({}, LENGTHS)
    for d, s, q in ((64, 37, 2), (128, 300, 1), (96, 129, 8), (40, 1, 64), (8, 64, 3))
] + [
    small("bf16", U=3, B=400, S=200, D=128, Q=3, **LENGTHS),
    small("fp16", U=40, B=47, S=70, D=32, index="gaps"),
    small("fp16", U=1, B=1, S=1, Q=1, H=1, H_kv=1, D=64),
]


def gradients_on_gpu(inputs: Inputs, seed: int = 0) -> tuple[Tensor, ...]:
    """Of q, k and v, for random gradients of out and of the log-sum-exps that are finite."""
    leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
    out, lse = ikbo.target_attention(*leaves, **{n: v for n, v in inputs.items() if n not in "qkv"})
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse)]
    moved = [g.to(t.device, t.dtype) for g, t in zip(grads, (out, lse), strict=True)]
    return torch.autograd.grad([out, lse], leaves, moved)


@pytest.mark.parametrize("this", BACKWARD, ids=lambda c: c.id)
def test_backward_kernel(this: Case) -> None:
    """Near the gradients in fp64, of keys that count for nobody 0 although they hold NaN."""
    inputs = on_gpu(this)
    with traced_kernels() as launches:
        ours = gradients_on_gpu(inputs)
    width = next(d for d in (32, 64, 128) if this.size("D") <= d)
    kernel = f"target_attention_backward_mma<head_dim={width}>"
    assert launches[1:] == [("_target_attention_backward", kernel)]
    wide = {n: v.cpu().double() if v.is_floating_point() else v.cpu() for n, v in inputs.items()}
    eps = torch.finfo(DTYPES[this.dtype]).eps
    for name, got, want in zip("qkv", ours, gradients_on_gpu(wide), strict=True):
        assert torch.isfinite(got).all(), name
        assert (got.cpu() - want).norm() <= 4 * eps * want.norm(), name
        # No user's and no head's part is lost in the whole.
        parts = (got.cpu() - want).flatten(1).norm(dim=1) - 16 * eps * want.flatten(1).norm(dim=1)
        assert parts.max() <= eps * want.norm() / len(want) ** 0.5, name


def test_backward_is_the_same_each_time() -> None:
    inputs = on_gpu(small("bf16", U=3, B=400, S=200, D=64, Q=3, **LENGTHS))
    first = gradients_on_gpu(inputs)
    for _ in range(20):
        assert all(map(torch.equal, first, gradients_on_gpu(inputs)))


def test_backward_takes_operands_of_any_place() -> None:
    inputs = on_gpu(small("fp16", D=64, S=90))
    out, lse = ikbo.target_attention(**inputs)
    operands = [torch.randn_like(out), torch.randn_like(lse), *(inputs[n] for n in ("q", "k", "v"))]
    backward = torch.ops.ikbo._target_attention_backward.default
    others = (inputs["cand_to_user"], None, None, None, None, out, lse)

    def moved(tensor: Tensor) -> Tensor:
        """One element away from where the copies of 16 bytes may begin, transposed in memory."""
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:]
        return room.view(tensor.mT.shape).mT.copy_(tensor)

    def shifted(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:]
        return room.view(tensor.shape).copy_(tensor)

    expected = backward(*operands, *others)
    for place in (moved, shifted):
        assert all(map(torch.equal, expected, backward(*map(place, operands), *others)))


@pytest.mark.parametrize("change", [{"user_mask": True}, {"D": 136}, {"D": 30}], ids=str)
def test_backward_that_no_kernel_takes_is_composed(change: dict[str, int]) -> None:
    with traced_kernels() as launches:
        gradients_on_gpu(on_gpu(small("fp16", **{"D": 64, **change})))
    assert launches[-1] == ("_target_attention_backward", "composite")


@pytest.mark.parametrize(
    "this", [small("fp16", D=64, **LENGTHS), small("fp32", D=30, **ALL_MASKS)], ids=lambda c: c.id
)
def test_replays_in_a_graph(this: Case) -> None:
    inputs = on_gpu(this)
    expected = ikbo.target_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ikbo.target_attention(**inputs)
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
