# SPDX-License-Identifier: Apache-2.0
"""ikbo::expand on the CPU: exact for every dtype, rank and layout; gradients; errors."""

import functools

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.inputs import Case, in_layout, make_inputs, standard_cases

ANY_DTYPE = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64, torch.complex64)


@pytest.mark.parametrize("this", standard_cases("expand", {"K_user": 9}), ids=lambda c: c.id)
def test_exact(this: Case) -> None:
    inputs = make_inputs(this)
    assert torch.equal(ikbo.expand(**inputs), reference.expand(**inputs))


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
@pytest.mark.parametrize("sizes", [(4,), (4, 3), (4, 0), (4, 2, 3, 2)], ids=str)
def test_any_dtype_and_rank(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    x_user = in_layout((torch.rand(sizes) * 3).to(dtype), "padded" if sizes[-1] else "contiguous")
    index = torch.tensor([3, 0, 0, 2, 3], dtype=torch.int32)
    assert torch.equal(ikbo.expand(x_user, index), x_user[index.long()])


def test_never_aliases() -> None:
    x_user = torch.zeros(1, 2)
    ikbo.expand(x_user, torch.zeros(1, dtype=torch.int32)).fill_(1)
    assert x_user.count_nonzero() == 0


def test_gradcheck() -> None:
    index = torch.tensor([3, 0, 0, 3], dtype=torch.int32)
    x_user = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(functools.partial(ikbo.expand, cand_to_user=index), [x_user])


def test_16_bit_gradient_is_summed_in_fp32() -> None:
    # 1 + 300 * 2^-9 in bf16 steps would stay 1: each term is below half a step.
    x_user = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.cat([torch.ones(1, 1), torch.full((300, 1), 2.0**-9)]).bfloat16()
    index = torch.zeros(301, dtype=torch.int32)
    (ikbo.expand(x_user, index) * weights).backward(torch.ones(301, 1, dtype=torch.bfloat16))
    assert x_user.grad is not None
    assert x_user.grad.item() == torch.tensor(1 + 300 * 2.0**-9).bfloat16().item()


def test_bad_rank() -> None:
    index = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"ikbo::expand: x_user must have rank 1 or more"):
        ikbo.expand(torch.tensor(1.0), index)
    with pytest.raises(RuntimeError, match=r"cand_to_user must have rank 1, \[B\]; got rank 2"):
        ikbo.expand(torch.zeros(3, 2), index[:, None])
