# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU as a model uses them: gradients, training, torch.compile, torch.export,
CUDA graphs, several streams, packed weights.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import ikbo
from ikbo import nn, reference
from ikbo.testing.compare import (
    COMPOSITE_ROUNDINGS,
    check_against_reference,
    compare_rows,
    sum_dtype,
)
from ikbo.testing.inputs import DTYPES, SHAPES, Case, case, make_inputs
from tests.nn.test_training import check_losses_in_16_bits, train
from tests.ops.test_library import traced_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES: dict[str, dict[str, int]] = {
    "expand": {"K_user": 24},
    "linear": {"K_user": 96, "K_cand": 72, "M": 40},
    "lce": {"K_user": 96, "K_cand": 72, "M": 40, "N": 64},
    "bmm": {"P": 12, "R": 16, "N": 24},
    "target_attention": {"Q": 2, "H": 4, "H_kv": 2, "S": 40, "D": 16},
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "linear": [{"activation": a} for a in ("none", "relu", "gelu", "silu", "sigmoid")],
    "lce": [{}, {"parts": 3}],
    "bmm": [{}, {"transpose_a": True, "transpose_b": True}],
}
CASES = [
    case(op, dtype, "gaps", "contiguous", {"U": 6, "B": 200, **sizes}, **options)
    for op, sizes in SIZES.items()
    for dtype in DTYPES
    for options in OPTIONS.get(op, [{}])
]
# The operators with kernels of their own, in the type that those are made for.
FP16 = {
    "linear": case(
        "linear", "fp16", "shuffled", "contiguous", {"U": 6, "B": 200, **SIZES["linear"]}
    ),
    "lce": case("lce", "fp16", "shuffled", "contiguous", {"U": 6, "B": 200, **SIZES["lce"]}),
    "lce-list": case(
        "lce", "fp16", "shuffled", "contiguous", {"U": 6, "B": 200, **SIZES["lce"]}, parts=3
    ),
}
EVERY_CASE = pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
EVERY_FP16 = pytest.mark.parametrize("this", FP16.values(), ids=FP16.keys())


def finite(arguments: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: t.nan_to_num() if t.is_floating_point() else t, arguments
    )


def with_batch(this: Case, num_users: int, num_candidates: int) -> dict[str, Any]:
    """Inputs of the same call at other sizes, on the GPU."""
    sizes = {**dict(this.sizes), "U": num_users, "B": num_candidates}
    other = case(this.op, this.dtype, this.index, this.layout, sizes, **dict(this.options))
    return finite(make_inputs(other, "cuda"))


@EVERY_CASE
def test_forward(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    result = getattr(ikbo, this.op)(**inputs)
    check_against_reference(
        this, inputs, result, getattr(reference, this.op), roundings=COMPOSITE_ROUNDINGS
    )


def gradients(operator: Callable[..., Any], this: Case, inputs: dict[str, Any]) -> list[Tensor]:
    """Of every floating-point input, for one random gradient of the (first) result."""
    inputs = pytree.tree_map_only(Tensor, Tensor.detach, inputs)
    leaves = pytree.tree_leaves([inputs[name] for name in SHAPES[this.op]])
    for leaf in leaves:
        leaf.requires_grad_()
    out = operator(**inputs)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).to(DTYPES[this.dtype])
    return list(torch.autograd.grad(out, leaves, grad.to(out)))


@EVERY_CASE
def test_gradients(this: Case) -> None:
    """Against the replicated form in fp64, with twice the error that it has in the case's type."""
    inputs = finite(make_inputs(this, "cuda"))
    wide = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs
    )
    definition = getattr(reference, this.op)
    ours = gradients(getattr(ikbo, this.op), this, inputs)
    truth = gradients(definition, this, wide)
    peer = gradients(definition, this, inputs)
    dtype = DTYPES[this.dtype]
    for i, (got, want, other) in enumerate(zip(ours, truth, peer, strict=True)):
        assert got.dtype == dtype
        rows = want.flatten(1) if want.dim() > 1 else want[:, None]
        peer_error = (other.double() - want).reshape(rows.shape).abs().amax(1)
        one_rounding = torch.finfo(dtype).eps + 32 * torch.finfo(sum_dtype(dtype)).eps
        budget = 2 * peer_error + one_rounding * want.abs().max()
        compare_rows(f"{this.id} gradient {i}", got.cpu(), want.cpu(), budget.cpu())


