# SPDX-License-Identifier: Apache-2.0
"""Small ranking models in plain PyTorch, each with inputs and the names of its user inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 16
S = 6  # history length
D = 8


@dataclass(frozen=True)
class Ranker:
    """A model in eval mode, its example inputs (one batch), and its request-only inputs."""

    model: nn.Module
    inputs: Any
    users: tuple[str, ...]


MODELS: dict[str, Callable[[], Ranker]] = {}


def model(make: Callable[[], Ranker]) -> Callable[[], Ranker]:
    def seeded() -> Ranker:
        torch.manual_seed(7)
        ranker = make()
        for module in ranker.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias)
        return Ranker(ranker.model.eval(), ranker.inputs, ranker.users)

    MODELS[make.__name__] = seeded
    return seeded


def rows(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape)


def padding() -> Tensor:
    """Which of S events are there; at least one for each user."""
    return torch.arange(S) < torch.randint(1, S + 1, (ROWS, 1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.last = nn.Linear(12, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.last(functional.relu(self.first(torch.cat([user, item], dim=-1)))).squeeze(-1)


@model
def mlp() -> Ranker:
    return Ranker(Mlp(), (rows(6), rows(4)), ("user",))


class Lce(nn.Module):
    """Embeddings of both sides, compressed along the field axis in five spellings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, D)
        self.compress = nn.Linear(5, 3)
        self.conv = nn.Conv1d(5, 3, 1)
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.out = nn.Linear(4 * 3 * D, 1)

    def forward(self, user_ids: Tensor, item_ids: Tensor) -> Tensor:
        fields = [self.table(user_ids), self.table(item_ids)]
        x = torch.cat(fields, dim=1)
        mixed = [
            self.compress(x.transpose(1, 2)).transpose(1, 2),
            self.conv(x),
            self.weight @ x,
            torch.einsum("mk,bkn->bmn", self.weight, x),
        ]
        return self.out(torch.cat(mixed, dim=1).flatten(1)).squeeze(-1)


@model
def lce() -> Ranker:
    ids = torch.arange(ROWS)[:, None]
    return Ranker(
        Lce(), ((ids + torch.arange(3)) % 20, (3 * ids + torch.arange(2)) % 20), ("user_ids",)
    )


class Norms(nn.Module):
    """BatchNorm before and after split linear layers; constant gates."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(10)
        self.first = nn.Linear(10, 8)
        self.after = nn.BatchNorm1d(8)
        self.gate = nn.Parameter(torch.rand(10) + 0.5)
        self.second = nn.Linear(10, 8)

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([user, item], dim=-1)
        a = torch.sigmoid(self.after(self.first(self.before(x))))
        b = functional.gelu(self.second((x - 0.5) * self.gate / 1.7 + 0.25))
        return a, b


@model
def norms() -> Ranker:
    return Ranker(Norms(), (rows(6), rows(4)), ("user",))


class Attention(nn.Module):
    """Target attention and self-attention over a padded history."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.1, batch_first=True)
        self.target = nn.MultiheadAttention(D, 2, batch_first=True)
        self.query = nn.Linear(D, D)
        self.out = nn.Linear(3 * D, 1)

    def forward(self, history: Tensor, mask: Tensor, item: Tensor) -> Tensor:
        events = self.encoder(history, src_key_padding_mask=~mask)
        q = item[:, None]
        a, _ = self.target(q, events, events, key_padding_mask=~mask, need_weights=False)
        q = self.query(q).view(-1, 1, 2, D // 2).transpose(1, 2)
        k = events.view(-1, S, 2, D // 2).transpose(1, 2)
        b = functional.scaled_dot_product_attention(q, k, k, attn_mask=mask[:, None, None, :])
        return self.out(torch.cat([a[:, 0], b.transpose(1, 2).flatten(1), item], dim=1)).squeeze(-1)


@model
def attention() -> Ranker:
    return Ranker(Attention(), (rows(S, D), padding(), rows(D)), ("history", "mask"))


class Cross(nn.Module):
    """Low-rank crosses over user and item fields."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(10, 3, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(3, 10) for _ in range(2))
        self.out = nn.Linear(10, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x0 = x = torch.cat([user, item], dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            x = x0 * up(down(x)) + x
        return self.out(x)[:, 0]


@model
def cross() -> Ranker:
    return Ranker(Cross(), {"user": rows(6), "item": rows(4)}, ("user",))


class Tokens(nn.Module):
    """User and item tokens in one sequence, and features side by side in each token."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, D))
        self.norm = nn.LayerNorm(D)
        self.value = nn.Linear(D, D)
        self.wide = nn.Linear(2 * D, 5)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        user, item = batch["user"]["tokens"], batch["item"][0]
        start = self.start.expand(item.size(0), -1, -1)
        sequence = self.norm(torch.cat([start, user, item], dim=1))
        values = functional.silu(self.value(sequence))
        wide = self.wide(torch.cat([user, item], dim=-1))
        return {"pooled": values.mean(dim=1), "wide": wide, "user": user.sum(dim=(1, 2))}


@model
def tokens() -> Ranker:
    batch = {"user": {"tokens": rows(3, D)}, "item": [rows(3, D)]}
    return Ranker(Tokens(), (batch,), ("user",))


class Gates(nn.Module):
    """Products, sums, pools and look-ups of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, D, mode="sum")
        self.user = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(0.3))
        self.item = nn.Linear(D, D)
        self.gru = nn.GRU(D, D, batch_first=True)

    def forward(self, ids: Tensor, history: Tensor, mask: Tensor, item: Tensor) -> Tensor:
        user = self.user(self.bag(ids))
        gate = torch.sigmoid(user) * self.item(item)
        scores = (item[:, None] @ history.transpose(1, 2)).squeeze(1)
        scores = scores + torch.where(mask, 0.0, float("-inf"))
        pooled = (functional.softmax(scores, dim=-1)[:, None] @ history).squeeze(1)
        last = self.gru(history)[0][:, -1]
        mixed = user + self.item(item) + last
        place = torch.zeros_like(user).masked_fill(mask[:, :1], 1.0)
        flat = history.reshape(-1, D).tanh().view(item.shape[0], -1)
        both = torch.stack([user, gate, pooled, last, mixed, place], dim=1)
        first, second = both.chunk(2, dim=1)
        parts = torch.unbind(torch.cat([flat[:, :D, None], gate[:, :, None]], dim=2), dim=2)
        return (
            (first * second).sum((1, 2)) + parts[0].sum(-1) + parts[1].sum(-1) + both[:, 3].sum(-1)
        )


@model
def gates() -> Ranker:
    ids = (torch.arange(ROWS)[:, None] + torch.arange(3)) % 20
    return Ranker(Gates(), (ids, rows(S, D), padding(), rows(D)), ("ids", "history", "mask"))


class UserOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(user), item * 2


@model
def user_only() -> Ranker:
    return Ranker(UserOnly(), (rows(6), rows(4)), ("user",))


class Coupled(nn.Module):
    """Rows of the batch meet each other: exact only on replicated rows."""

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, ...]:
        order = torch.arange(item.size(0), device=item.device)
        return (
            functional.softmax(user, dim=0) + item.mean(0),
            torch.cumsum(user, dim=0) * order[:, None],
            item - user.mean(dim=0, keepdim=True),
            user @ item.transpose(0, 1) @ item,
        )


@model
def coupled() -> Ranker:
    return Ranker(Coupled(), (rows(4), rows(4)), ("user",))
