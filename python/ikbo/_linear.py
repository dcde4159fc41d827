# SPDX-License-Identifier: Apache-2.0
"""``ikbo::linear`` and its overload: typed call, fakes, backward formula. Schemas and checks are in
C++."""

from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check
from ikbo._autograd import Grads, refuse, register, segment_sum, wide
from ikbo._fakes import sizes_by_letter


def linear(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    """A linear layer over the concatenation of a user and a candidate vector.

    ``out[b] = act(w_cand x_cand[b] + (w_user x_user + bias)[cand_to_user[b]])``

    The user's product is computed once per user.

    Args:
        x_user: ``[U, K_user]``; fp64, fp32, bf16 or fp16, any strides.
        x_cand: ``[B, K_cand]``, same dtype, as all that follow.
        w_user: ``[M, K_user]``.
        w_cand: ``[M, K_cand]``, or what `ikbo.prepack` made of it.
        bias: ``[M]``, or None for none.
        cand_to_user: int32 ``[B]``.
        activation: ``none``, ``relu``, ``gelu`` (with erf), ``silu`` or ``sigmoid``.

    Returns:
        ``[B, M]``, contiguous, same dtype. On the CPU sums are fp32 or better and rounded once,
        after the activation.

    Errors:
        TypeError: an argument of another type, or a tensor that is not dense.
        RuntimeError: a wrong dtype, rank, size, device or activation, a weight packed for another
        call; on the CPU an index value outside ``[0, U)``.

    Cost: ``2 M (U K_user + B K_cand)`` FLOP; reads each input once, writes ``B M`` elements.

    Notes: differentiable once, in reverse mode, in every floating-point input, but with a packed
    weight in none; ``gelu`` and ``silu`` repeat the forward product in the backward pass.
    """
    if x_user is None or x_cand is None or w_user is None or w_cand is None or cand_to_user is None:
        check("linear", x_user, x_cand, w_user, w_cand, bias, cand_to_user)
    try:
        operators = torch.ops.ikbo.linear
        operator = operators.prepacked if w_cand.dtype == torch.uint8 else operators.default
        return operator(x_user, x_cand, w_user, w_cand, bias, cand_to_user, activation)
    except REFUSED:
        check("linear", x_user, x_cand, w_user, w_cand, bias, cand_to_user, activation)
        raise


@torch.library.register_fake("ikbo::linear")
def _linear_fake(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    sizes = sizes_by_letter(
        "linear",
        x_user=(x_user, "U K_user"),
        x_cand=(x_cand, "B K_cand"),
        w_cand=(w_cand, "M K_cand"),
        w_user=(w_user, "M K_user"),
        bias=(bias, "M"),
        cand_to_user=(cand_to_user, "B"),
    )
    return x_cand.new_empty(sizes["B"], sizes["M"])


@torch.library.register_fake("ikbo::linear.prepacked")
def _linear_prepacked_fake(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand_packed: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    sizes = sizes_by_letter(
        "linear",
        x_user=(x_user, "U K_user"),
        x_cand=(x_cand, "B K_cand"),
        w_cand_packed=(w_cand_packed, "rows row_bytes"),
        w_user=(w_user, "M K_user"),
        bias=(bias, "M"),
        cand_to_user=(cand_to_user, "B"),
    )
    return x_cand.new_empty(sizes["B"], sizes["M"])


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, activation = inputs
    ctx.activation = activation
    needs_output = activation in ("relu", "sigmoid")
    ctx.save_for_backward(*tensors, output if needs_output else None)


def _activation_grad(ctx: Any, grad: Tensor) -> Tensor:
    """Gradient with respect to the sum before the activation, in the type of sums."""
    x_user, x_cand, w_user, w_cand, bias, cand_to_user, out = ctx.saved_tensors
    grad = wide(grad)
    if ctx.activation == "none":
        return grad
    if ctx.activation == "relu":
        return grad * (out > 0)
    if ctx.activation == "sigmoid":
        return torch.ops.aten.sigmoid_backward(grad, wide(out))
    total = wide(
        torch.ops.ikbo.linear.default(x_user, x_cand, w_user, w_cand, bias, cand_to_user, "none")
    )
    if ctx.activation == "silu":
        return torch.ops.aten.silu_backward(grad, total)
    return torch.ops.aten.gelu_backward(grad, total)


def _linear_backward(ctx: Any, grad: Tensor) -> Grads:
    x_user, x_cand, w_user, w_cand, _, cand_to_user, _ = ctx.saved_tensors
    needs_x_user, needs_x_cand, needs_w_user, needs_w_cand, needs_bias, *_ = ctx.needs_input_grad
    dtype = x_cand.dtype
    grad_sum = _activation_grad(ctx, grad)
    grad_user = segment_sum(grad_sum, cand_to_user, x_user.size(0))
    return (
        (grad_user @ wide(w_user)).to(dtype) if needs_x_user else None,
        (grad_sum @ wide(w_cand)).to(dtype) if needs_x_cand else None,
        (grad_user.T @ wide(x_user)).to(dtype) if needs_w_user else None,
        (grad_sum.T @ wide(x_cand)).to(dtype) if needs_w_cand else None,
        grad_user.sum(0).to(dtype) if needs_bias else None,
        None,
        None,
    )


register("linear", _linear_backward, _linear_setup)
refuse("linear.prepacked")
