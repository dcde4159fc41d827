# SPDX-License-Identifier: Apache-2.0
"""``ikbo::lce`` and its overloads: typed call, fakes, backward formula. Schemas and checks are in
C++."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check, is_tensor, refusal
from ikbo._autograd import Grads, refuse, register, segment_sum, wide
from ikbo._fakes import Size, sizes_by_letter


def lce(
    e_user: Tensor,
    e_cand: Tensor | Sequence[Tensor],
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
        e_cand: ``[B, K_cand, N]``, same dtype, as all that follow; or a list of tensors
            ``[B, K_i, N]`` that stand for their concatenation, K_cand the sum of the K_i. They are
            read where they lie, such as slices ``emb[:, a:b, :]`` of one table's output.
        w_user: ``[M, K_user]``.
        w_cand: ``[M, K_cand]``, or what `ikbo.prepack` made of it.
        bias: ``[M]``, the same for all N, or None for none.
        cand_to_user: int32 ``[B]``.

    Returns:
        ``[B, M, N]``, contiguous, same dtype. On the CPU sums are fp32 or better and rounded once.

    Errors:
        TypeError: an argument of another type, or a tensor that is not dense.
        RuntimeError: a wrong dtype, rank, size or device, an empty list, a weight packed for
        another call; on the CPU an index value outside ``[0, U)``.

    Cost: ``2 M N (U K_user + B K_cand)`` FLOP; reads each input once, writes ``B M N`` elements.

    Notes: differentiable once, in reverse mode, in every floating-point input, but with a packed
    weight in none.

    Source: linear compressed embedding, arXiv 2203.11014.
    """
    operators = torch.ops.ikbo.lce
    is_list = isinstance(e_cand, list | tuple)
    if e_user is None or e_cand is None or w_user is None or w_cand is None or cand_to_user is None:
        _check(is_list, e_user, e_cand, w_user, w_cand, bias, cand_to_user)
    try:
        if w_cand.dtype == torch.uint8:
            parts = list(e_cand) if is_list else [e_cand]
            return operators.prepacked(e_user, parts, w_user, w_cand, bias, cand_to_user)
        if is_list:
            return operators.list(e_user, list(e_cand), w_user, w_cand, bias, cand_to_user)
        return operators.default(e_user, e_cand, w_user, w_cand, bias, cand_to_user)
    except REFUSED:
        _check(is_list, e_user, e_cand, w_user, w_cand, bias, cand_to_user)
        raise


def _check(is_list: bool, e_user: Any, e_cand: Any, *others: Any) -> None:
    if not (is_list or is_tensor(e_cand)):
        raise refusal("lce", "e_cand", "a torch.Tensor or a list of them", e_cand) from None
    check("lce.list" if is_list else "lce", e_user, e_cand, *others)


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


def _sizes_of_list(e_cand: list[Tensor], **others: tuple[Tensor | None, str]) -> dict[str, Size]:
    if not e_cand:
        raise RuntimeError(
            "ikbo::lce: e_cand must hold at least one tensor [B, K_i, N]; got an empty list"
        )
    parts = {f"e_cand[{i}]": (part, f"B K_{i} N") for i, part in enumerate(e_cand)}
    return sizes_by_letter("lce", **parts, **others)


@torch.library.register_fake("ikbo::lce.list")
def _lce_list_fake(
    e_user: Tensor,
    e_cand: list[Tensor],
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    sizes = _sizes_of_list(
        e_cand,
        e_user=(e_user, "U K_user N"),
        w_cand=(w_cand, "M K_cand"),
        w_user=(w_user, "M K_user"),
        bias=(bias, "M"),
        cand_to_user=(cand_to_user, "B"),
    )
    k_cand = sum(part.size(1) for part in e_cand)
    torch._check(
        sizes["K_cand"] == k_cand,
        lambda: f"ikbo::lce: w_cand must have sum of K_i = {k_cand}; got {sizes['K_cand']}",
    )
    return e_cand[0].new_empty(sizes["B"], sizes["M"], sizes["N"])


@torch.library.register_fake("ikbo::lce.prepacked")
def _lce_prepacked_fake(
    e_user: Tensor,
    e_cand: list[Tensor],
    w_user: Tensor,
    w_cand_packed: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    sizes = _sizes_of_list(
        e_cand,
        e_user=(e_user, "U K_user N"),
        w_cand_packed=(w_cand_packed, "rows row_bytes"),
        w_user=(w_user, "M K_user"),
        bias=(bias, "M"),
        cand_to_user=(cand_to_user, "B"),
    )
    return e_cand[0].new_empty(sizes["B"], sizes["M"], sizes["N"])


def _lce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    e_user, e_cand, w_user, w_cand, _, cand_to_user = inputs
    parts = [e_cand] if isinstance(e_cand, Tensor) else e_cand
    ctx.save_for_backward(e_user, w_user, w_cand, cand_to_user, *parts)


def _lce_list_backward(ctx: Any, grad: Tensor) -> Grads:
    return _gradients(ctx, grad, ctx.needs_input_grad[1])


def _lce_backward(ctx: Any, grad: Tensor) -> Grads:
    grad_e_user, (grad_e_cand,), *others = _gradients(ctx, grad, [ctx.needs_input_grad[1]])
    return grad_e_user, grad_e_cand, *others


def _gradients(ctx: Any, grad: Tensor, needs_e_cand: Sequence[bool]) -> tuple[Any, ...]:
    """Of the arguments of ``lce.list``, whose parts need one each as `needs_e_cand` says."""
    e_user, w_user, w_cand, cand_to_user, *e_cand = ctx.saved_tensors
    needs_e_user, _, needs_w_user, needs_w_cand, needs_bias, _ = ctx.needs_input_grad
    dtype = grad.dtype
    grad = wide(grad)
    grad_user = segment_sum(grad, cand_to_user, e_user.size(0))
    weights = wide(w_cand).split([part.size(1) for part in e_cand], dim=1)
    return (
        (wide(w_user).T @ grad_user).to(dtype) if needs_e_user else None,
        [
            (w.T @ grad).to(dtype) if needs else None
            for w, needs in zip(weights, needs_e_cand, strict=True)
        ],
        _weight_grad(grad_user, e_user) if needs_w_user else None,
        torch.cat([_weight_grad(grad, part) for part in e_cand], dim=1) if needs_w_cand else None,
        grad_user.sum((0, 2)).to(dtype) if needs_bias else None,
        None,
    )


def _weight_grad(grad: Tensor, e: Tensor) -> Tensor:
    """``sum_i grad[i] e[i]^T``: ``[*, M, N]`` and ``[*, K, N]`` to ``[M, K]``."""
    return torch.tensordot(grad, wide(e), dims=([0, 2], [0, 2])).to(e.dtype)


register("lce", _lce_backward, _lce_setup)
register("lce.list", _lce_list_backward, _lce_setup)
refuse("lce.prepacked")
