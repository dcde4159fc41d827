# SPDX-License-Identifier: Apache-2.0
"""Sums of products along the field axis, as `ikbo::lce`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo.transform.forms import Product

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)

# Fields that a tensor must have to be read where it lies. Kernels fill each tensor of a list up to
# blocks of 32: a model that stacks single embeddings would compute zeros for the most part.
_MIN_FIELDS = 16

# Up to this width of an embedding `weight @ x` is one product over all rows, on transposed fields:
# torch would repeat the weight for each row of the batch, and multiply by so few columns each time.
_NARROW = 8


def product(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`weight @ x + bias`, along the fields of `x`, `[..., N, D]`; one bias value per field."""
    if x.shape[-1] <= _NARROW:
        *batch, fields, width = x.shape
        rows = torch.nn.functional.linear(x.mT.reshape(-1, fields), weight, bias)
        # As matmul lays it out: what the model does next may be a view of that.
        return rows.view(*batch, width, weight.shape[0]).mT.contiguous()
    out = torch.matmul(weight, x)
    return out if bias is None else out + bias.unsqueeze(-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, on the CPU as one product over all rows of `x`.

    Of rows that do not lie one behind the other, a transposed `x`, torch makes such a product only
    where the weight requires gradients, as it does in the unmodified model and not here; else it
    repeats the weight for each row of the batch.
    """
    *batch, columns = x.shape
    if x.device.type != "cpu" or not _lie_apart(x):
        return torch.nn.functional.linear(x, weight, bias)
    rows = torch.nn.functional.linear(x.reshape(-1, columns), weight, bias)
    return rows.view(*batch, weight.shape[0])


def _lie_apart(x: Tensor) -> bool:
    """Whether rows, along the last axis, do not lie one behind the other; the batch is axis 0."""
    is_known = all(isinstance(size, int) for size in x.shape[1:])
    steps = range(x.ndim - 2) if is_known else ()
    return any(x.stride(a) != x.stride(a + 1) * x.shape[a + 1] for a in steps)


def called(target: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator of the model, a product as `linear` or `product`."""
    if target is aten.linear.default:
        return linear(*args, **kwargs)
    if target is aten.matmul.default and args[0].ndim == 2 and args[1].ndim > 2:
        return product(*args)
    # A rewrite may have laid out otherwise what the model can view.
    return (aten.reshape.default if target in _VIEWS else target)(*args, **kwargs)


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
    """`ikbo::lce`, of which `e_cand` may be the concatenation of `pieces`.

    Of embeddings with one value it is an `ikbo::linear`.
    """
    if e_cand.shape[-1] == 1:
        return torch.ops.ikbo.linear(e_user.squeeze(-1), e_cand.squeeze(-1), *others).unsqueeze(-1)
    if pieces and all(piece.shape[1] >= _MIN_FIELDS for piece in pieces):
        return torch.ops.ikbo.lce.list(e_user, list(pieces), *others)
    return torch.ops.ikbo.lce(e_user, e_cand, *others)
