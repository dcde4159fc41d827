# SPDX-License-Identifier: Apache-2.0
"""Layers over the same features become one product (A20)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform.forms import Const, Product

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk


@dataclass(frozen=True)
class _Layer:
    """One call: its weights, and what it shares with the layers that it may be joined with."""

    shared: tuple[str, int, int, str]
    w_user: Tensor
    w_cand: Tensor
    bias: Tensor | None


class Experts:
    """Which calls of `ikbo::linear` or `ikbo::lce` read the same features with one activation.

    A walk cannot know what comes: a first one records its calls, the next ones, which make the same
    calls, do those of one group at once.

    before: ikbo::linear(u, c, W_1, V_1), ..., ikbo::linear(u, c, W_n, V_n)
    after:  ikbo::linear(u, c, cat(W), cat(V)), cut into n columns; fields of an ikbo::lce
    """

    def __init__(self) -> None:
        self._calls: list[_Layer] = []
        self._groups: dict[int, list[int]] = {}
        self._position = 0
        self._done: dict[int, Tensor] = {}
        self.is_planned = False

    def plan(self) -> bool:
        """Ends the recording; returns whether there is a group of more than one call."""
        by_key: dict[Any, list[int]] = {}
        for number, call in enumerate(self._calls):
            by_key.setdefault(call.shared, []).append(number)
        for members in by_key.values():
            if len(members) > 1:
                self._groups |= dict.fromkeys(members, members)
        self.is_planned = True
        return bool(self._groups)

    def rewind(self) -> None:
        """Starts the next walk."""
        self._position, self._done = 0, {}

    def call(
        self, walk: Walk, user: Product, cand: Product, activation: str,
        compute: Callable[[Product, Product], Tensor],
    ) -> Tensor:  # fmt: skip
        """The result of the next call; `compute` makes it of its two products."""
        number = self._position
        self._position += 1
        if not self.is_planned:
            bias = None if user.bias is None else user.bias.tensor
            shared = (user.kind, id(user.x), id(cand.x), activation)
            self._calls.append(_Layer(shared, user.weight.tensor, cand.weight.tensor, bias))
        members = self._groups.get(number)
        if members is None:
            return compute(user, cand)
        layers = [self._calls[member] for member in members]
        first = members[0]
        if number == first:
            self._done[first] = compute(*self._joined(walk, user, cand, layers))
        widths = [layer.w_user.shape[0] for layer in layers]
        place = members.index(number)
        return self._done[first].narrow(1, sum(widths[:place]), widths[place])

    @staticmethod
    def _joined(
        walk: Walk, user: Product, cand: Product, layers: list[_Layer]
    ) -> tuple[Product, Product]:
        def stacked(name: str, tensors: list[Tensor]) -> Const:
            return walk.fold(lambda: torch.cat(tensors), f"{name}_and_more")

        biases = [
            layer.w_user.new_zeros(layer.w_user.shape[0]) if layer.bias is None else layer.bias
            for layer in layers
        ]
        has_bias = any(layer.bias is not None for layer in layers)
        bias = stacked("bias", biases) if has_bias else None
        w_user = stacked(user.weight.name, [layer.w_user for layer in layers])
        w_cand = stacked(cand.weight.name, [layer.w_cand for layer in layers])
        return (
            Product(user.kind, user.x, w_user, bias, user.origin),
            Product(cand.kind, cand.x, w_cand, None, cand.origin),
        )
