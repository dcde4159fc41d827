# SPDX-License-Identifier: Apache-2.0
"""Sums of products along the field axis, as `ikbo::lce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo.transform.forms import Product

# Fields that a tensor must have to be read where it lies. Kernels fill each tensor of a list up to
# blocks of 32: a model that stacks single embeddings would compute zeros for the most part.
_MIN_FIELDS = 16


def turned(user: Product, cand: Product) -> tuple[Product, Product] | None:
    """The products of the transposed result; None where the model did not transpose its fields.

    before: linear(e.transpose(1, 2), W)    after: (W @ e).transpose(1, 2)
    """
    terms = (user, cand)
    if any(term.kind != "linear" or term.x.dims != (0, 2, 1) for term in terms):
        return None
    first, second = (replace(t, kind="lce", x=t.x.base) for t in terms)  # type: ignore[arg-type]
    return first, second


def lce(e_cand: Tensor, pieces: Sequence[Tensor] | None, e_user: Tensor, *others: Any) -> Tensor:
    """`ikbo::lce`, of which `e_cand` may be the concatenation of `pieces`."""
    if pieces and all(piece.shape[1] >= _MIN_FIELDS for piece in pieces):
        return torch.ops.ikbo.lce.list(e_user, list(pieces), *others)
    return torch.ops.ikbo.lce(e_user, e_cand, *others)
