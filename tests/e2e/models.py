# SPDX-License-Identifier: Apache-2.0
"""Models for the package tests. `tanh` and `erf` stand in user-only arithmetic alone, `sin` in
candidates' arithmetic: they mark where generated code computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ikbo

ROWS = 24
HISTORY = 12
WIDTH = 32
HEADS = 2


class HistoryRanker(nn.Module):
    """Plain PyTorch: target attention over the user's history, then layers that mix both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(50, WIDTH)
        self.items = nn.Embedding(200, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.deep = nn.Linear(3 * WIDTH + 4, 64)
        self.score = nn.Linear(64, 2)

    def forward(
        self,
        user_id: Tensor,
        history: Tensor,
        history_length: Tensor,
        item_id: Tensor,
        price: Tensor,
    ) -> dict[str, Tensor]:
        user = self.users(user_id)
        gate = torch.erf(torch.tanh(user) * 1.5)
        events = self.norm(torch.erf(self.items(history)))
        item = self.items(item_id) * gate
        query, key, value = (
            x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for x in (item[:, None], self.key(events), self.value(events))
        )
        positions = torch.arange(HISTORY, device=history.device)
        mask = (positions < history_length[:, None])[:, None, None]
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        seen = seen.transpose(1, 2).flatten(1)
        mixed = torch.cat([user, seen, item, torch.sin(price)], dim=-1)
        click, like = self.score(torch.relu(self.deep(mixed))).unbind(-1)
        return {"click": torch.sigmoid(click), "like": torch.sigmoid(like)}


def history_ranker() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its inputs as an author writes them: one batch, user rows beside each item."""
    torch.manual_seed(3)
    inputs = {
        "user_id": torch.arange(ROWS),
        "history": torch.randint(200, (ROWS, HISTORY)),
        "history_length": torch.randint(1, HISTORY + 1, (ROWS,)),
        "item_id": torch.randint(200, (ROWS,)),
        "price": torch.rand(ROWS, 4),
    }
    return HistoryRanker().eval(), inputs


@dataclass(frozen=True)
class Recipe:
    """What `ikbo.package` needs of a plain module."""

    module: nn.Module
    inputs: Any
    roles: Mapping[str, str]
    max_users: int
    max_candidates: int


class HandWritten(nn.Module):
    """Written for two batches, with nested inputs and awkward outputs.

    Its weights are views of one flat buffer, as a sharded or fused table has them.
    """

    def __init__(self, broadcast: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.broadcast = broadcast
        flat = torch.randn(200_000) / 6
        self.w_user = nn.Parameter(flat[: WIDTH * 8].view(WIDTH, 8), False)
        self.w_cand = nn.Parameter(flat[1000 : 1000 + WIDTH * 6].view(WIDTH, 6), False)
        self.register_buffer("exact", torch.randn(4, 8, dtype=torch.float64))
        self.register_buffer("exact_packed", ikbo.prepack(self.exact[:, :6], [6]))
        self.register_buffer("w_fields", torch.randn(5, 7))

    def forward(
        self, user: dict[str, Tensor], item: tuple[Tensor, Tensor], cand_to_user: Tensor
    ) -> dict[str, Any]:
        age, premium = user["age"], user["premium"]
        gate = torch.tanh(age) * 1.5 + torch.erf(age) * premium[:, None]
        x_user = nn.functional.layer_norm(torch.tanh(age), (8,))
        x_cand = torch.sin(item[0]) + item[1][:, None]
        wide = self.broadcast(gate, cand_to_user)[:, :6] * x_cand
        score = ikbo.linear(x_user, x_cand, self.w_user, self.w_cand, None, cand_to_user, "silu")
        exact = ikbo.linear(
            age.double(), x_cand.double(), self.exact, self.exact_packed, None, cand_to_user
        )
        e_user, e_cand = age.unflatten(1, (4, 2)), item[0].unflatten(1, (3, 2))
        parts = [e_cand[:, :1], e_cand[:, 1:]]
        w_user, w_cand = self.w_fields[:, :4], self.w_fields[:, 4:]
        fields = ikbo.lce(e_user, parts, w_user, w_cand, None, cand_to_user)
        packed = ikbo.prepack(w_cand, [1, 2])
        fields_again = ikbo.lce(e_user, parts, w_user, packed, None, cand_to_user)
        return {
            "score": score.sum(1),
            "parts": [wide.t().contiguous().t(), item[1] > 0],
            "exact": exact,
            "fields": fields + torch.relu(fields_again),
            "profile": x_user,
        }


def hand_written(broadcast: Callable[[Tensor, Tensor], Tensor]) -> Recipe:
    torch.manual_seed(4)
    inputs = (
        {"age": torch.randn(ROWS, 8), "premium": torch.rand(ROWS) < 0.5},
        (torch.randn(2 * ROWS, 6), torch.randint(-3, 3, (2 * ROWS,), dtype=torch.int16)),
        torch.zeros(2 * ROWS, dtype=torch.int32),
    )
    roles = {
        "user.age": "user",
        "user.premium": "user",
        "item.0": "candidate",
        "item.1": "candidate",
        "cand_to_user": "index",
    }
    return Recipe(HandWritten(broadcast).eval(), inputs, roles, 8, 512)


class SplitRanker(nn.Module):
    """Written with `ikbo.nn` in fp16, so that a GPU has kernels for what crosses the boundary."""

    def __init__(self) -> None:
        super().__init__()
        half = {"dtype": torch.float16}
        self.deep = ikbo.nn.Linear(WIDTH, WIDTH, 64, activation="relu", **half)
        self.fields = ikbo.nn.LinearCompression(6, 5, 16, **half)
        self.attention = ikbo.nn.TargetAttention(WIDTH, HEADS, **half)
        self.boundary = ikbo.nn.Expand()
        # Rows of users and columns of candidates begin at odd addresses.
        self.odd = ikbo.nn.Linear(WIDTH - 1, WIDTH, 24, **half)
        self.packed = ikbo.nn.Linear(WIDTH, WIDTH, 24, **half)
        self.packed_fields = ikbo.nn.LinearCompression(6, 5, 8, **half)

    def forward(
        self, user: Tensor, events: Tensor, user_fields: Tensor, item: Tensor, item_fields: Tensor,
        cand_to_user: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        gate = self.boundary(torch.tanh(user), cand_to_user)
        seen = self.attention(item, events, cand_to_user)
        parts = [item_fields[:, :2], item_fields[:, 2:]]
        return {
            "deep": self.deep(user, item, cand_to_user),
            "odd": self.odd(user[:, 1:], item, cand_to_user),
            "packed": self.packed(user, item * gate, cand_to_user),
            "fields": self.fields(user_fields, item_fields, cand_to_user),
            "packed_fields": self.packed_fields(user_fields, parts, cand_to_user),
            "seen": seen,
        }


def split_ranker(device: str) -> Recipe:
    torch.manual_seed(5)
    module = SplitRanker().eval().requires_grad_(False).to(device)
    module.packed.prepack()
    module.packed_fields.prepack([2, 3])
    half = {"dtype": torch.float16, "device": device}
    inputs = {
        "user": torch.randn(ROWS, WIDTH, **half),
        "events": torch.randn(ROWS, HISTORY, WIDTH, **half),
        "user_fields": torch.randn(ROWS, 6, 16, **half),
        "item": torch.randn(ROWS, WIDTH, **half),
        "item_fields": torch.randn(ROWS, 5, 16, **half),
        "cand_to_user": torch.zeros(ROWS, dtype=torch.int32, device=device),
    }
    users = dict.fromkeys(["user", "events", "user_fields"], "user")
    candidates = dict.fromkeys(["item", "item_fields"], "candidate")
    return Recipe(module, inputs, users | candidates | {"cand_to_user": "index"}, 16, 2048)


class PackedRanker(nn.Module):
    """All features are columns of one matrix: an id and a history of ids, a price, an item's id."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.score = nn.Linear(3 * WIDTH + 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        user, history = self.table(x[:, 0].long()), self.table(x[:, 1:5].long())
        item = self.table(x[:, 6].long())
        return self.score(torch.cat([user, history.tanh().mean(1), item, x[:, 5:6]], 1))[:, 0]


def build_packed() -> tuple[nn.Module, tuple[Tensor]]:
    """A factory with a packed input of seven columns."""
    torch.manual_seed(6)
    x = torch.randint(50, (ROWS, 7)).float()
    return PackedRanker().eval(), (x,)


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The factory that the command line tests name."""
    return history_ranker()


def broken() -> tuple[nn.Module, dict[str, Tensor]]:
    """A factory with a bug."""
    raise LookupError("no such table")


def not_a_pair() -> nn.Module:
    """A factory that forgets the inputs."""
    return history_ranker()[0]
