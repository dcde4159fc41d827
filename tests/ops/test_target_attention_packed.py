# SPDX-License-Identifier: Apache-2.0
"""ikbo::target_attention.packed on the CPU: accuracy, the bits of the padded form, gradients,
errors."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import ikbo
from ikbo import reference
from ikbo._kernels import kernels_at
from ikbo.testing.compare import check_against_reference
from ikbo.testing.inputs import Case, case, generator_of, make_inputs, standard_cases
from tests.ops.test_library import traced_kernels

SIZES = {"Q": 2, "H": 4, "H_kv": 2, "S": 37, "D": 20}
OPERATOR = torch.ops.ikbo.target_attention.packed
Inputs = dict[str, Any]


def small(dtype: str = "fp32", layout: str = "contiguous", **changes: Any) -> Case:
    """A case of the standard sizes, with the changes that are named: sizes, index or options."""
    sizes = {"U": 6, "B": 47, **SIZES}
    sizes |= {letter: changes.pop(letter) for letter in list(changes) if letter in sizes}
    index = changes.pop("index", "shuffled")
    return case("target_attention", dtype, index, layout, sizes, packed=True, **changes)


def inputs_of(this: Case) -> Inputs:
    """The case's inputs; the option ``cand_lengths`` makes some that end within histories, and
    some beyond. What then counts for no candidate is NaN."""
    options = dict(this.options)
    with_lengths = options.pop("cand_lengths", False)
    inputs = make_inputs(Case(**{**vars(this), "options": tuple(options.items())}))
    if not with_lengths:
        return inputs
    num_candidates, longest = this.size("B"), this.size("S")
    lengths = torch.randint(longest + 1, (num_candidates,), generator=generator_of(this))
    lengths[::4] = 0
    lengths[1::4] = 2**31 - 1
    inputs["cand_lengths"] = lengths.to(torch.int32)
    offsets, index = inputs["user_offsets"], inputs["cand_to_user"].long()
    read = torch.zeros(this.size("U"), dtype=torch.int64).scatter_reduce(0, index, lengths, "amax")
    for begin, end, count in zip(offsets[:-1], offsets[1:], read, strict=True):
        for name in ("k", "v"):
            inputs[name][begin + min(count, end - begin) : end] = torch.nan
    return inputs


def padded(inputs: Inputs, longest: int) -> Inputs:
    """The same call with histories of one size; NaN fills them up."""
    offsets = inputs["user_offsets"]
    result = {n: t for n, t in inputs.items() if n != "user_offsets"}
    for name in ("k", "v"):
        rows = inputs[name].detach()
        whole = rows.new_full((len(offsets) - 1, longest, *rows.shape[1:]), torch.nan)
        for u, (begin, end) in enumerate(itertools.pairwise(offsets)):
            whole[u, : end - begin] = rows[begin:end]
        result[name] = whole
    if "cand_lengths" in inputs:
        result["cand_lengths"] = inputs["cand_lengths"].clamp(max=longest)
    return {**result, "user_lengths": offsets.diff()}


CASES = [
    *standard_cases("target_attention", SIZES, packed=True),
    *(
        small(dtype, layout, index=index, cand_lengths=True)
        for dtype in ("fp64", "fp32", "bf16", "fp16")
        for layout, index in (("contiguous", "shuffled"), ("padded", "gaps"))
    ),
    *(
        small(dtype, **{letter: size}, **lengths)
        for dtype in ("fp32", "bf16")
        for lengths in ({}, {"cand_lengths": True})
        for letter, sizes in {"D": (1, 64, 130), "S": (0, 1, 600), "Q": (0, 7), "H": (2,)}.items()
        for size in sizes
    ),
    small(B=400, D=64),
    small(scale=0.5),
]


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = inputs_of(this)
    check_against_reference(
        this, inputs, ikbo.target_attention(**inputs), reference.target_attention
    )


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("lengths", [{}, {"cand_lengths": True}], ids=["full", "lengths"])
def test_bits_are_those_of_padded_histories(dtype: str, lengths: dict[str, bool]) -> None:
    this = small(dtype, S=300, B=200, **lengths)
    inputs = inputs_of(this)
    want = ikbo.target_attention(**padded(inputs, 300))
    for got, expected in zip(ikbo.target_attention(**inputs), want, strict=True):
        assert torch.equal(got, expected)


def test_gradients_have_the_bits_of_padded_histories() -> None:
    inputs = gradient_inputs(small(S=300, B=200, cand_lengths=True))
    other = padded(inputs, 300)
    other = other | {n: other[n].nan_to_num().requires_grad_() for n in ("k", "v")}
    got, want = gradients(inputs), gradients(other)
    assert torch.equal(got[0], want[0])
    offsets = inputs["user_offsets"].tolist()
    for rows, histories in zip(got[1:], want[1:], strict=True):
        for u, (begin, end) in enumerate(itertools.pairwise(offsets)):
            assert torch.equal(rows[begin:end], histories[u, : end - begin])
        assert (rows[offsets[-1] :] == 0).all()


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_any_strides(dtype: str) -> None:
    inputs = inputs_of(small(dtype))
    want = ikbo.target_attention(**inputs)
    # The feature dimension is the slowest one in memory; every second offset and index.
    strided = {
        name: value.movedim(-1, 0).contiguous().movedim(0, -1)
        for name, value in inputs.items()
        if name in ("q", "k", "v")
    }
    for name in ("cand_to_user", "user_offsets"):
        strided[name] = inputs[name].repeat_interleave(2)[::2]
    for got, expected in zip(ikbo.target_attention(**inputs | strided), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_rows_do_not_depend_on_their_batch(dtype: str) -> None:
    inputs = inputs_of(small(dtype, B=300, S=600, D=64, cand_lengths=True))
    want = ikbo.target_attention(**inputs)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for rows in (order, order[:100], order[:3], torch.arange(300).repeat(3)):
        picked = {name: inputs[name][rows] for name in ("q", "cand_to_user", "cand_lengths")}
        for got, expected in zip(ikbo.target_attention(**inputs | picked), want, strict=True):
            assert torch.equal(got, expected[rows])
    # Another user in front of all, whose keys are NaN.
    others = {
        "cand_to_user": inputs["cand_to_user"] + 1,
        "user_offsets": torch.cat([torch.zeros(1).int(), inputs["user_offsets"] + 9]),
        **{n: torch.cat([inputs[n][:9] * torch.nan, inputs[n]]) for n in ("k", "v")},
    }
    for got, expected in zip(ikbo.target_attention(**inputs | others), want, strict=True):
        assert torch.equal(got, expected)


def test_no_users_and_no_candidates() -> None:
    inputs = inputs_of(small(B=0))
    out, lse = ikbo.target_attention(**inputs | {"user_offsets": torch.zeros(1).int()})
    assert out.shape == (0, 2, 4, 20)
    assert lse.shape == (0, 4, 2)


def gradient_inputs(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return inputs | {n: inputs[n].nan_to_num().requires_grad_() for n in ("q", "k", "v")}


def gradients(inputs: Inputs, operator: Any = ikbo.target_attention) -> tuple[Tensor, ...]:
    """Gradients of q, k and v for fixed random output gradients."""
    out, lse = operator(**inputs)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, lse)]
    grads[1] = torch.where(torch.isneginf(lse), 0, grads[1])
    return torch.autograd.grad(
        (out, lse),
        [inputs[name] for name in ("q", "k", "v")],
        [g.to(t.dtype) for g, t in zip(grads, (out, lse), strict=True)],
    )


GRADIENT_CASES = [
    *(small("fp64", layout, **lengths) for layout in ("contiguous", "padded", "transposed")
      for lengths in ({}, {"cand_lengths": True})),
    *(small("fp64", index=index) for index in ("one_user", "one_each", "gaps")),
    *(small("fp64", **{letter: size}, cand_lengths=True) for letter, size in
      (("S", 0), ("S", 1), ("S", 300), ("D", 130), ("B", 0), ("B", 400))),
    small("fp64", scale=-0.7),
]  # fmt: skip


@pytest.mark.parametrize("this", GRADIENT_CASES, ids=lambda c: c.id)
def test_gradients(this: Case) -> None:
    inputs = gradient_inputs(this)
    want = gradients(inputs, reference.target_attention)
    for name, got, expected in zip("qkv", gradients(inputs), want, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{this.id} {n}: {m}")


@pytest.mark.parametrize("lengths", [{}, {"cand_lengths": True}], ids=["full", "lengths"])
def test_gradcheck(lengths: dict[str, bool]) -> None:
    this = small("fp64", "padded", U=4, B=7, H=2, H_kv=1, S=5, D=3, **lengths)
    inputs = gradient_inputs(this)
    tensors = [inputs.pop(name) for name in ("q", "k", "v")]

    def operator(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = ikbo.target_attention(q, k, v, **inputs)
        return out, torch.where(torch.isneginf(lse), 0, lse)

    assert torch.autograd.gradcheck(operator, tensors)


def test_second_order_gradients_are_refused() -> None:
    inputs = gradient_inputs(small())
    out, _ = ikbo.target_attention(**inputs)
    (grad,) = torch.autograd.grad((out * out).sum(), inputs["k"], create_graph=True)
    with pytest.raises(RuntimeError, match="ikbo::target_attention: second-order gradients are"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", [{}, {"cand_lengths": True}], ids=["full", "lengths"])
def test_opcheck(lengths: dict[str, bool]) -> None:
    torch.library.opcheck(OPERATOR, (), gradient_inputs(small(**lengths)))


class _Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, index: Tensor, offsets: Tensor) -> Any:
        return ikbo.target_attention(q, k, v, index, user_offsets=offsets)


def test_export_keeps_users_candidates_and_keys_dynamic() -> None:
    candidates, offsets, keys = (torch.export.Dim(n, max=4096) for n in ("B", "offsets", "T"))
    shapes = ({0: candidates}, {0: keys}, {0: keys}, {0: candidates}, {0: offsets})
    inputs = tuple(inputs_of(small()).values())
    program = torch.export.export(_Model(), inputs, dynamic_shapes=shapes)
    for num_users, num_candidates in ((1, 1), (1, 9), (7, 30)):
        other = tuple(inputs_of(small(U=num_users, B=num_candidates)).values())
        with traced_kernels() as launches:
            results = program.module()(*other)
        assert launches == [(run.op, run.kernel) for run in kernels_at(program, other)]
        for got, want in zip(results, OPERATOR(*other), strict=True):
            assert torch.equal(got, want)


ERRORS: list[tuple[Inputs, str]] = [
    ({"k": torch.zeros(3, 5, 2, 6)}, "k must have rank 3, [T, H_kv, D]; got rank 4"),
    ({"k": torch.zeros(10, 2, 7)}, "k must have sizes [T = 10, H_kv = 2, D = 6]; got [10, 2, 7]"),
    ({"v": torch.zeros(9, 2, 6)}, "v must have sizes [T = 10, H_kv = 2, D = 6]; got [9, 2, 6]"),
    ({"q": torch.zeros(4, 1, 3, 6)}, "H (= q.size(2)) must be a multiple of H_kv (= k.size(1))"),
    ({"cand_to_user": torch.tensor([0, 1, 3, 0]).int()},
     "cand_to_user values must be in [0, U) with U = 3; got cand_to_user[2] = 3"),
    ({"user_offsets": torch.zeros(4).long()}, "user_offsets must be int32; got int64"),
    ({"user_offsets": torch.zeros(2, 2).int()}, "user_offsets must have rank 1, [U + 1]"),
    ({"user_offsets": torch.zeros(0).int()}, "user_offsets must have U + 1 elements, at least 1"),
    ({"user_offsets": torch.zeros(4).int().to("meta")}, "user_offsets must be on"),
    ({"user_offsets": torch.tensor([1, 5, 5, 10]).int()},
     "user_offsets must begin with 0; got user_offsets[0] = 1"),
    ({"user_offsets": torch.tensor([0, 5, 4, 10]).int()},
     "user_offsets must never decrease; got user_offsets[1] = 5, user_offsets[2] = 4"),
    ({"user_offsets": torch.tensor([0, 5, 5, 11]).int()},
     "user_offsets must end at T = 10 (= k.size(0)) at most; got user_offsets[3] = 11"),
    ({"cand_lengths": torch.tensor([0, 1, 2, -1]).int()},
     "cand_lengths values must not be negative; got cand_lengths[3] = -1"),
    ({"cand_lengths": torch.zeros(3).int()}, "cand_lengths must have sizes [B = 4]; got [3]"),
]  # fmt: skip


def plain_inputs() -> Inputs:
    return {
        "q": torch.zeros(4, 1, 2, 6),
        "k": torch.zeros(10, 2, 6),
        "v": torch.zeros(10, 2, 6),
        "cand_to_user": torch.zeros(4, dtype=torch.int32),
        "user_offsets": torch.tensor([0, 5, 5, 10], dtype=torch.int32),
    }


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors(change: Inputs, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"ikbo::target_attention: {message}")):
        OPERATOR(**plain_inputs() | change)


@pytest.mark.parametrize("name", ["user_lengths", "user_mask"])
def test_lengths_and_masks_of_users_are_refused(name: str) -> None:
    message = f"ikbo::target_attention: {name} must be None beside user_offsets; got Tensor"
    with pytest.raises(TypeError, match=message):
        ikbo.target_attention(**plain_inputs(), **{name: torch.zeros(3, dtype=torch.int32)})
