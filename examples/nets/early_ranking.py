# SPDX-License-Identifier: Apache-2.0
"""Early ranking: two towers, and a small head that lets their results meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ikbo
from examples.nets.net import Inputs, Ranker, Shapes, mlp


@dataclass(frozen=True)
class Config:
    """The user's tower is far wider than the item's: tens of thousands of items are ranked."""

    k_user: int = 4096
    k_cand: int = 512
    user_layers: tuple[int, ...] = (2048, 1024)
    item_layers: tuple[int, ...] = (512,)
    tower: int = 256
    head: tuple[int, ...] = (256, 128)
    tasks: int = 2
    candidates: int = 20_000

    @property
    def user_inputs(self) -> Shapes:
        return {"features": (self.k_user,)}

    @property
    def item_inputs(self) -> Shapes:
        return {"features": (self.k_cand,)}


FULL = Config()
SMALL = Config(1024, 128, (512, 256), (128,), 64, (64, 32), candidates=2000)


class EarlyRanking(Ranker):
    """Plain PyTorch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        tower = config.tower
        self.user_tower = mlp((config.k_user, *config.user_layers, tower))
        self.item_tower = mlp((config.k_cand, *config.item_layers, tower))
        self.first = self.meeting(tower, 2 * tower, config.head[0])
        self.head = mlp((*config.head, config.tasks))

    def meeting(self, k_user: int, k_cand: int, m: int) -> nn.Module:
        """The layer in which user and candidate meet."""
        return nn.Linear(k_user + k_cand, m)

    def user_side(self, user: Inputs) -> Inputs:
        return {"tower": self.user_tower(user["features"])}

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        user, cand = side["tower"], self.item_tower(item["features"])
        hidden = self.first(torch.cat([user, cand, user * cand], dim=1))
        return self.head(torch.relu(hidden))


class EarlyRankingAdopted(EarlyRanking):
    """The same with `ikbo.nn`."""

    def meeting(self, k_user: int, k_cand: int, m: int) -> nn.Module:
        return ikbo.nn.Linear(k_user, k_cand, m, activation="relu")

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        tower, cand = self.user_tower(user["features"]), self.item_tower(item["features"])
        product = ikbo.expand(tower, cand_to_user) * cand
        return self.head(self.first(tower, torch.cat([cand, product], dim=1), cand_to_user))
