# SPDX-License-Identifier: Apache-2.0
"""``ikbo::lce``: typed call, fake and backward formula. Schema and checks are in C++."""

from typing import Any

import torch
from torch import Tensor

from ikbo._autograd import Grads, register, segment_sum, wide
from ikbo._fakes import sizes_by_letter


def lce(
    e_user: Tensor,
    e_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    """Linear compression of embeddings: mixes the embeddings of a user and a candidate.

    ``out[b] = w_cand e_cand[b] + (w_user e_user + bias)[cand_to_user[b]]``

    Each of the M output rows is a weighted sum of the K_user user rows and the K_cand candidate
    rows, all of width N. The user's product is computed once per user.

    Args:
        e_user: ``[U, K_user, N]``; fp64, fp32, bf16 or fp16, any strides.
        e_cand: ``[B, K_cand, N]``, same dtype, as all that follow.
        w_user: ``[M, K_user]``.
        w_cand: ``[M, K_cand]``.
        bias: ``[M]``, the same for all N, or None for none.
        cand_to_user: int32 ``[B]``.

    Returns:
        ``[B, M, N]``, contiguous, same dtype. On the CPU sums are fp32 or better and rounded once.

    Errors:
        RuntimeError: a wrong dtype, rank, size or device; on the CPU an index value outside
        ``[0, U)``.

    Cost: ``2 M N (U K_user + B K_cand)`` FLOP; reads each input once, writes ``B M N`` elements.

    Notes: differentiable once in every floating-point input.

    Source: linear compressed embedding, arXiv 2203.11014.
    """
    return torch.ops.ikbo.lce.default(e_user, e_cand, w_user, w_cand, bias, cand_to_user)


@torch.library.register_fake("ikbo::lce")
def _lce_fake(
    e_user: Tensor,
    e_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    sizes = sizes_by_letter(
        "lce",
        e_cand=(e_cand, "B K_cand N"),
        e_user=(e_user, "U K_user N"),
        w_cand=(w_cand, "M K_cand"),
        w_user=(w_user, "M K_user"),
        bias=(bias, "M"),
        cand_to_user=(cand_to_user, "B"),
    )
    return e_cand.new_empty(sizes["B"], sizes["M"], sizes["N"])


def _lce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    e_user, e_cand, w_user, w_cand, _, cand_to_user = inputs
    ctx.save_for_backward(e_user, e_cand, w_user, w_cand, cand_to_user)


def _lce_backward(ctx: Any, grad: Tensor) -> Grads:
    e_user, e_cand, w_user, w_cand, cand_to_user = ctx.saved_tensors
    needs_e_user, needs_e_cand, needs_w_user, needs_w_cand, needs_bias, _ = ctx.needs_input_grad
    dtype = grad.dtype
    grad = wide(grad)
    grad_user = segment_sum(grad, cand_to_user, e_user.size(0))
    return (
        (wide(w_user).T @ grad_user).to(dtype) if needs_e_user else None,
        (wide(w_cand).T @ grad).to(dtype) if needs_e_cand else None,
        _weight_grad(grad_user, e_user) if needs_w_user else None,
        _weight_grad(grad, e_cand) if needs_w_cand else None,
        grad_user.sum((0, 2)).to(dtype) if needs_bias else None,
        None,
    )


def _weight_grad(grad: Tensor, e: Tensor) -> Tensor:
    """``sum_i grad[i] e[i]^T``: ``[*, M, N]`` and ``[*, K, N]`` to ``[M, K]``."""
    return torch.tensordot(grad, wide(e), dims=([0, 2], [0, 2])).to(e.dtype)


register("lce", _lce_backward, _lce_setup)
