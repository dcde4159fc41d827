# SPDX-License-Identifier: Apache-2.0
"""What `torch.func` and forward mode find at every operator: a rule for vmap, else refusals."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


class GuardedLibrary(torch.library.Library):
    """Puts what an operator has no rule for in front of each kernel registered through it.

    For the `lib` of `torch.library.register_autograd`, whose kernel drops tangents without a word.
    """

    def impl(self, op_name: str, fn: Callable[..., Any], *place: Any, **options: Any) -> None:
        super().impl(op_name, _guarded(op_name.partition(".")[0], fn), *place, **options)


def _guarded(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # At every call of the operator: two comparisons where neither is in use.
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        if torch._C._are_functorch_transforms_active():
            _refuse_gradients(op, args)
        return kernel(keyset, *args, **kwargs)

    return guarded


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]


def _refuse_tangents(op: str, args: tuple[Any, ...]) -> None:
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(args)):
        raise RuntimeError(
            f"ikbo::{op}: forward-mode derivatives are not supported; use reverse mode "
            "(torch.autograd.grad), or write the operator as broadcast and PyTorch operators"
        )


def _refuse_gradients(op: str, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args)):
        raise RuntimeError(
            f"ikbo::{op}: gradients by torch.func (grad, vjp, jacrev) are not supported; use "
            "torch.autograd.grad or .backward()"
        )


def register_vmap(op: str) -> None:
    """Makes `torch.func.vmap` call ``ikbo::<op>`` once for each entry of the batch."""
    name, _, overload = op.partition(".")
    operator = getattr(getattr(torch.ops.ikbo, name), overload or "default")

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if not info.batch_size:
            raise RuntimeError(
                f"ikbo::{name}: the batch of torch.func.vmap must have an entry; got size 0"
            )

        def entry(i: int) -> Any:
            return operator(*pytree.tree_map(lambda x, d: _select(x, d, i), args, in_dims))

        results = [entry(i) for i in range(info.batch_size)]
        stacked = pytree.tree_map(lambda *parts: torch.stack(parts), *results)
        return stacked, pytree.tree_map(lambda _: 0, stacked)

    torch.library.register_vmap(f"ikbo::{op}", rule)


def _select(value: Any, dim: int | None, i: int) -> Any:
    if dim is None:
        return value
    entry = value.select(dim, i)
    # A packed weight holds wider types than its bytes: it must begin at an aligned address.
    return entry.clone() if entry.dtype == torch.uint8 else entry
