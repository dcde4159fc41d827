# SPDX-License-Identifier: Apache-2.0
"""A ranker of the size of a language model: a causal encoder over history and candidate.

The candidate is the last token. It sees the history and itself; the history does not see it, so
that the user's tokens are the same for every candidate at every depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import ikbo
from examples.nets.net import Inputs, Ranker, Shapes


@dataclass(frozen=True)
class Config:
    """`events` tokens of history and one of the candidate, all of width `width`."""

    width: int = 1024
    layers: int = 8
    heads: int = 8
    events: int = 512
    features: int = 256
    tasks: int = 3
    candidates: int = 500

    @property
    def user_inputs(self) -> Shapes:
        return {"history": (self.events, self.features)}

    @property
    def item_inputs(self) -> Shapes:
        return {"features": (self.features,)}


FULL = Config()
SMALL = Config(width=64, layers=4, heads=2, events=64, features=32, candidates=140)

Keys = tuple[Tensor, Tensor]


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values `[B, S, H, D]`."""
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)) for part in parts]

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer behind its attention, whose result is `[B, S, H, D]`."""
        x = x + self.out(attended.flatten(2))
        return x + self.ffn(self.ffn_norm(x))


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=is_causal).transpose(1, 2)


class LlmScale(Ranker):
    """Plain PyTorch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.event, self.item = nn.Linear(c.features, c.width), nn.Linear(c.features, c.width)
        self.position = nn.Parameter(torch.randn(c.events + 1, c.width) / 50)
        self.blocks = nn.ModuleList(Block(c.width, c.heads) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)
        self.head = nn.Linear(c.width, c.tasks)

    def forward(self, user: Inputs, item: Inputs) -> Tensor:
        tokens = [self.event(user["history"]), self.item(item["features"]).unsqueeze(1)]
        x = torch.cat(tokens, dim=1) + self.position
        for block in self.blocks:
            x = block.rest(x, attend(*block.projected(x), is_causal=True))
        return self.head(self.norm(x[:, -1]))

    def of_user(self, user: Inputs) -> list[Keys]:
        """Each layer's keys and values `[U, S, H, D]` of the history."""
        x = self.event(user["history"]) + self.position[:-1]
        keys = []
        for block in self.blocks:
            q, k, v = block.projected(x)
            keys.append((k, v))
            if len(keys) < len(self.blocks):
                x = block.rest(x, attend(q, k, v, is_causal=True))
        return keys

    def token(self, item: Inputs) -> Tensor:
        """The candidate's, `[B, 1, width]`."""
        return (self.item(item["features"]) + self.position[-1]).unsqueeze(1)

    def user_side(self, user: Inputs) -> Inputs:
        keys = self.of_user(user)
        side = {f"key_{number}": k for number, (k, _) in enumerate(keys)}
        return side | {f"value_{number}": v for number, (_, v) in enumerate(keys)}

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        x = self.token(item)
        for number, block in enumerate(self.blocks):
            q, k, v = block.projected(x)
            keys = torch.cat([side[f"key_{number}"], k], dim=1)
            values = torch.cat([side[f"value_{number}"], v], dim=1)
            x = block.rest(x, attend(q, keys, values))
        return self.head(self.norm(x[:, 0]))


class LlmScaleAdopted(LlmScale):
    """The same with `ikbo.target_attention`; the candidate's own key joins by its exponential."""

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        x = self.token(item)
        for block, (key, value) in zip(self.blocks, self.of_user(user), strict=True):
            q, k, v = block.projected(x)
            seen, lse = ikbo.target_attention(q, key, value, cand_to_user)
            own = (q * k).sum(3).to(lse.dtype) * q.shape[3] ** -0.5
            share = torch.sigmoid(own - lse.transpose(1, 2)).unsqueeze(3).to(q.dtype)
            x = block.rest(x, seen + share * (v - seen))
        return self.head(self.norm(x[:, 0]))
