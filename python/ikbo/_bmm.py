# SPDX-License-Identifier: Apache-2.0
"""``ikbo::bmm``: typed call, fake and backward formula. Schema and checks are in C++."""

import math
from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check
from ikbo._autograd import Grads, in_sum_type, register, segment_sum
from ikbo._fakes import sizes_by_letter


def bmm(
    a_user: Tensor,
    b_cand: Tensor,
    cand_to_user: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Tensor:
    """The user's matrix times the candidate's: ``out[b] = a_user[cand_to_user[b]] @ b_cand[b]``.

    The user's matrix is read by index and never replicated.

    Args:
        a_user: ``[U, P, R]``, or ``[U, R, P]`` with ``transpose_a``; fp64, fp32, bf16 or fp16, any
            strides.
        b_cand: ``[B, R, N]``, or ``[B, N, R]`` with ``transpose_b``; same dtype.
        cand_to_user: int32 ``[B]``.
        transpose_a: whether each matrix of ``a_user`` is transposed first.
        transpose_b: whether each matrix of ``b_cand`` is transposed first.

    Returns:
        ``[B, P, N]``, contiguous, same dtype. On CPU and CUDA sums are fp32 or better and rounded
        once.

    Errors:
        TypeError: an argument of another type, or a tensor that is not dense.
        RuntimeError: a wrong dtype, rank, size or device; on the CPU an index value outside
        ``[0, U)``.

    Cost: ``2 B P R N`` FLOP; reads each input once, writes ``B P N`` elements.

    Notes: differentiable once, in reverse mode, in both matrices. On the CPU, neighbours with the
    same user share calls: candidates sorted by user are fastest.
    """
    if a_user is None or b_cand is None or cand_to_user is None:
        check("bmm", a_user, b_cand, cand_to_user)
    try:
        return torch.ops.ikbo.bmm.default(a_user, b_cand, cand_to_user, transpose_a, transpose_b)
    except REFUSED:
        check("bmm", a_user, b_cand, cand_to_user, transpose_a, transpose_b)
        raise


@torch.library.register_fake("ikbo::bmm")
def _bmm_fake(
    a_user: Tensor,
    b_cand: Tensor,
    cand_to_user: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Tensor:
    sizes = sizes_by_letter(
        "bmm",
        a_user=(a_user, "U R P" if transpose_a else "U P R"),
        b_cand=(b_cand, "B N R" if transpose_b else "B R N"),
        cand_to_user=(cand_to_user, "B"),
    )
    return b_cand.new_empty(sizes["B"], sizes["P"], sizes["N"])


@torch.library.custom_op("ikbo::_bmm_user_grad", mutates_args=())
def _bmm_user_grad(left: Tensor, right: Tensor, cand_to_user: Tensor, num_users: int) -> Tensor:
    """``out[u] = sum over the candidates b of u of left[b] @ right[b]``, zeros where there is none.

    Works on a sixteenth of the candidates at a time, or on ``num_users`` if that is more. An
    operator, so that a compiled training step does not unroll the loop.
    """
    total = left.new_zeros(num_users, left.size(1), right.size(2))
    block = max(1, num_users, math.ceil(left.size(0) / 16))
    for begin in range(0, left.size(0), block):
        end = begin + block
        total += segment_sum(left[begin:end] @ right[begin:end], cand_to_user[begin:end], num_users)
    return total


@_bmm_user_grad.register_fake
def _bmm_user_grad_fake(
    left: Tensor, right: Tensor, cand_to_user: Tensor, num_users: int
) -> Tensor:
    return left.new_empty(num_users, left.size(1), right.size(2))


def _bmm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a_user, b_cand, cand_to_user, transpose_a, transpose_b = inputs
    ctx.transpose_a, ctx.transpose_b = transpose_a, transpose_b
    ctx.save_for_backward(a_user, b_cand, cand_to_user)


def _bmm_backward(ctx: Any, grad: Tensor) -> Grads:
    a_user, b_cand, cand_to_user = ctx.saved_tensors
    needs_a, needs_b, *_ = ctx.needs_input_grad
    grad_a = grad_b = None
    if needs_a:
        b = in_sum_type(b_cand)
        total = _bmm_user_grad(
            in_sum_type(grad), b if ctx.transpose_b else b.mT, cand_to_user, a_user.size(0)
        )
        grad_a = (total.mT if ctx.transpose_a else total).to(grad.dtype)
    if needs_b:
        product = bmm(a_user, grad, cand_to_user, transpose_a=not ctx.transpose_a)
        grad_b = product.mT if ctx.transpose_b else product
    return grad_a, grad_b, None, None, None


register("bmm", _bmm_backward, _bmm_setup)
