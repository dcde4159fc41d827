# SPDX-License-Identifier: Apache-2.0
"""ikbo::target_attention on the CPU: accuracy, masks, independence of rows, gradients, errors."""

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, generator_of, make_inputs, standard_cases

SIZES = {"Q": 2, "H": 4, "H_kv": 2, "S": 37, "D": 20}
MASKS = ("user_lengths", "cand_lengths", "user_mask")
ALL_MASKS = dict.fromkeys(MASKS, True)
Inputs = dict[str, Any]


def small(dtype: str = "fp32", **changes: Any) -> Case:
    """A case of the standard sizes, with the changes that are named: sizes, index or masks."""
    sizes = {"U": 5, "B": 47, **SIZES}
    sizes |= {letter: changes.pop(letter) for letter in list(changes) if letter in sizes}
    index = changes.pop("index", "shuffled")
    layout = changes.pop("layout", "contiguous")
    return case("target_attention", dtype, index, layout, sizes, **changes)


CASES = [
    *standard_cases("target_attention", SIZES),
    *standard_cases("target_attention", SIZES, **ALL_MASKS),
    *(small(dtype, **{mask: True}) for dtype in ("fp32", "bf16") for mask in MASKS),
    *(
        small(dtype, **{letter: size}, **masks)
        for dtype in ("fp64", "fp32", "fp16")
        for masks in ({}, ALL_MASKS)
        for letter, sizes in {
            "D": (1, 16, 33, 64, 130, 300),
            "S": (0, 1, 64, 257, 600),
            "Q": (0, 1, 7),
            "H": (2, 6),
        }.items()
        for size in sizes
    ),
    # Several tiles of rows for each user.
    *(
        small(dtype, U=3, B=400, D=64, **masks)
        for dtype in ("fp32", "bf16")
        for masks in ({}, ALL_MASKS)
    ),
    small(scale=0.5),
    small("fp64", scale=-2.0),
    small(scale=0.0),
]


def inputs_of(this: Case) -> Inputs:
    """The case's inputs; keys that count for no candidate of their user are NaN."""
    options = dict(this.options)
    plain = tuple(o for o in this.options if o[0] not in MASKS)
    inputs = make_inputs(dataclasses.replace(this, options=plain))
    generator = generator_of(this)
    num_users, num_candidates = this.size("U"), this.size("B")
    num_keys = this.size("S")

    def lengths(count: int) -> Tensor:
        values = torch.randint(num_keys + 1, (count,), generator=generator)
        values[::4] = 0
        values[1::4] = num_keys
        return values.to(torch.int32)

    if options.get("user_lengths"):
        inputs["user_lengths"] = lengths(num_users)
    if options.get("cand_lengths"):
        inputs["cand_lengths"] = lengths(num_candidates)
    if options.get("user_mask"):
        inputs["user_mask"] = torch.rand(num_users, num_keys, generator=generator) > 0.4
    unread = ~counting_keys(inputs)
    for name in ("k", "v"):
        inputs[name][unread] = torch.nan
    return inputs


def counting_keys(inputs: Inputs) -> Tensor:
    """Which keys count for at least one candidate, ``[U, S]``."""
    k, index = inputs["k"], inputs["cand_to_user"].long()
    longest = torch.zeros(k.size(0), dtype=torch.int32)
    cand_lengths = inputs.get("cand_lengths", torch.full(index.shape, k.size(1)).int())
    longest = longest.scatter_reduce(0, index, cand_lengths, "amax")
    if "user_lengths" in inputs:
        longest = torch.minimum(longest, inputs["user_lengths"])
    counts = torch.arange(k.size(1)) < longest[:, None]
    return counts & inputs["user_mask"] if "user_mask" in inputs else counts


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = inputs_of(this)
    check_against_reference(
        this, inputs, ikbo.target_attention(**inputs), reference.target_attention
    )


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_any_strides(dtype: str) -> None:
    this = small(dtype)
    inputs = inputs_of(this)
    want = ikbo.target_attention(**inputs)
    # The feature dimension is the slowest one in memory.
    strided = {
        name: value.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
        for name, value in inputs.items()
        if name in ("q", "k", "v")
    }
    for got, expected in zip(ikbo.target_attention(**inputs | strided), want, strict=True):
        assert torch.equal(got, expected)


def test_nan_of_a_key_stays_with_the_rows_that_read_it() -> None:
    this = small(U=1, B=60, S=300)
    inputs = inputs_of(this)
    inputs["cand_lengths"] = torch.arange(60, dtype=torch.int32) * 5
    inputs["k"][0, 151] = torch.nan
    inputs["v"][0, 200] = torch.inf
    reads_nan = inputs["cand_lengths"] > 151
    out, lse = ikbo.target_attention(**inputs)
    assert torch.isfinite(out[~reads_nan]).all()
    assert torch.isfinite(lse[~reads_nan][1:]).all()
    assert torch.isnan(out[reads_nan]).all()
    assert torch.isnan(lse[reads_nan]).all()


