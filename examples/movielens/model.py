# SPDX-License-Identifier: Apache-2.0
"""A late-ranking net in plain PyTorch: one row is one candidate film with its user's data.

Every input has the batch in dimension 0: a user's inputs are repeated for each of the candidates.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.movielens.data import MAX_HISTORY, VOCABULARY

WIDTH = 64  # of an id embedding, a field, an encoded event
SMALL = 16  # of any other embedding
HEADS = 2
NUM_USER_FIELDS = 24
NUM_ITEM_FIELDS = 12
NUM_MIXED_FIELDS = 24
USER_WIDTH = 2560  # of the dense user vector that the deep part reads
CROSS_RANK = 256
MLP = (1024, 512, 256)
USER_TOKENS = ("age", "gender", "occupation", "zip_prefix", "hour", "weekday", "idle_gap")
LIKED = 4  # the lowest rating that counts as liked


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of `query [B, Q, W]` over `key`, `value` `[B, S, W]` where `mask [B, S]` is set."""
    query, key, value = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None, None, :]
    )
    return out.transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """One pre-norm transformer layer over the history."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.out(attend(query, key, value, mask))
        return x + self.ffn(x)


class UserSide(NamedTuple):
    """What the interactions read of the user."""

    fields: Tensor  # [B, NUM_USER_FIELDS, WIDTH]
    dense: Tensor  # [B, USER_WIDTH]
    key: Tensor  # [B, S, WIDTH] of the target attention
    value: Tensor  # [B, S, WIDTH]
    mask: Tensor  # [B, S] bool


class UserEncoder(nn.Module):
    """Profile, request context and history to the user side."""

    def __init__(self, item: nn.Embedding) -> None:
        super().__init__()
        self.item = item
        self.user_id = nn.Embedding(VOCABULARY["user_id"], WIDTH)
        self.tokens = nn.ModuleList(nn.Embedding(VOCABULARY[name], SMALL) for name in USER_TOKENS)
        self.length = nn.Embedding(MAX_HISTORY + 1, SMALL)
        self.rating = nn.Embedding(VOCABULARY["rating"], SMALL)
        self.gap = nn.Embedding(VOCABULARY["gap"], SMALL)
        self.event = nn.Linear(WIDTH + 2 * SMALL, WIDTH)
        self.layer = EncoderLayer()
        self.norm = nn.LayerNorm(WIDTH)
        num_tokens = len(USER_TOKENS) + 1
        self.token_fields = nn.Linear(num_tokens * SMALL, num_tokens * WIDTH)
        num_interests = NUM_USER_FIELDS - num_tokens - 1
        self.interest_fields = nn.Linear(3 * WIDTH, num_interests * WIDTH)
        self.dense = nn.Linear(NUM_USER_FIELDS * WIDTH, USER_WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(
        self,
        user_id: Tensor,
        tokens: tuple[Tensor, ...],
        history_item: Tensor,
        history_rating: Tensor,
        history_gap: Tensor,
        history_length: Tensor,
    ) -> UserSide:
        steps = torch.arange(MAX_HISTORY, device=history_length.device)
        mask = steps < history_length[:, None]
        events = [self.item(history_item), self.rating(history_rating), self.gap(history_gap)]
        encoded = self.norm(self.layer(self.event(torch.cat(events, dim=-1)), mask))

        present = mask[:, :, None].to(encoded.dtype)
        liked = present * (history_rating >= LIKED)[:, :, None]
        interests = [
            (encoded * present).sum(1) / present.sum(1).clamp(min=1),
            (encoded * liked).sum(1) / liked.sum(1).clamp(min=1),
            (encoded * present).amax(1),
        ]
        small = [table(token) for table, token in zip(self.tokens, tokens, strict=True)]
        fields = torch.cat(
            [
                self.user_id(user_id),
                self.token_fields(torch.cat([*small, self.length(history_length)], dim=-1)),
                self.interest_fields(torch.cat(interests, dim=-1)),
            ],
            dim=-1,
        )
        key, value = self.key_value(encoded).chunk(2, dim=-1)
        dense = functional.relu(self.dense(fields))
        return UserSide(fields.unflatten(-1, (NUM_USER_FIELDS, WIDTH)), dense, key, value, mask)


class CrossLayer(nn.Module):
    """Low-rank cross (DCN-v2): `x0 * (U V x + b) + x`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, CROSS_RANK, bias=False)
        self.up = nn.Linear(CROSS_RANK, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(self.down(x)) + x


class Ranker(nn.Module):
    """Two scores of each candidate: will the user watch it, and will the user like it (logits)."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(VOCABULARY["item_id"], WIDTH, padding_idx=0)
        self.user = UserEncoder(self.item)
        self.year = nn.Embedding(VOCABULARY["item_year"], SMALL)
        self.genres = nn.Embedding(VOCABULARY["item_genres"], 2 * SMALL, padding_idx=0)
        self.popularity = nn.Embedding(VOCABULARY["item_popularity"], SMALL)
        self.score = nn.Embedding(VOCABULARY["item_score"], SMALL)
        self.query = nn.Linear(WIDTH + 5 * SMALL, WIDTH)
        self.film_fields = nn.Linear(5 * SMALL, 7 * WIDTH)
        self.match_fields = nn.Linear(WIDTH, 4 * WIDTH)
        self.compress = nn.Linear(NUM_USER_FIELDS + NUM_ITEM_FIELDS, NUM_MIXED_FIELDS)

        width = (NUM_MIXED_FIELDS + NUM_ITEM_FIELDS) * WIDTH
        self.cross1 = CrossLayer(width)
        self.cross2 = CrossLayer(width)
        layers: list[nn.Module] = []
        for k, m in pairwise((USER_WIDTH + width, *MLP)):
            layers += [nn.Linear(k, m), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.watch = nn.Linear(width + MLP[-1], 1)
        self.like = nn.Linear(width + MLP[-1], 1)

    def forward(
        self,
        user_id: Tensor,
        age: Tensor,
        gender: Tensor,
        occupation: Tensor,
        zip_prefix: Tensor,
        hour: Tensor,
        weekday: Tensor,
        idle_gap: Tensor,
        history_item: Tensor,
        history_rating: Tensor,
        history_gap: Tensor,
        history_length: Tensor,
        item_id: Tensor,
        item_year: Tensor,
        item_genres: Tensor,
        item_popularity: Tensor,
        item_score: Tensor,
    ) -> dict[str, Tensor]:
        """Scores B candidates; all inputs are int64.

        Args:
            user_id, age, gender, occupation, zip_prefix: `[B]`, the user's profile.
            hour, weekday, idle_gap: `[B]`, the request's context.
            history_item, history_rating, history_gap: `[B, 200]`, last events, oldest first.
            history_length: `[B]`, how many of them are there.
            item_id, item_year, item_popularity, item_score: `[B]`, the candidate film.
            item_genres: `[B, 6]`, its genres, padded with 0.

        Returns:
            `watch [B]` and `like [B]`, logits.
        """
        tokens = (age, gender, occupation, zip_prefix, hour, weekday, idle_gap)
        history = (history_item, history_rating, history_gap, history_length)
        user = self.user(user_id, tokens, *history)
        return self.interact(user, item_id, item_year, item_genres, item_popularity, item_score)

    def interact(
        self,
        user: UserSide,
        item_id: Tensor,
        item_year: Tensor,
        item_genres: Tensor,
        item_popularity: Tensor,
        item_score: Tensor,
    ) -> dict[str, Tensor]:
        """Everything that reads a candidate."""
        item = self.item(item_id)
        film = torch.cat(
            [
                self.year(item_year),
                self.genres(item_genres).sum(1),
                self.popularity(item_popularity),
                self.score(item_score),
            ],
            dim=-1,
        )
        query = self.query(torch.cat([item, film], dim=-1))[:, None]
        match = attend(query, user.key, user.value, user.mask).flatten(1)
        item_fields = torch.cat([item, self.film_fields(film), self.match_fields(match)], dim=-1)
        item_fields = item_fields.unflatten(-1, (NUM_ITEM_FIELDS, WIDTH))

        fields = torch.cat([user.fields, item_fields], dim=1)
        mixed = self.compress(fields.transpose(1, 2)).transpose(1, 2)
        x0 = torch.cat([mixed, item_fields], dim=1).flatten(1)
        crossed = self.cross2(x0, self.cross1(x0, x0))
        deep = self.mlp(torch.cat([user.dense, x0], dim=1))
        last = torch.cat([crossed, deep], dim=1)
        return {"watch": self.watch(last)[:, 0], "like": self.like(last)[:, 0]}
