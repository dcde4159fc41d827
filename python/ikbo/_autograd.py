# SPDX-License-Identifier: Apache-2.0
"""What the backward formulas of all operators share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo import _arguments
from ikbo._function_transforms import GuardedLibrary, register_vmap

_LIBRARY = GuardedLibrary("ikbo", "FRAGMENT")

# A context in which operators are called without their backward formulas: those are Python, which
# each call passes through also where no gradient is asked for. Not for forward mode, which
# torch.no_grad() does not turn off.
below_autograd = torch._C._AutoDispatchBelowAutograd

# In the order of the arguments; a list for a list of tensors.
Grads = tuple[Tensor | list[Tensor | None] | None, ...]


class _RefuseSecondOrder(torch.autograd.Function):
    """Identity on first-order gradients; differentiating them again is an error."""

    @staticmethod
    def forward(ctx: Any, op: str, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Grads:
        raise RuntimeError(
            f"ikbo::{ctx.op}: second-order gradients are not supported; differentiate once, or "
            "write the operator as broadcast and PyTorch operators where a second derivative is "
            "needed"
        )


def register(
    op: str,
    formula: Callable[..., Grads],
    setup_context: Callable[..., None],
) -> None:
    """Registers ``formula(ctx, *grad_outputs)`` as the backward of ``ikbo::<op>``.

    First-order gradients are the formula's, also under ``create_graph=True``; differentiating them
    again raises RuntimeError, and so do forward mode and the gradients of ``torch.func``.
    """

    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Grads:
        with torch.no_grad():
            grads = formula(ctx, *grad_outputs)
        sources: Sequence[Tensor | None] = (*grad_outputs, *ctx.saved_tensors)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in sources):
            marker = next(t for t in sources if t is not None and t.requires_grad)
            return _mark(_name(op), grads, marker)
        return grads

    _register(op, backward, setup_context)


def _register(
    op: str, backward: Callable[..., Grads], setup_context: Callable[..., None] | None = None
) -> None:
    torch.library.register_autograd(
        f"ikbo::{op}", backward, setup_context=setup_context, lib=_LIBRARY
    )
    register_vmap(op)
    _arguments.register(op)


def _name(op: str) -> str:
    """The operator's name in the texts of errors, without an overload's."""
    return op.partition(".")[0]


def _mark(op: str, grads: Grads, marker: Tensor) -> Grads:
    present = [grad for grad in pytree.tree_leaves(grads) if isinstance(grad, Tensor)]
    marked = iter(_RefuseSecondOrder.apply(op, marker, *present)[1:])
    return pytree.tree_map_only(Tensor, lambda _: next(marked), grads)


def refuse(op: str) -> None:
    """Makes gradients through ``ikbo::<op>``, which takes or makes a packed weight, an error."""

    def backward(ctx: Any, *_: Tensor | None) -> Grads:
        raise RuntimeError(
            f"ikbo::{_name(op)}: a packed weight is for inference, it gives no gradients; call the "
            "operator with the plain w_cand, or under torch.no_grad()"
        )

    _register(op, backward)


def in_sum_type(tensor: Tensor) -> Tensor:
    """The tensor in the type that sums are taken in: fp32 for 16-bit types, else its own."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def wide(tensor: Tensor) -> Tensor:
    """The tensor as an operand of a product that is summed in fp32 or better and rounded once.

    On a GPU products of 16-bit types are that as they are, and several times as fast.
    """
    return tensor if tensor.is_cuda else in_sum_type(tensor)


def segment_sum(rows: Tensor, cand_to_user: Tensor, num_users: int) -> Tensor:
    """Sums the rows ``[B, ...]`` of each user's candidates: ``[U, ...]``, zeros without any.

    Sums are fp32 or better, and rounded to the type of the rows once.
    """
    terms = in_sum_type(rows)
    sums = terms.new_zeros(num_users, *rows.shape[1:]).index_add_(0, cand_to_user, terms)
    return sums.to(rows.dtype)