def test_large_scores_do_not_overflow() -> None:
    inputs = inputs_of(small(scale=1e4))
    out, lse = ikbo.target_attention(**inputs)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("masks", [{}, ALL_MASKS], ids=["full", "masked"])
def test_rows_do_not_depend_on_their_batch(dtype: str, masks: dict[str, bool]) -> None:
    this = small(dtype, U=4, B=300, S=600, D=64, **masks)
    inputs = inputs_of(this)
    want = ikbo.target_attention(**inputs)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    by_candidate = {"q", "cand_to_user", "cand_lengths"}

    def pick(rows: Tensor) -> Inputs:
        return {
            name: value[rows].clone() if name in by_candidate else value
            for name, value in inputs.items()
        }

    for rows in (order, order[:100], order[:3], torch.arange(300).repeat(3)):
        for got, expected in zip(ikbo.target_attention(**pick(rows)), want, strict=True):
            assert torch.equal(got, expected[rows])
    others = {
        name: torch.cat([value, value]) if name not in by_candidate else value
        for name, value in inputs.items()
    }
    for got, expected in zip(ikbo.target_attention(**others), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("masks", [{}, ALL_MASKS], ids=["full", "masked"])
def test_results_do_not_depend_on_threads(masks: dict[str, bool]) -> None:
    inputs = gradient_inputs(small(U=4, B=300, S=200, **masks))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([*ikbo.target_attention(**inputs), *gradients(inputs)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def gradient_inputs(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return inputs | {n: inputs[n].nan_to_num().requires_grad_() for n in ("q", "k", "v")}


def gradients(inputs: Inputs, operator: Any = ikbo.target_attention) -> tuple[Tensor, ...]:
    """Gradients of q, k and v for fixed random output gradients."""
    out, lse = operator(**inputs)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse)]
    lse = torch.where(torch.isneginf(lse), 0, lse)
    outputs = (out, lse)
    return torch.autograd.grad(
        outputs,
        [inputs[name] for name in ("q", "k", "v")],
        [g.to(t.dtype) for g, t in zip(grads, outputs, strict=True)],
    )


GRADIENT_CASES = [
    *(small("fp64", layout=layout, **m) for layout in ("contiguous", "padded", "transposed")
      for m in ({}, ALL_MASKS)),
    *(small("fp64", index=index, **ALL_MASKS) for index in ("one_user", "one_each", "gaps")),
    *(small("fp64", **{letter: size}, **ALL_MASKS) for letter, size in
      (("S", 0), ("S", 1), ("S", 300), ("D", 1), ("D", 64), ("D", 130), ("B", 0), ("B", 400))),
    small("fp64", scale=-0.7),
]  # fmt: skip


@pytest.mark.parametrize("this", GRADIENT_CASES, ids=lambda c: c.id)
def test_gradients(this: Case) -> None:
    inputs = gradient_inputs(this)
    want = gradients(inputs, reference.target_attention)
    for name, got, expected in zip("qkv", gradients(inputs), want, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{this.id} {n}: {m}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_as_exact_as_those_of_pytorch(dtype: str) -> None:
    this = small(dtype, B=200, S=100, **ALL_MASKS)
    inputs = gradient_inputs(this)
    wide = {
        name: value.detach().double().requires_grad_() if name in ("q", "k", "v") else value
        for name, value in inputs.items()
    }
    truth = gradients(wide, reference.target_attention)
    peer = gradients(inputs, reference.target_attention)
    for got, plain, want in zip(gradients(inputs), peer, truth, strict=True):
        roundings = 4 * torch.finfo(got.dtype).eps * want.abs().max().item()
        allowed = 2 * (plain - want).abs().max().item() + roundings
        assert (got - want).abs().max().item() <= allowed


@pytest.mark.parametrize("masks", [{}, ALL_MASKS], ids=["full", "masked"])
def test_gradcheck(masks: dict[str, bool]) -> None:
    inputs = gradient_inputs(
        small("fp64", layout="padded", U=3, B=7, Q=2, H=2, H_kv=1, S=5, D=3, **masks)
    )
    tensors = [inputs.pop(name) for name in ("q", "k", "v")]

    def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ikbo.target_attention(q, k, v, **inputs)
        return out, torch.where(torch.isneginf(lse), 0, lse)

    assert torch.autograd.gradcheck(operator, tensors)


def test_second_order_gradients_are_refused() -> None:
    inputs = gradient_inputs(small())
    out, _ = ikbo.target_attention(**inputs)
    (grad,) = torch.autograd.grad((out * out).sum(), inputs["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="second-order gradients are not"):
        grad.sum().backward()


@pytest.mark.parametrize("masks", [{}, ALL_MASKS], ids=["full", "masked"])
def test_opcheck(masks: dict[str, bool]) -> None:
    inputs = gradient_inputs(small(**masks))
    torch.library.opcheck(torch.ops.ikbo.target_attention.default, (), inputs)


class _Model(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return ikbo.target_attention(*inputs)


def test_export_keeps_users_and_candidates_dynamic() -> None:
    users, candidates = torch.export.Dim("U", max=64), torch.export.Dim("B", max=4096)
    inputs = tuple(inputs_of(small(**ALL_MASKS)).values())
    by_size = {5: {0: users}, 47: {0: candidates}}
    shapes = {"inputs": tuple(by_size[value.size(0)] for value in inputs)}
    program = torch.export.export(_Model(), inputs, dynamic_shapes=shapes)
    for num_users, num_candidates in ((1, 1), (1, 9), (7, 30)):
        other = inputs_of(small(U=num_users, B=num_candidates, **ALL_MASKS)).values()
        for got, want in zip(program.module()(*other), ikbo.target_attention(*other), strict=True):
            assert torch.equal(got, want)


def test_calls_from_several_threads_agree() -> None:
    inputs = inputs_of(small(B=300, **ALL_MASKS))
    want = ikbo.target_attention(**inputs)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: ikbo.target_attention(**inputs), range(40)))
    for result in results:
        assert all(torch.equal(got, expected) for got, expected in zip(result, want, strict=True))


def test_kernel_choice() -> None:
    select = functools.partial(torch.ops.ikbo._select_kernel, "target_attention")
    assert select("cpu", "float32", 16, 1024, [1, 512, 2, 2, 64]) == "cpu_rows96_keys256"
    # Few rows make smaller tiles; wide heads and fp64 make shorter blocks of keys.
    assert select("cpu", "float32", 1, 100, [1, 512, 2, 2, 64]) == "cpu_rows12_keys256"
    assert select("cpu", "float64", 16, 1024, [1, 512, 2, 2, 64]) == "cpu_rows96_keys128"
    assert select("cpu", "bfloat16", 16, 1024, [1, 512, 2, 2, 4096]) == "cpu_rows96_keys64"
    assert select("xpu", "float32", 16, 1024, [1, 512, 2, 2, 64]) == "composite"


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(4, 2, 6)}, "q must have rank 4, [B, Q, H, D]; got rank 3"),
    ({"q": torch.zeros(4, 1, 3, 6)}, "H (= q.size(2)) must be a multiple of H_kv"),
    ({"k": torch.zeros(3, 5, 2, 7)}, "k must have sizes [U = 3, S = 5, H_kv = 2, D = 6]"),
    ({"v": torch.zeros(3, 4, 2, 6)}, "v must have sizes [U = 3, S = 5, H_kv = 2, D = 6]"),
    ({"v": torch.zeros(3, 5, 2, 6).half()}, "v must have the dtype of q, float32; got float16"),
    (
        {n: torch.zeros(s, dtype=torch.int32) for n, s in
         (("q", (4, 1, 2, 6)), ("k", (3, 5, 2, 6)), ("v", (3, 5, 2, 6)))},
        "q must be float64, float32, bfloat16 or float16; got int32",
    ),
    ({"cand_to_user": torch.zeros(4).long()}, "cand_to_user must be int32; got int64"),
    ({"cand_to_user": torch.zeros(5).int()}, "cand_to_user must have sizes [B = 4]; got [5]"),
    ({"cand_to_user": torch.tensor([0, 1, 3, 0]).int()}, "got cand_to_user[2] = 3"),
    ({"cand_to_user": torch.tensor([0, -1, 2, 0]).int()}, "got cand_to_user[1] = -1"),
    ({"cand_to_user": torch.zeros(4).int().to("meta")}, "cand_to_user must be on"),
    ({"user_lengths": torch.zeros(3).long()}, "user_lengths must be int32; got int64"),
    ({"user_lengths": torch.zeros(4).int()}, "user_lengths must have sizes [U = 3]; got [4]"),
    (
        {"user_lengths": torch.tensor([0, 6, 1]).int()},
        "user_lengths values must be in [0, S] with S = 5; got user_lengths[1] = 6",
    ),
    ({"cand_lengths": torch.tensor([0, 1, 2, -1]).int()}, "got cand_lengths[3] = -1"),
    ({"cand_lengths": torch.zeros(3).int()}, "cand_lengths must have sizes [B = 4]; got [3]"),
    ({"user_mask": torch.zeros(3, 5)}, "user_mask must be bool; got float32"),
    ({"user_mask": torch.zeros(3, 4).bool()}, "user_mask must have sizes [U = 3, S = 5]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors(change: Inputs, message: str) -> None:
    inputs = {
        "q": torch.zeros(4, 1, 2, 6),
        "k": torch.zeros(3, 5, 2, 6),
        "v": torch.zeros(3, 5, 2, 6),
        "cand_to_user": torch.zeros(4, dtype=torch.int32),
    }
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.ops.ikbo.target_attention.default(**inputs | change)
