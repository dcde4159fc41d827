# SPDX-License-Identifier: Apache-2.0
"""Wukong (arXiv 2403.02545): layers of factorisation machines and linear compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ikbo
from examples.nets.net import Inputs, Ranker, Shapes, fields_first, mlp


@dataclass(frozen=True)
class Config:
    """Embeddings of width `width`; a layer makes `fm` rows by its factorisation machine, of rank
    `rank` behind an MLP, and `lcb` rows by linear compression.
    """

    k_user: int = 768
    k_cand: int = 128
    width: int = 128
    layers: int = 4
    fm: int = 64
    lcb: int = 64
    rank: int = 24
    hidden: int = 512
    head: tuple[int, ...] = (1024, 256)
    candidates: int = 2000

    @property
    def user_inputs(self) -> Shapes:
        return {"fields": (self.k_user, self.width)}

    @property
    def item_inputs(self) -> Shapes:
        return {"fields": (self.k_cand, self.width)}


FULL = Config()
SMALL = Config(192, 32, 32, 4, 16, 16, 8, 64, (64, 32), candidates=1000)


class Layer(nn.Module):
    """`norm([MLP(norm(X X^T Y)); W X] + residual(X))` of rows X."""

    def __init__(self, k: int, config: Config) -> None:
        super().__init__()
        c, m = config, config.fm + config.lcb
        self.fields = nn.Linear(k, c.rank, bias=False)
        self.norm = nn.LayerNorm(k * c.rank)
        self.mlp = mlp((k * c.rank, c.hidden, c.fm * c.width))
        self.compress = nn.Linear(k, c.lcb)
        self.residual = nn.Identity() if k == m else nn.Linear(k, m, bias=False)
        self.out_norm = nn.LayerNorm(c.width)

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, self.fields(x.transpose(1, 2)))
        compressed = fields_first(self.compress, x)
        return self.joined(products, compressed, fields_first(self.residual, x))

    def joined(self, products: Tensor, compressed: Tensor, residual: Tensor) -> Tensor:
        fm = self.mlp(self.norm(products.flatten(1))).unflatten(1, (-1, compressed.shape[2]))
        return self.out_norm(torch.cat([fm, compressed], dim=1) + residual)


class Wukong(Ranker):
    """Plain PyTorch. The user has nothing of its own but its rows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m = config.fm + config.lcb
        self.layers = nn.ModuleList([self.first(config)])
        self.layers.extend(Layer(m, config) for _ in range(config.layers - 1))
        self.head = mlp((m * config.width, *config.head, 1))

    def first(self, config: Config) -> nn.Module:
        """The layer in which user and candidate meet."""
        return Layer(config.k_user + config.k_cand, config)

    def user_side(self, user: Inputs) -> Inputs:
        return user

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        x = torch.cat([side["fields"], item["fields"]], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))


class FirstLayer(Layer):
    """`Layer` over rows of both sides; its three layers over the fields are one, read once."""

    def __init__(self, config: Config) -> None:
        c = config
        super().__init__(c.k_user + c.k_cand, c)
        self.parts = [c.rank, c.lcb, c.fm + c.lcb]
        del self.fields, self.compress, self.residual
        self.rows = ikbo.nn.LinearCompression(c.k_user, c.k_cand, sum(self.parts))
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Makes the weights of a plain `Layer` those of the one layer."""
        names = [f"{prefix}{name}." for name in ("fields", "compress", "residual")]
        weights = [state.pop(f"{name}weight") for name in names]
        biases = [
            state.pop(f"{name}bias", w.new_zeros(len(w)))
            for name, w in zip(names, weights, strict=True)
        ]
        state |= {
            f"{prefix}rows.weight": torch.cat(weights),
            f"{prefix}rows.bias": torch.cat(biases),
        }

    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
        rows = self.rows(x_user, x_cand, cand_to_user)
        summed, compressed, residual = rows.split(self.parts, dim=1)
        summed = summed.transpose(1, 2)
        products = [ikbo.bmm(x_user, summed, cand_to_user), torch.bmm(x_cand, summed)]
        return self.joined(torch.cat(products, dim=1), compressed, residual)


class WukongAdopted(Wukong):
    """The same with `ikbo.nn`."""

    def first(self, config: Config) -> nn.Module:
        return FirstLayer(config)

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        first, *others = self.layers
        x = first(user["fields"], item["fields"], cand_to_user)
        for layer in others:
            x = layer(x)
        return self.head(x.flatten(1))
