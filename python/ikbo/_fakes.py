# SPDX-License-Identifier: Apache-2.0
"""What the fakes of all operators share: the checks that a trace can make without data."""

from typing import TypeAlias

import torch
from torch import Tensor

Size: TypeAlias = int | torch.SymInt


def sizes_by_letter(op: str, **arguments: tuple[Tensor | None, str]) -> dict[str, Size]:
    """The size of each glossary letter, from tensors given with their layouts (``"U K_user"``).

    Errors:
        RuntimeError: a wrong rank or device, or two sizes for one letter; the text is as the
        operator's own.
    """
    sizes: dict[str, Size] = {}
    device = None
    for name, (tensor, layout) in arguments.items():
        if tensor is None:
            continue
        letters = layout.split()
        device = device or tensor.device
        if tensor.device != device:
            raise RuntimeError(
                f"ikbo::{op}: {name} must be on {device} with the other tensors; "
                f"got {tensor.device}"
            )
        if tensor.dim() != len(letters):
            raise RuntimeError(
                f"ikbo::{op}: {name} must have rank {len(letters)}, [{', '.join(letters)}]; "
                f"got rank {tensor.dim()}"
            )
        for letter, size in zip(letters, tensor.shape, strict=True):
            expected = sizes.setdefault(letter, size)
            torch._check(
                size == expected,
                lambda name=name, letter=letter, expected=expected, size=size: (
                    f"ikbo::{op}: {name} must have {letter} = {expected}; got {size}"
                ),
            )
    return sizes
