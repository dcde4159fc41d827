# SPDX-License-Identifier: Apache-2.0
"""Why a transformed module cannot be called with some inputs, in words of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

_WHERE = "ikbo: a transformed module:"
_LETTERS = {"user": "U", "candidate": "B", "index": "B"}


def check_call(
    program: ExportedProgram,
    roles: Mapping[str, str],
    limits: Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Refuses inputs that the program does not take.

    Args:
        program, roles: of the transformed module; of one with more levels the letter of the batch
            stands for the role.
        limits: the largest "U" and "B", or of each letter.
        args, kwargs: of the call.

    Errors:
        TypeError, ValueError: an input is not as the example inputs were. Without one it returns:
        the call fails for another reason, or it does not.
    """
    example_args, example_kwargs = program.example_inputs
    if len(args) != len(example_args) or set(kwargs) != set(example_kwargs):
        raise TypeError(
            f"{_WHERE} must be called as its example inputs were given, with "
            f"{_call_text(example_args, example_kwargs)}; got {_call_text(args, kwargs)}"
        ) from None
    ordered = {name: kwargs[name] for name in example_kwargs}
    leaves, structure = pytree.tree_flatten((args, ordered))
    examples, expected = pytree.tree_flatten((tuple(example_args), dict(example_kwargs)))
    if structure != expected:
        raise TypeError(
            f"{_WHERE} inputs must have the structure {expected}; got {structure}"
        ) from None
    tensors = [pair for pair in zip(leaves, examples, strict=True) if isinstance(pair[1], Tensor)]
    batches: dict[str, tuple[str, int]] = {}
    for (name, role), (value, example) in zip(roles.items(), tensors, strict=True):
        letter = _LETTERS.get(role, role)
        _check_tensor(name, letter, value, example)
        first, size = batches.setdefault(letter, (name, value.shape[0]))
        if value.shape[0] != size:
            raise ValueError(
                f"{_WHERE} {name} must have {letter} = {size} rows, as {first}; got "
                f"{value.shape[0]}"
            ) from None
        if size > limits[letter]:
            raise ValueError(
                f"{_WHERE} {name} must have at most {letter} = {limits[letter]} rows, for which "
                f"it was transformed; got {size}"
            ) from None


def _check_tensor(name: str, letter: str, value: Any, example: Tensor) -> None:
    if not isinstance(value, Tensor):
        fix = "; pass its cand_to_user" if hasattr(value, "cand_to_user") else ""
        raise TypeError(
            f"{_WHERE} {name} must be a torch.Tensor; got {type(value).__name__}{fix}"
        ) from None
    for what, wanted, got in (
        ("dtype", example.dtype, value.dtype),
        ("device", example.device, value.device),
    ):
        if wanted != got:
            raise ValueError(
                f"{_WHERE} {name} must have {what} {wanted}, as the example input; got {got}"
            ) from None
    sizes = [letter, *map(str, example.shape[1:])]
    if value.dim() != example.dim() or value.shape[1:] != example.shape[1:]:
        raise ValueError(
            f"{_WHERE} {name} must have sizes [{', '.join(sizes)}]; got {list(value.shape)}"
        ) from None


def _call_text(args: Any, kwargs: Any) -> str:
    """ "2 positional arguments and cand_to_user=" """
    keywords = ", ".join(f"{name}=" for name in kwargs)
    count = f"{len(args)} positional argument{'s' * (len(args) != 1)}"
    return " and ".join(part for part in (count * bool(args), keywords) if part) or "no argument"
