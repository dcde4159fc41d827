# SPDX-License-Identifier: Apache-2.0
"""``ikbo::self_target_attention``: the typed call, its fakes and its backward formula.

Schema and checks are in C++.
"""

from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check
from ikbo._autograd import Grads, register
from ikbo._fakes import sizes_by_letter

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def self_target_attention(
    q_user: Tensor,
    q_cand: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Results:
    """Attention of a user's history to itself, and of each candidate to its user's history.

    ``out_user[u, i, h] = softmax_s(scale * q_user[u, i, h] . k[u, s, g]) v[u, s, g]`` over the keys
    ``s < user_lengths[u]`` and, where ``is_causal``, ``s <= i``; and
    ``out_cand = target_attention(q_cand, k, v, cand_to_user, user_lengths, cand_lengths)``. Both
    read the same keys and values, with ``g = h // (H / H_kv)``.

    Args:
        q_user: ``[U, S, H, D]``; fp64, fp32, bf16 or fp16, any strides.
        q_cand: ``[B, Q, H, D]``, same dtype.
        k: ``[U, S, H_kv, D]``, same dtype; H is a multiple of H_kv.
        v: ``[U, S, H_kv, D]``, same dtype.
        cand_to_user: int32 ``[B]``.
        user_lengths: int32 ``[U]`` in ``[0, S]``: valid rows of each history; None for all S.
        cand_lengths: int32 ``[B]`` in ``[0, S]``: keys that the candidate may see; None for all.
        is_causal: whether a row of the history sees no later one. Candidates see all.
        scale: factor of the scores; None for ``1 / sqrt(D)``.

    Returns:
        ``(out_user, out_cand, lse_user, lse_cand)``: ``[U, S, H, D]``, ``[B, Q, H, D]``,
        ``[U, H, S]`` and ``[B, H, Q]``, contiguous; results in the dtype of the queries,
        log-sum-exps of the scaled scores in fp32 (fp64 for fp64). A row without a key, such as
        those of a history at or past its length, has out 0 and lse -inf. On the CPU sums are fp32
        or better and out is rounded once.

    Errors:
        TypeError: an argument of another type, or a tensor that is not dense.
        RuntimeError: a wrong dtype, rank, size or device; on the CPU an index value outside
        ``[0, U)`` or a length outside ``[0, S]``.

    Cost: ``4 D`` FLOP per (row, key that counts) with ``(U S + B Q) H`` rows; reads the queries,
    and k and v once per 96 rows at most, writes the results.

    Notes: differentiable once, in reverse mode, in q_user, q_cand, k and v; gradients of k and v
    sum over both parts and are rounded once. Rows at or past a history's length are not read into
    any sum: they may hold NaN, in q_user too. On the CPU a row's result is bitwise that of
    `target_attention`, whatever else is in the batch.

    Source: as of `target_attention`.
    """
    arguments = (q_user, q_cand, k, v, cand_to_user, user_lengths, cand_lengths, is_causal, scale)
    if q_user is None or q_cand is None or k is None or v is None or cand_to_user is None:
        check("self_target_attention", *arguments)
    try:
        return torch.ops.ikbo.self_target_attention.default(*arguments)
    except REFUSED:
        check("self_target_attention", *arguments)
        raise


@torch.library.register_fake("ikbo::self_target_attention")
def _self_target_attention_fake(
    q_user: Tensor,
    q_cand: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Results:
    sizes = sizes_by_letter(
        "self_target_attention",
        q_cand=(q_cand, "B Q H D"),
        k=(k, "U S H_kv D"),
        v=(v, "U S H_kv D"),
        cand_to_user=(cand_to_user, "B"),
        user_lengths=(user_lengths, "U"),
        cand_lengths=(cand_lengths, "B"),
        q_user=(q_user, "U S H D"),
    )
    lse_dtype = torch.float64 if q_cand.dtype == torch.float64 else torch.float32
    return (
        torch.empty_like(q_user, memory_format=torch.contiguous_format),
        torch.empty_like(q_cand, memory_format=torch.contiguous_format),
        q_user.new_empty(sizes["U"], sizes["H"], sizes["S"], dtype=lse_dtype),
        q_cand.new_empty(sizes["B"], sizes["H"], sizes["Q"], dtype=lse_dtype),
    )


@torch.library.register_fake("ikbo::_self_target_attention_backward")
def _self_target_attention_backward_fake(*arguments: Any) -> Results:
    q_user, q_cand, k, v = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in arguments[4:8]
    )
    return q_user, q_cand, k, v


def _self_target_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _self_target_attention_backward(ctx: Any, *grads: Tensor) -> Grads:
    *tensors, out_user, out_cand, lse_user, lse_cand = ctx.saved_tensors
    results = (out_user, out_cand, lse_user, lse_cand)
    gradients = torch.ops.ikbo._self_target_attention_backward.default(
        *grads, *tensors, ctx.is_causal, ctx.scale, *results
    )
    return (*gradients, None, None, None, None, None)


register("self_target_attention", _self_target_attention_backward, _self_target_attention_setup)
