# SPDX-License-Identifier: Apache-2.0
"""ikbo::self_target_attention on the CPU: accuracy, the bits of target_attention, gradients,
errors."""

import functools
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

OP = "self_target_attention"
SIZES = {"Q": 2, "H": 4, "H_kv": 2, "S": 13, "D": 20}
NAMES = ("q_user", "q_cand", "k", "v")
CAUSAL = {"is_causal": True}
LENGTHS = {"lengths": True}
Inputs = dict[str, Any]


def small(dtype: str = "fp32", layout: str = "contiguous", **changes: Any) -> Case:
    """A case of the standard sizes, with the changes that are named: sizes, index or options."""
    sizes = {"U": 6, "B": 47, **SIZES}
    sizes |= {letter: changes.pop(letter) for letter in list(changes) if letter in sizes}
    index = changes.pop("index", "shuffled")
    return case(OP, dtype, index, layout, sizes, **changes)


def inputs_of(this: Case) -> Inputs:
    """The case's inputs. The option ``lengths`` gives both kinds, 0, 1 and S among them; history
    rows at or past their user's length are NaN then."""
    options = dict(this.options)
    with_lengths = options.pop("lengths", False)
    inputs = make_inputs(Case(**{**vars(this), "options": tuple(options.items())}))
    if not with_lengths:
        return inputs
    generator, longest = generator_of(this), this.size("S")
    for name, letter in (("user_lengths", "U"), ("cand_lengths", "B")):
        lengths = torch.randint(longest + 1, (this.size(letter),), generator=generator)
        for first, length in enumerate((longest, 0, min(1, longest))):
            lengths[first::5] = length
        inputs[name] = lengths.to(torch.int32)
    is_past = torch.arange(longest) >= inputs["user_lengths"][:, None]
    for name in ("q_user", "k", "v"):
        inputs[name][is_past] = torch.nan
    return inputs


CASES = [
    *standard_cases(OP, SIZES),
    *(
        small(dtype, layout, index=index, **options)
        for dtype in ("fp64", "fp32", "bf16", "fp16")
        for layout, index in (("contiguous", "shuffled"), ("padded", "gaps"))
        for options in (CAUSAL, LENGTHS, CAUSAL | LENGTHS)
    ),
    *(
        small(dtype, **{letter: size}, **CAUSAL, **LENGTHS)
        for dtype in ("fp32", "bf16")
        for letter, sizes in {"D": (1, 64, 130), "S": (0, 1, 70), "Q": (0, 7), "H": (2,)}.items()
        for size in sizes
    ),
    # Several blocks of keys and tiles of rows.
    small(U=2, B=20, S=300, H=2, H_kv=1, D=4, **CAUSAL, **LENGTHS),
    small(scale=0.5),
]


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_accuracy(this: Case) -> None:
    inputs = inputs_of(this)
    results = ikbo.self_target_attention(**inputs)
    check_against_reference(this, inputs, results, reference.self_target_attention)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, LENGTHS, CAUSAL | LENGTHS], ids=str)
def test_bits_are_those_of_target_attention(dtype: str, options: dict[str, bool]) -> None:
    inputs = inputs_of(small(dtype, S=300, **options))
    out_user, out_cand, lse_user, lse_cand = ikbo.self_target_attention(**inputs)
    keys = [inputs[name] for name in ("k", "v")]
    lengths = inputs.get("user_lengths")
    cand = (inputs["q_cand"], *keys, inputs["cand_to_user"], lengths, inputs.get("cand_lengths"))
    for got, want in zip((out_cand, lse_cand), ikbo.target_attention(*cand), strict=True):
        assert torch.equal(got, want)
    for row in (0, 1, 12, 299):
        seen = torch.full((6,), row + 1 if inputs.get("is_causal") else 300)
        if lengths is not None:
            seen[row >= lengths] = 0
        users = torch.arange(6, dtype=torch.int32)
        query = inputs["q_user"][:, row : row + 1]
        out, lse = ikbo.target_attention(query, *keys, users, lengths, seen.to(torch.int32))
        assert torch.equal(out_user[:, row], out[:, 0])
        assert torch.equal(lse_user[:, :, row], lse[:, :, 0])


