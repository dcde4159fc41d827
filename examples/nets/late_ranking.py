# SPDX-License-Identifier: Apache-2.0
"""Late ranking: LCE, target attention over an encoded history, dot interaction, experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import ikbo
from examples.nets.net import Inputs, Ranker, Shapes, fields_first


@dataclass(frozen=True)
class Config:
    """Embeddings of width `width`; the history has `events` of them.

    `queries` of the `mixed` rows that the first LCE makes attend to the history; the second LCE
    makes `second` rows of what there is then. Both kinds of rows meet in dot products.
    """

    k_user: int = 1176
    k_cand: int = 872
    width: int = 256
    events: int = 512
    heads: int = 2
    mixed: int = 433
    queries: int = 64
    second: int = 64
    summaries: int = 16
    profile: int = 512
    experts: int = 3
    expert: tuple[int, int] = (1024, 512)
    tasks: int = 4
    candidates: int = 1050

    @property
    def user_inputs(self) -> Shapes:
        return {"fields": (self.k_user, self.width), "history": (self.events, self.width)}

    @property
    def item_inputs(self) -> Shapes:
        return {"fields": (self.k_cand, self.width)}

    @property
    def dots(self) -> int:
        rows = self.queries + self.second
        return rows * (rows - 1) // 2


FULL = Config()
SMALL = Config(
    k_user=294, k_cand=218, width=64, events=192, mixed=108, queries=16, second=16, summaries=4,
    profile=64, expert=(128, 64), candidates=140,
)  # fmt: skip


def heads_first(x: Tensor, heads: int) -> Tensor:
    """`[B, S, W]` to `[B, H, S, D]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head attention; the names of the layers are those of `ikbo.nn.TargetAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query [B, Q, W]` is not projected yet, `key` and `value` `[B, S, W]` are."""
        parts = (heads_first(x, self.heads) for x in (self.q_proj(query), key, value))
        out = functional.scaled_dot_product_attention(*parts)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """One pre-norm transformer layer over the history."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention.attend(y, self.attention.k_proj(y), self.attention.v_proj(y))
        return x + self.ffn(x)


class LateRanking(Ranker):
    """Plain PyTorch."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        k = c.profile + c.dots
        self.encoder = EncoderLayer(c.width, c.heads)
        self.summarise = nn.Linear(c.events, c.summaries)
        self.profile = nn.Linear(c.summaries * c.width, c.profile)
        self.attention: nn.Module = Attention(c.width, c.heads)
        self.compress: nn.Module = nn.Linear(c.k_user + c.k_cand, c.mixed)
        self.compress_again: nn.Module = nn.Linear(c.summaries + c.mixed + c.queries, c.second)
        self.norm = nn.LayerNorm(c.width)
        # The first layers of all experts, and the gates of all tasks, are one layer each.
        self.expert_first: nn.Module = nn.Linear(k, c.experts * c.expert[0])
        self.gates: nn.Module = nn.Linear(k, c.tasks * c.experts)
        self.expert_second = nn.Parameter(torch.empty(c.experts, *c.expert))
        self.tower = nn.Parameter(torch.empty(c.tasks, c.expert[1]))
        for weight in (self.expert_second, self.tower):
            nn.init.xavier_uniform_(weight)
        places = torch.triu_indices(c.queries + c.second, c.queries + c.second, 1)
        self.register_buffer("rows", places[0], persistent=False)
        self.register_buffer("columns", places[1], persistent=False)

    def encoded(self, user: Inputs) -> Inputs:
        """The history once encoded, its summaries, the dense profile."""
        history = self.encoder(user["history"])
        summaries = fields_first(self.summarise, history)
        profile = torch.relu(self.profile(summaries.flatten(1)))
        return {"history": history, "summaries": summaries, "profile": profile}

    def user_side(self, user: Inputs) -> Inputs:
        side = self.encoded(user)
        history = side.pop("history")
        key, value = self.attention.k_proj(history), self.attention.v_proj(history)
        return {"fields": user["fields"], "key": key, "value": value, **side}

    def interact(self, side: Inputs, item: Inputs) -> Tensor:
        fields = torch.cat([side["fields"], item["fields"]], dim=1)
        mixed = fields_first(self.compress, fields)
        seen = self.attention.attend(mixed[:, : self.config.queries], side["key"], side["value"])
        rows = torch.cat([side["summaries"], mixed, seen], dim=1)
        dots = self.dot_products(seen, fields_first(self.compress_again, rows))
        x = torch.cat([side["profile"], dots], dim=1)
        return self.top(torch.relu(self.expert_first(x)), self.gates(x))

    def dot_products(self, seen: Tensor, second: Tensor) -> Tensor:
        """Of each pair of rows, `[B, dots]`."""
        x = self.norm(torch.cat([seen, second], dim=1))
        pairs = torch.bmm(x, x.transpose(1, 2))[:, self.rows, self.columns]
        return pairs * self.config.width**-0.5

    def top(self, hidden: Tensor, gates: Tensor) -> Tensor:
        """Logits `[B, tasks]` of the experts' first layers and the gates."""
        c = self.config
        hidden = hidden.unflatten(1, (c.experts, c.expert[0])).transpose(0, 1)
        experts = torch.relu(torch.bmm(hidden, self.expert_second)).transpose(0, 1)
        shares = gates.unflatten(1, (c.tasks, c.experts)).softmax(dim=2)
        return (torch.bmm(shares, experts) * self.tower).sum(dim=2)


class LateRankingAdopted(LateRanking):
    """The same with `ikbo.nn`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        c, k_cand = config, config.mixed + config.queries
        self.attention = ikbo.nn.TargetAttention(c.width, c.heads)
        self.compress = ikbo.nn.LinearCompression(c.k_user, c.k_cand, c.mixed)
        self.compress_again = ikbo.nn.LinearCompression(c.summaries, k_cand, c.second)
        self.expert_first = ikbo.nn.Linear(
            c.profile, c.dots, c.experts * c.expert[0], activation="relu"
        )
        self.gates = ikbo.nn.Linear(c.profile, c.dots, c.tasks * c.experts)

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        side = self.encoded(user)
        mixed = self.compress(user["fields"], item["fields"], cand_to_user)
        seen = self.attention(mixed[:, : self.config.queries], side["history"], cand_to_user)
        second = self.compress_again(side["summaries"], [mixed, seen], cand_to_user)
        x = side["profile"], self.dot_products(seen, second), cand_to_user
        return self.top(self.expert_first(*x), self.gates(*x))


class LateRankingPieces(LateRanking):
    """The same decomposed by hand, of PyTorch's operators alone: a layer over both sides is two
    products and a sum, and the candidates of a user are one long query. They must be neighbours,
    as many for each user."""

    def forward(self, user: Inputs, item: Inputs, cand_to_user: Tensor) -> Tensor:
        c, side = self.config, self.user_side(user)

        def decomposed(layer: nn.Module, x_user: Tensor, x_cand: Tensor) -> Tensor:
            w_user, w_cand = layer.weight.split([x_user.shape[1], x_cand.shape[1]], dim=1)
            if x_cand.dim() == 2:
                at_users = functional.linear(x_user, w_user, layer.bias)
                return at_users[cand_to_user] + functional.linear(x_cand, w_cand)
            at_users = torch.bmm(w_user.expand(len(x_user), -1, -1), x_user) + layer.bias[:, None]
            return at_users[cand_to_user] + torch.bmm(w_cand.expand(len(x_cand), -1, -1), x_cand)

        mixed = decomposed(self.compress, side["fields"], item["fields"])
        queries = mixed[:, : c.queries].reshape(len(side["key"]), -1, c.width)
        seen = self.attention.attend(queries, side["key"], side["value"])
        seen = seen.reshape(-1, c.queries, c.width)
        rows = torch.cat([mixed, seen], dim=1)
        second = decomposed(self.compress_again, side["summaries"], rows)
        dots = self.dot_products(seen, second)
        hidden = torch.relu(decomposed(self.expert_first, side["profile"], dots))
        return self.top(hidden, decomposed(self.gates, side["profile"], dots))
