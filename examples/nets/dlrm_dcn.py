# SPDX-License-Identifier: Apache-2.0
"""DLRM with a low-rank cross network, in the sizes of MLPerf's DLRM-DCNv2 benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import ikbo
from examples.nets.net import Inputs, Ranker, Shapes, mlp


@dataclass(frozen=True)
class Config:
    """26 pooled embeddings, of which 20 are the user's; the dense features are the user's too."""

    dense: int = 13
    user_fields: int = 20
    item_fields: int = 6
    width: int = 128
    bottom: tuple[int, ...] = (512, 256)
    cross_layers: int = 3
    cross_rank: int = 512
    over: tuple[int, ...] = (1024, 1024, 512, 256)
    candidates: int = 8000

    @property
    def user_inputs(self) -> Shapes:
        return {"dense": (self.dense,), "fields": (self.user_fields, self.width)}

    @property
    def item_inputs(self) -> Shapes:
        return {"fields": (self.item_fields, self.width)}

    @property
    def k_user(self) -> int:
        return (1 + self.user_fields) * self.width

    @property
    def k_cand(self) -> int:
        return self.item_fields * self.width


FULL = Config()
SMALL = Config(
    width=32, bottom=(128, 64), cross_rank=128, over=(256, 256, 128, 64), candidates=2000
)


class CrossLayer(nn.Module):
    """`x0 * (U V x + b) + x`."""

    def __init__(self, width: int, rank: int, down: nn.Module | None = None) -> None:
        super().__init__()
        self.down = down or nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(self.down(x)) + x


class DlrmDcn(Ranker):
    """Plain PyTorch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        k = config.k_user + config.k_cand
        self.bottom = nn.Sequential(mlp((config.dense, *config.bottom, config.width)), nn.ReLU())
        self.cross = nn.ModuleList(
            CrossLayer(k, config.cross_rank, None if number else self.first_down(config))
            for number in range(config.cross_layers)
        )
        self.over = mlp((k, *config.over, 1))

    def first_down(self, config: Config) -> nn.Module:
        """The first product over user and candidate."""
        return nn.Linear(config.k_user + config.k_cand, config.cross_rank, bias=False)

    def user_side(self, user: Inputs) -> Inputs:
        dense = self.bottom(user["dense"])
        return {"x": torch.cat([dense, user["fields"].flatten(1)], dim=1)}

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        x0 = x = torch.cat([side["x"], item["fields"].flatten(1)], dim=1)
        for layer in self.cross:
            x = layer(x0, x)
        return self.over(x)


class DlrmDcnAdopted(DlrmDcn):
    """The same with `ikbo.nn`; behind the first product every value is the candidate's."""

    def first_down(self, config: Config) -> nn.Module:
        return ikbo.nn.Linear(config.k_user, config.k_cand, config.cross_rank, bias=False)

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        x_user, x_cand = self.user_side(user)["x"], item["fields"].flatten(1)
        x0 = torch.cat([ikbo.expand(x_user, cand_to_user), x_cand], dim=1)
        first, *others = self.cross
        x = x0 * first.up(first.down(x_user, x_cand, cand_to_user)) + x0
        for layer in others:
            x = layer(x0, x)
        return self.over(x)