def test_rows_do_not_depend_on_their_batch() -> None:
    inputs = inputs_of(small(S=70, D=64, **CAUSAL, **LENGTHS))
    want = ikbo.self_target_attention(**inputs)
    for rows in (torch.randperm(47, generator=torch.Generator().manual_seed(1)), torch.arange(3)):
        picked = {name: inputs[name][rows] for name in ("q_cand", "cand_to_user", "cand_lengths")}
        got = ikbo.self_target_attention(**inputs | picked)
        for i, order in enumerate((slice(None), rows) * 2):
            assert torch.equal(got[i], want[i][order])
    # Another user in front of all, whose rows are NaN.
    users = {n: torch.cat([t[:1] * torch.nan, t]) for n, t in inputs.items() if n in ("k", "v")}
    users["q_user"] = torch.cat([inputs["q_user"][:1] * torch.nan, inputs["q_user"]])
    users["cand_to_user"] = inputs["cand_to_user"] + 1
    users["user_lengths"] = torch.cat([torch.tensor([70]).int(), inputs["user_lengths"]])
    got = ikbo.self_target_attention(**inputs | users)
    for i, order in enumerate((slice(1, None), slice(None)) * 2):
        assert torch.equal(got[i][order], want[i])


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_any_strides(dtype: str) -> None:
    inputs = inputs_of(small(dtype))
    want = ikbo.self_target_attention(**inputs)
    # The feature dimension is the slowest one in memory.
    strided = {n: inputs[n].movedim(-1, 0).contiguous().movedim(0, -1) for n in NAMES}
    strided["cand_to_user"] = inputs["cand_to_user"].repeat_interleave(2)[::2]
    for got, expected in zip(ikbo.self_target_attention(**inputs | strided), want, strict=True):
        assert torch.equal(got, expected)