@pytest.mark.parametrize("op", ["linear", "lce"])
def test_the_kernel_of_the_gpu_runs_in_training(op: str) -> None:
    this = FP16[op]
    inputs = finite(make_inputs(this, "cuda"))
    inputs["w_user"].requires_grad_()
    with traced_kernels() as launches:
        getattr(ikbo, this.op)(**inputs).sum().backward()
    assert [op for op, _ in launches] == [this.op]
    if torch.cuda.get_device_capability() == (9, 0):
        assert "sm90" in launches[0][1]


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_losses_are_those_of_the_replicated_net(order: str) -> None:
    split, plain = (train(kind, order, steps=50, device="cuda") for kind in ("split", "plain"))
    assert plain[-10:].mean() < plain[:10].mean(), "the net learns"
    torch.testing.assert_close(split[:20], plain[:20], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_losses_in_16_bits_are_those_of_the_replicated_net(order: str, dtype: torch.dtype) -> None:
    with traced_kernels() as launches:
        check_losses_in_16_bits(order, dtype, "cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        for op in ("linear", "lce"):
            kernels = {kernel.partition("<")[0] for launched, kernel in launches if launched == op}
            assert kernels == {f"{op}_sm90"}


def between_user_and_candidate_arithmetic(op: str) -> Callable[..., Tensor]:
    """The operator as a part of a model, with elementwise work before and after it."""

    def run(**inputs: Any) -> Tensor:
        user = "e_user" if op == "lce" else "x_user"
        inputs = {**inputs, user: torch.tanh(inputs[user])}
        return torch.relu(getattr(ikbo, op)(**inputs)) * 2

    return run


@EVERY_FP16
def test_compiled(this: Case) -> None:
    torch._dynamo.reset()
    eager = between_user_and_candidate_arithmetic(this.op)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True)
    for num_users, num_candidates in ((6, 200), (3, 77)):
        inputs = with_batch(this, num_users, num_candidates)
        torch.testing.assert_close(compiled(**inputs), eager(**inputs))
        got = gradients(compiled, this, inputs)
        for mine, theirs in zip(got, gradients(eager, this, inputs), strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=4e-3, atol=4e-3 * float(theirs.abs().max())
            )


class _Model(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.run = between_user_and_candidate_arithmetic(op)
        self.names = [*SHAPES[op], "cand_to_user"]

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(**dict(zip(self.names, inputs, strict=True)))


@EVERY_FP16
def test_exported(this: Case) -> None:
    inputs = tuple(with_batch(this, 6, 200).values())
    users, candidates = torch.export.Dim("U", max=64), torch.export.Dim("B", max=4096)
    by_size = {6: {0: users}, 200: {0: candidates}}
    shapes = {"inputs": pytree.tree_map(lambda t: by_size.get(t.size(0), {}), inputs)}
    model = _Model(this.op)
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    for num_users, num_candidates in ((1, 1), (9, 300)):
        other = tuple(with_batch(this, num_users, num_candidates).values())
        assert torch.equal(program.module()(*other), model(*other))


@EVERY_FP16
@pytest.mark.parametrize("is_packed", [False, True])
def test_graph_replays_with_changed_inputs(this: Case, is_packed: bool) -> None:
    operator = getattr(ikbo, this.op)
    static, *others = (with_batch(this, 6, 200) for _ in range(3))
    for i, other in enumerate(others):
        other["cand_to_user"].copy_((other["cand_to_user"] + i + 1) % 6)
        pytree.tree_map_only(
            Tensor, lambda t, i=i: t.mul_(i + 2) if t.is_floating_point() else t, other
        )
    if is_packed:
        static, *others = ({**x, "w_cand": pack(x)} for x in (static, *others))
    operator(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = operator(**static)
    for other in others:
        for to, source in zip(*(pytree.tree_leaves(x) for x in (static, other)), strict=True):
            to.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, operator(**other))


@EVERY_FP16
def test_two_streams_at_once(this: Case) -> None:
    operator = getattr(ikbo, this.op)
    calls = [with_batch(this, 6, 200), with_batch(this, 5, 311)]
    want = [operator(**inputs) for inputs in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, inputs, mine in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(operator(**inputs))
    torch.cuda.synchronize()
    for expected, mine in zip(want, results, strict=True):
        assert all(torch.equal(result, expected) for result in mine)


def pack(inputs: dict[str, Any]) -> Tensor:
    parts = pytree.tree_leaves(inputs.get("e_cand", inputs.get("x_cand")))
    return ikbo.prepack(inputs["w_cand"], [part.size(1) for part in parts])


@pytest.mark.parametrize(
    "this", [c for c in CASES if c.op in ("linear", "lce")], ids=lambda c: c.id
)
def test_packed_weight(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    result = getattr(ikbo, this.op)(**{**inputs, "w_cand": pack(inputs)})
    check_against_reference(
        this, inputs, result, getattr(reference, this.op), roundings=COMPOSITE_ROUNDINGS
    )


@pytest.mark.parametrize("width", [64, 63])
def test_packed_weight_of_a_call_that_its_image_does_not_suit(width: int) -> None:
    """N = 63 and strided embeddings are read by the kernels that take no image."""
    sizes = {"U": 6, "B": 200, **SIZES["lce"], "N": width}
    for layout in ("contiguous", "padded", "transposed"):
        this = case("lce", "fp16", "shuffled", layout, sizes)
        inputs = make_inputs(this, "cuda")
        result = ikbo.lce(**{**inputs, "w_cand": pack(inputs)})
        check_against_reference(this, inputs, result, reference.lce, roundings=COMPOSITE_ROUNDINGS)


@EVERY_FP16
def test_weight_packed_for_another_call_is_refused(this: Case) -> None:
    inputs = with_batch(this, 6, 200)
    w_cand = inputs["w_cand"]
    on_cpu = {**inputs, "w_cand": w_cand.cpu()}
    others = {
        "packed for float16 on cpu": pack(on_cpu).cuda(),
        "packed for bfloat16 on cuda": pack({**inputs, "w_cand": w_cand.bfloat16()}),
        "packed for float16 on cuda with M = 39": pack({**inputs, "w_cand": w_cand[:-1]}),
        r"k_cand = \[24, 48\]": ikbo.prepack(w_cand, [24, 48]),
        "is no packed weight": torch.zeros_like(pack(inputs))[:-1],
    }
    for got, weight in others.items():
        with pytest.raises(RuntimeError, match=f"ikbo::{this.op}: w_cand_packed must be .*{got}"):
            getattr(ikbo, this.op)(**{**inputs, "w_cand": weight})


@torch.no_grad()
def test_module_packs_again_on_the_gpu() -> None:
    e_user, e_cand = torch.randn(3, 40, 32), torch.randn(50, 24, 32)
    index = ikbo.CandidateIndex.from_counts([20, 0, 30])
    module = nn.LinearCompression(40, 24, 16).eval()
    module.prepack()
    plain = module(e_user, e_cand, index)
    on_gpu = module.to("cuda", torch.float16)
    result = on_gpu(e_user.cuda().half(), e_cand.cuda().half(), index.to("cuda"))
    torch.testing.assert_close(result.float().cpu(), plain, rtol=1e-2, atol=1e-2)
