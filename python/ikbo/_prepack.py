# SPDX-License-Identifier: Apache-2.0
"""``ikbo::prepack``: typed call and fake. Schema, format and checks are in C++."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo._arguments import REFUSED, check
from ikbo._autograd import refuse


def prepack(w_cand: Tensor, k_cand: Sequence[int]) -> Tensor:
    """A candidate weight in the form that the kernels load, made once instead of at every call.

    The result takes the place of ``w_cand`` in `ikbo.lce` and `ikbo.linear`. It is for inference:
    it has no gradient, and a changed weight has to be packed again.

    Args:
        w_cand: ``[M, K_cand]``; fp64, fp32, bf16 or fp16, any strides.
        k_cand: the K_i of the tensors that the weight will meet, with the sum K_cand:
            ``[K_cand]`` for one tensor, otherwise in the order of the list.

    Returns:
        uint8 ``[rows, row_bytes]``, for the device, dtype and version of ikbo that made it; another
        one refuses it. It holds the weight dense, on the CPU in the type of sums, and on Hopper in
        16 bits also as the image of shared memory that the kernel copies.

    Errors:
        TypeError: an argument of another type, or a tensor that is not dense.
        RuntimeError: a wrong dtype or rank, or ``k_cand`` of another sum.

    Cost: up to 2 weights and 64 KiB of memory. On CUDA it copies from the host: not for capture in
    a CUDA graph.
    """
    if w_cand is None:
        check("prepack", w_cand)
    try:
        return torch.ops.ikbo.prepack.default(w_cand, k_cand)
    except REFUSED:
        check("prepack", w_cand, k_cand)
        raise


@torch.library.register_fake("ikbo::prepack")
def _prepack_fake(w_cand: Tensor, k_cand: Sequence[int]) -> Tensor:
    if w_cand.dim() != 2:
        raise RuntimeError(
            f"ikbo::prepack: w_cand must have rank 2, [M, K_cand]; got rank {w_cand.dim()}"
        )
    sizes = torch.ops.ikbo._packed_sizes(
        w_cand.device, w_cand.dtype, int(w_cand.size(0)), [int(k) for k in k_cand]
    )
    return w_cand.new_empty(sizes, dtype=torch.uint8)


refuse("prepack")