def test_results_do_not_depend_on_threads() -> None:
    inputs = gradient_inputs(small(B=300, S=70, **CAUSAL, **LENGTHS))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([*ikbo.self_target_attention(**inputs), *gradients(inputs)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def gradient_inputs(this: Case) -> Inputs:
    inputs = inputs_of(this)
    return inputs | {n: inputs[n].nan_to_num().requires_grad_() for n in NAMES}


def gradients(inputs: Inputs, operator: Any = ikbo.self_target_attention) -> tuple[Tensor, ...]:
    """Gradients of all float inputs for fixed random output gradients."""
    results = operator(**inputs)
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in results]
    for i in (2, 3):
        grads[i] = torch.where(torch.isneginf(results[i]), 0, grads[i])
    return torch.autograd.grad(
        results,
        [inputs[name] for name in NAMES],
        [g.to(t.dtype) for g, t in zip(grads, results, strict=True)],
    )


GRADIENT_CASES = [
    *(small("fp64", layout, **options) for layout in ("contiguous", "padded", "transposed")
      for options in ({}, CAUSAL | LENGTHS)),
    *(small("fp64", index=index, **CAUSAL) for index in ("one_user", "one_each", "gaps")),
    *(small("fp64", **{letter: size}, **LENGTHS) for letter, size in
      (("S", 0), ("S", 1), ("S", 70), ("D", 130), ("B", 0), ("Q", 0))),
    small("fp64", scale=-0.7),
]  # fmt: skip


@pytest.mark.parametrize("this", GRADIENT_CASES, ids=lambda c: c.id)
def test_gradients(this: Case) -> None:
    inputs = gradient_inputs(this)
    want = gradients(inputs, reference.self_target_attention)
    for name, got, expected in zip(NAMES, gradients(inputs), want, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{this.id} {n}: {m}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradients_are_as_exact_as_those_of_pytorch(dtype: str) -> None:
    inputs = gradient_inputs(small(dtype, B=200, S=20, **CAUSAL, **LENGTHS))
    wide = {n: inputs[n].detach().double().requires_grad_() for n in NAMES}
    truth = gradients(inputs | wide, reference.self_target_attention)
    peer = gradients(inputs, reference.self_target_attention)
    for got, plain, want in zip(gradients(inputs), peer, truth, strict=True):
        roundings = 4 * torch.finfo(got.dtype).eps * want.abs().max().item()
        allowed = 2 * (plain - want).abs().max().item() + roundings
        assert (got - want).abs().max().item() <= allowed


@pytest.mark.parametrize("options", [{}, CAUSAL | LENGTHS], ids=["full", "masked"])
def test_gradcheck(options: dict[str, bool]) -> None:
    this = small("fp64", "padded", U=3, B=5, Q=1, H=2, H_kv=1, S=4, D=3, **options)
    inputs = gradient_inputs(this)
    tensors = [inputs.pop(name) for name in NAMES]

    def operator(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = ikbo.self_target_attention(*tensors, **inputs)
        return tuple(torch.where(torch.isneginf(result), 0, result) for result in results)

    assert torch.autograd.gradcheck(operator, tensors)


def test_second_order_gradients_are_refused() -> None:
    inputs = gradient_inputs(small())
    out_user, out_cand, *_ = ikbo.self_target_attention(**inputs)
    loss = (out_user * out_user).sum() + out_cand.sum()
    (grad,) = torch.autograd.grad(loss, inputs["k"], create_graph=True)
    with pytest.raises(RuntimeError, match=f"ikbo::{OP}: second-order gradients are not"):
        grad.sum().backward()


@pytest.mark.parametrize("options", [{}, CAUSAL | LENGTHS], ids=["full", "masked"])
def test_opcheck(options: dict[str, bool]) -> None:
    operator = torch.ops.ikbo.self_target_attention.default
    torch.library.opcheck(operator, (), gradient_inputs(small(**options)))


class _Model(torch.nn.Module):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return ikbo.self_target_attention(*inputs, is_causal=True)


def test_export_keeps_users_and_candidates_dynamic() -> None:
    users, candidates = torch.export.Dim("U", max=64), torch.export.Dim("B", max=4096)
    inputs = tuple(inputs_of(small(**LENGTHS)).values())
    by_size = {6: {0: users}, 47: {0: candidates}}
    shapes = {"inputs": tuple(by_size[value.size(0)] for value in inputs)}
    program = torch.export.export(_Model(), inputs, dynamic_shapes=shapes)
    for num_users, num_candidates in ((1, 1), (1, 9), (7, 30)):
        other = tuple(inputs_of(small(U=num_users, B=num_candidates, **LENGTHS)).values())
        with traced_kernels() as launches:
            results = program.module()(*other)
        assert launches == [(run.op, run.kernel) for run in kernels_at(program, other)]
        for got, want in zip(results, _Model()(*other), strict=True):
            assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_kernel_choice() -> None:
    select = functools.partial(torch.ops.ikbo._select_kernel, OP)
    # By the rows of both parts together.
    assert select("cpu", "float32", 4, 8, [1, 512, 2, 2, 64]) == "cpu_rows96_keys256"
    assert select("cpu", "float32", 1, 8, [1, 64, 1, 1, 64]) == "cpu_rows12_keys256"
    assert select("xpu", "float32", 4, 8, [1, 512, 2, 2, 64]) == "composite"


ERRORS: list[tuple[Inputs, str]] = [
    ({"q_user": torch.zeros(3, 5, 12)}, "q_user must have rank 4, [U, S, H, D]; got rank 3"),
    ({"q_user": torch.zeros(3, 4, 2, 6)},
     "q_user must have sizes [U = 3, S = 5, H = 2, D = 6]; got [3, 4, 2, 6]"),
    ({"q_user": torch.zeros(3, 5, 2, 6).double()},
     "q_user must have the dtype of q_cand, float32; got float64"),
    ({"q_user": torch.zeros(3, 5, 2, 6).to("meta")}, "q_user must be on"),
    ({"q_cand": torch.zeros(4, 2, 6)}, "q_cand must have rank 4, [B, Q, H, D]; got rank 3"),
    ({"q_cand": torch.zeros(4, 1, 3, 6)},
     "H (= q_cand.size(2)) must be a multiple of H_kv (= k.size(2)); got H = 3, H_kv = 2"),
    ({"v": torch.zeros(3, 4, 2, 6)}, "v must have sizes [U = 3, S = 5, H_kv = 2, D = 6]"),
    ({"cand_to_user": torch.tensor([0, 1, 3, 0]).int()},
     "cand_to_user values must be in [0, U) with U = 3; got cand_to_user[2] = 3"),
    ({"user_lengths": torch.tensor([0, 6, 1]).int()},
     "user_lengths values must be in [0, S] with S = 5; got user_lengths[1] = 6"),
    ({"cand_lengths": torch.tensor([0, 1, 2, -1]).int()},
     "cand_lengths values must be in [0, S] with S = 5; got cand_lengths[3] = -1"),
    ({"user_lengths": torch.zeros(4).int()}, "user_lengths must have sizes [U = 3]; got [4]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors(change: Inputs, message: str) -> None:
    inputs = {
        "q_user": torch.zeros(3, 5, 2, 6),
        "q_cand": torch.zeros(4, 1, 2, 6),
        "k": torch.zeros(3, 5, 2, 6),
        "v": torch.zeros(3, 5, 2, 6),
        "cand_to_user": torch.zeros(4, dtype=torch.int32),
    }
    with pytest.raises(RuntimeError, match=re.escape(f"ikbo::{OP}: {message}")):
        torch.ops.ikbo.self_target_attention.default(**inputs | change)
