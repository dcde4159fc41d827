# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on weights, done ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ikbo.transform.forms import Const


class Constants:
    """Constant arithmetic, done once: the first walk computes, later walks read the same results.

    A walk is deterministic, so the n-th constant of one walk is the n-th of every other. Only what
    `use` hands out is stored (as `tensors`); intermediate results are not.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._folded: list[Any] = []
        # By the id of a tensor, which is kept: an id is only its own while it lives.
        self._names: dict[int, tuple[str, Tensor]] = {}
        self._position = 0

    def rewind(self) -> None:
        """Starts the next walk."""
        self._position = 0

    def fold(self, compute: Callable[[], Any]) -> Any:
        if self._position == len(self._folded):
            with torch.no_grad():
                self._folded.append(compute())
        self._position += 1
        return self._folded[self._position - 1]

    def name(self, const: Const) -> str:
        """The name of a constant that stays in the graph."""
        name, _ = self._names.get(id(const.tensor), (None, None))
        if name is None:
            name, count = const.name, 1
            while name in self.tensors:
                name, count = f"{const.name}_{count}", count + 1
            tensor = const.tensor.detach().contiguous()
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor = tensor.clone()
            self._names[id(const.tensor)] = (name, const.tensor)
            self.tensors[name] = tensor
        return name
