# SPDX-License-Identifier: Apache-2.0
"""``ikbo::expand``: typed call, fake and backward formula. Schema and checks are in C++."""

from typing import Any

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check
from ikbo._autograd import Grads, register, segment_sum, wide
from ikbo._fakes import sizes_by_letter


def expand(x_user: Tensor, cand_to_user: Tensor) -> Tensor:
    """The user's row for every candidate: ``out[b] = x_user[cand_to_user[b]]``.

    This is the explicit boundary between user batch and candidate batch.

    Args:
        x_user: ``[U, ...]``, any dtype but the quantised, any strides.
        cand_to_user: int32 ``[B]``.

    Returns:
        ``[B, ...]``, contiguous, dtype of ``x_user``.

    Errors:
        TypeError: no tensor, or one that is not dense.
        RuntimeError: a wrong dtype, rank or device; on the CPU an index value outside ``[0, U)``.

    Cost: no FLOP; reads the rows of the users that have candidates, writes B rows.

    Notes: differentiable in ``x_user`` once, in reverse mode. Never aliases its input.
    """
    if x_user is None or cand_to_user is None:
        check("expand", x_user, cand_to_user)
    try:
        return torch.ops.ikbo.expand.default(x_user, cand_to_user)
    except REFUSED:
        check("expand", x_user, cand_to_user)
        raise


@torch.library.register_fake("ikbo::expand")
def _expand_fake(x_user: Tensor, cand_to_user: Tensor) -> Tensor:
    row = " ".join(f"D{d}" for d in range(1, x_user.dim()))
    sizes = sizes_by_letter("expand", x_user=(x_user, f"U {row}"), cand_to_user=(cand_to_user, "B"))
    return x_user.new_empty(sizes["B"], *x_user.shape[1:])


def _expand_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_user, cand_to_user = inputs
    ctx.num_users = x_user.size(0)
    ctx.save_for_backward(cand_to_user)


def _expand_backward(ctx: Any, grad: Tensor) -> Grads:
    (cand_to_user,) = ctx.saved_tensors
    return segment_sum(wide(grad), cand_to_user, ctx.num_users).to(grad.dtype), None


register("expand", _expand_backward, _expand_setup)
