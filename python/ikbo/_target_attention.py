# SPDX-License-Identifier: Apache-2.0
"""``ikbo::target_attention`` and its overload for packed histories: typed call, fakes, backward
formulas. Schemas and checks are in C++."""

from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check, refusal
from ikbo._autograd import Grads, register
from ikbo._fakes import Size, sizes_by_letter


def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    user_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    user_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each candidate's queries over the keys and values of its user.

    ``out[b, i, h] = softmax_s(scale * q[b, i, h] . k[u, s, g]) v[u, s, g]`` with
    ``u = cand_to_user[b]`` and ``g = h // (H / H_kv)``. Key ``s`` counts for candidate ``b`` when
    ``s < user_lengths[u]``, ``s < cand_lengths[b]`` and ``user_mask[u, s]``, each where given.
    Keys and values are read by index and never replicated.

    With ``user_offsets`` histories are packed, one after the other without padding: user ``u`` has
    ``S = user_offsets[u + 1] - user_offsets[u]`` keys, row ``user_offsets[u] + s`` of k and v is
    key ``s``, and it counts when ``s < cand_lengths[b]``, where given.

    Args:
        q: ``[B, Q, H, D]``; fp64, fp32, bf16 or fp16, any strides.
        k: ``[U, S, H_kv, D]``, same dtype; H is a multiple of H_kv. Packed: ``[T, H_kv, D]``.
        v: as k.
        cand_to_user: int32 ``[B]``.
        user_lengths: int32 ``[U]`` in ``[0, S]``: valid keys of each user; None for all S.
        cand_lengths: int32 ``[B]`` in ``[0, S]``: keys that the candidate may see; None for all.
            Packed: not negative; what is beyond the history of its user means all of it.
        user_mask: bool ``[U, S]``, True where the key counts; None for everywhere.
        scale: factor of the scores; None for ``1 / sqrt(D)``.
        user_offsets: int32 ``[U + 1]``: begins with 0, never decreases, ends at T at most; rows
            past its end belong to no user. It replaces ``user_lengths`` and ``user_mask``, which
            must be None. None for histories of one size S.

    Returns:
        ``(out, lse)``: out ``[B, Q, H, D]``, contiguous, same dtype; lse ``[B, H, Q]``, the
        log-sum-exp of the scaled scores, fp32 (fp64 for fp64). A row without a key has out 0 and
        lse -inf. On the CPU sums are fp32 or better and out is rounded once.

    Errors:
        TypeError: an argument of another type, a tensor that is not dense, or ``user_lengths`` or
        ``user_mask`` beside ``user_offsets``.
        RuntimeError: a wrong dtype, rank, size or device; on the CPU an index value outside
        ``[0, U)``, a length outside ``[0, S]``, or offsets that are not as described.

    Cost: ``4 D`` FLOP per (row, key that counts) with ``B Q H`` rows; reads q, and k and v of the
    users with candidates once per 96 rows at most, writes out and lse.

    Notes: differentiable once, in reverse mode, in q, k and v. Keys that do not count are not read
    into any sum: they may hold NaN. On the CPU a row's result is bitwise the same whatever the
    other candidates and users of the batch, their order and the number of threads are; gradients
    of k and v sum over candidates in their order. Packed, a row's result has the bits of the call
    with padded histories. On a device without a kernel for packed histories the host reads
    ``user_offsets``: it waits for the device, and a CUDA graph cannot capture it.

    Source: the online softmax of Milakov and Gimelshein, 2018; tiling as in Dao et al., 2022.
    """
    if q is None or k is None or v is None or cand_to_user is None:
        check("target_attention", q, k, v, cand_to_user)
    if user_offsets is not None:
        for name, value in (("user_lengths", user_lengths), ("user_mask", user_mask)):
            if value is not None:
                raise refusal("target_attention", name, "None beside user_offsets", value)
        packed = (q, k, v, cand_to_user, user_offsets, cand_lengths, scale)
        try:
            return torch.ops.ikbo.target_attention.packed(*packed)
        except REFUSED:
            check("target_attention.packed", *packed)
            raise
    try:
        return torch.ops.ikbo.target_attention.default(
            q, k, v, cand_to_user, user_lengths, cand_lengths, user_mask, scale
        )
    except REFUSED:
        optional = (user_lengths, cand_lengths, user_mask, scale)
        check("target_attention", q, k, v, cand_to_user, *optional)
        raise


@torch.library.register_fake("ikbo::target_attention")
def _target_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    user_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    sizes = sizes_by_letter(
        "target_attention",
        q=(q, "B Q H D"),
        k=(k, "U S H_kv D"),
        v=(v, "U S H_kv D"),
        cand_to_user=(cand_to_user, "B"),
        user_lengths=(user_lengths, "U"),
        cand_lengths=(cand_lengths, "B"),
        user_mask=(user_mask, "U S"),
    )
    return _empty_results(q, sizes)


@torch.library.register_fake("ikbo::target_attention.packed")
def _packed_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_offsets: Tensor,
    cand_lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    sizes = sizes_by_letter(
        "target_attention",
        q=(q, "B Q H D"),
        k=(k, "T H_kv D"),
        v=(v, "T H_kv D"),
        cand_to_user=(cand_to_user, "B"),
        user_offsets=(user_offsets, "U+1"),
        cand_lengths=(cand_lengths, "B"),
    )
    return _empty_results(q, sizes)


def _empty_results(q: Tensor, sizes: dict[str, Size]) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(sizes["B"], sizes["H"], sizes["Q"], dtype=lse_dtype)


@torch.library.register_fake("ikbo::_target_attention_backward")
@torch.library.register_fake("ikbo::_target_attention_backward.packed")
def _target_attention_backward_fake(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v)
    )
    return grad_q, grad_k, grad_v


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale = inputs
    ctx.scale = scale
    ctx.save_for_backward(*tensors, *output)


def _gradients(operator: Any, ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Grads:
    """By the overload of ``_target_attention_backward``; None for all but q, k and v."""
    *tensors, out, lse = ctx.saved_tensors
    grads = operator(grad_out, grad_lse, *tensors, ctx.scale, out, lse)
    return (*grads, *[None] * (len(tensors) - 2))


def _target_attention_backward(ctx: Any, *grads: Tensor) -> Grads:
    return _gradients(torch.ops.ikbo._target_attention_backward.default, ctx, *grads)


def _packed_backward(ctx: Any, *grads: Tensor) -> Grads:
    return _gradients(torch.ops.ikbo._target_attention_backward.packed, ctx, *grads)


register("target_attention", _target_attention_backward, _setup)
register("target_attention.packed", _packed_backward, _setup)
