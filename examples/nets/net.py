# SPDX-License-Identifier: Apache-2.0
"""What the nets share: their interface, and the two forms in which they are served today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


class Config(Protocol):
    """Sizes of a net. Inputs are pooled embeddings and dense features, all of one float type."""

    @property
    def candidates(self) -> int:
        """Candidates in a run, of all users together."""

    @property
    def user_inputs(self) -> Shapes:
        """Name to the shape of one user's row."""

    @property
    def item_inputs(self) -> Shapes:
        """Name to the shape of one candidate's row."""


class Ranker(nn.Module):
    """A plain net: one row is one candidate beside its user's data.

    `user_side` is all that reads the user alone, `interact` the rest: teams that split their nets
    by hand cut there.
    """

    def user_side(self, user: Inputs) -> Inputs:
        """What the interactions read of the user, the batch in dimension 0 of each."""
        raise NotImplementedError

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        """Logits `[B, tasks]`."""
        raise NotImplementedError

    def forward(self, user: Inputs, item: Inputs) -> Tensor:
        """Logits `[B, tasks]` of B rows of user and item data."""
        return self.interact(self.user_side(user), item)


class Replicated(nn.Module):
    """A plain net that takes users once: their inputs are repeated for the candidates inside."""

    def __init__(self, net: Ranker) -> None:
        super().__init__()
        self.net = net

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        return self.net(repeated(user, cand_to_user), item)


class Split(nn.Module):
    """A plain net split by hand: the user side once per user, its results repeated."""

    def __init__(self, net: Ranker) -> None:
        super().__init__()
        self.net = net

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        return self.net.interact(repeated(self.net.user_side(user), cand_to_user), item)


def repeated(x: Inputs, cand_to_user: Tensor) -> Inputs:
    return {name: rows.index_select(0, cand_to_user) for name, rows in x.items()}


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for k, m in pairwise(widths):
        layers += [nn.Linear(k, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fields_first(linear: nn.Module, fields: Tensor) -> Tensor:
    """A linear layer over the field axis: `[B, K, N]` to `[B, M, N]`."""
    return linear(fields.transpose(1, 2)).transpose(1, 2)


def make_inputs(
    config: Config,
    num_users: int,
    num_candidates: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Inputs, Inputs]:
    """Random user and candidate rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shapes: Shapes, rows: int) -> Inputs:
        return {
            name: torch.randn(rows, *row, generator=generator, device=device, dtype=dtype)
            for name, row in shapes.items()
        }

    return draw(config.user_inputs, num_users), draw(config.item_inputs, num_candidates)
