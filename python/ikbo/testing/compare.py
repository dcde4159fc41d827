# SPDX-License-Identifier: Apache-2.0
"""Whether an operator's result is as exact as it must be, per output row.

The truth is the reference in fp64. A row passes when its largest error is at most the kernel's
roundings (one, where nothing else is said) of the row's largest value, plus the rounding of a sum
of the row's largest absolute terms in the type of sums, plus, for kernels that round more than
once, twice what the reference makes in the case's own dtype (that is PyTorch on replicated
inputs). All of it comes from the data; there are no tolerances to choose.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo.testing.inputs import DTYPES, Case

# One rounding is half an epsilon; the operator rounds once and the truth is not rounded.
_ROUNDING = 0.5
# Sums of n terms in any order are within n/2 epsilons of the sum of absolute terms; random signs
# make that sqrt(n), and n here is far below 4096.
_SUM_EPSILONS = 32
# The composite rounds the user product, the bias, the candidate product, their sum, the activation.
COMPOSITE_ROUNDINGS = 5


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which an operator must at least sum."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def converted(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with every floating-point tensor in ``dtype``."""
    return {name: _map(value, lambda t: t.to(dtype)) for name, value in arguments.items()}


def check_against_reference(
    this: Case,
    arguments: dict[str, Any],
    result: Tensor | Sequence[Tensor],
    reference: Callable[..., Tensor | Sequence[Tensor]],
    *,
    roundings: int = 1,
) -> None:
    """Raises AssertionError, naming case, coordinate and both values, unless every row passes.

    ``roundings``: how often the kernel may round a value to its dtype; 1 for kernels that promise
    sums in fp32 or better and one rounding at the end.
    """
    dtype = DTYPES[this.dtype]
    on_cpu = pytree.tree_map_only(Tensor, Tensor.cpu, arguments)
    truth = _as_tuple(reference(**converted(on_cpu, torch.float64)))
    same_dtype = _as_tuple(reference(**on_cpu))
    terms = _as_tuple(reference(**_absolute(converted(on_cpu, torch.float64))))
    for index, (got, want, peer, term) in enumerate(
        zip(_as_tuple(result), truth, same_dtype, terms, strict=True)
    ):
        budget = roundings * _ROUNDING * torch.finfo(got.dtype).eps * _row_max(want.abs())
        budget += _SUM_EPSILONS * torch.finfo(sum_dtype(dtype)).eps * _row_max(term.abs())
        if roundings > 1:
            budget += 2 * _row_max((peer.double() - want).abs())
        compare_rows(f"{this.id} output {index}", got.cpu(), want, budget)


def compare_rows(what: str, got: Tensor, want: Tensor, row_budget: Tensor) -> None:
    """Raises AssertionError unless ``|got - want|`` is within the budget of its row.

    Args:
        got: ``[rows, ...]``, any float dtype.
        want: same sizes, fp64. Infinities and NaN must stand at the same places.
        row_budget: ``[rows]``.
    """
    assert got.shape == want.shape, f"{what}: sizes {tuple(got.shape)}, not {tuple(want.shape)}"
    value = got.double()
    for name, mask in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = mask(value) != mask(want)
        assert not differs.any(), (
            f"{what}: {name} differs first at {differs.nonzero()[0].tolist()}: "
            f"got {value[differs][0].item()}, want {want[differs][0].item()}"
        )
    error = torch.where(torch.isfinite(want), (value - want).abs(), 0.0)
    excess = error - row_budget.reshape(-1, *[1] * (error.dim() - 1))
    if excess.numel() == 0 or excess.max() <= 0:
        return
    flat = int(excess.argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(flat), excess.shape)]
    raise AssertionError(
        f"{what}: worst at {at}: got {value.flatten()[flat].item()!r}, want "
        f"{want.flatten()[flat].item()!r}, error {error.flatten()[flat].item():.3e}, allowed "
        f"{row_budget[at[0]].item():.3e}"
    )


def _row_max(values: Tensor) -> Tensor:
    finite = torch.where(torch.isfinite(values), values, 0.0).flatten(1)
    return finite.amax(1) if finite.size(1) else finite.new_zeros(finite.size(0))


def _absolute(arguments: dict[str, Any]) -> dict[str, Any]:
    magnitudes = {name: _map(value, torch.abs) for name, value in arguments.items()}
    # An activation may shrink its sum to nothing, but not the rounding of the sum.
    return {name: "none" if name == "activation" else v for name, v in magnitudes.items()}


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda t: function(t) if t.is_floating_point() else t, value
    )


def _as_tuple(value: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
