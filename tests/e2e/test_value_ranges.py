# SPDX-License-Identifier: Apache-2.0
"""Ranges of integer inputs, found on exported programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo._value_ranges import ValueRange, bound_values


class Ids(nn.Module):
    """Ids that reach tables in the ways that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(10, 4), nn.Embedding(50, 4)
        self.register_buffer("genres", torch.zeros(7, 3, dtype=torch.int64))

    def forward(
        self,
        plain: Tensor,
        both: Tensor,
        packed: Tensor,
        offset: Tensor,
        shifted: Tensor,
        hashed: Tensor,
        picked: Tensor,
        weight: Tensor,
        narrow: Tensor,
    ) -> Tensor:
        shared = self.small(both) + self.large(both)
        columns = self.small(packed[:, 0]) + self.large(packed[:, 1].unsqueeze(1)).squeeze(1)
        moved = self.large(torch.cat([offset + 20, plain]).view(-1, 2).select(1, 0))
        free = self.small(hashed.clamp(0, 9)) * weight.unsqueeze(1)
        rows = self.genres.index_select(0, picked).float().sum() + self.genres[narrow.long()].sum()
        return self.small(plain) + self.large(shifted + 20) + shared + columns + moved + free + rows


def test_ids_of_tables() -> None:
    ids = torch.zeros(6, dtype=torch.int64)
    inputs = {
        "plain": ids.clone(),
        "both": ids.clone(),
        "packed": torch.zeros(6, 2, dtype=torch.int64),
        "offset": ids.clone(),
        "shifted": ids.clone(),
        "hashed": ids.clone(),
        "picked": ids.clone(),
        "weight": torch.ones(6),
        "narrow": ids.to(torch.int32),
    }
    program = torch.export.export(Ids().eval(), (), inputs)
    assert bound_values(program) == {
        "plain": ValueRange(0, 9),  # the smaller of two tables
        "both": ValueRange(0, 9),
        "shifted": ValueRange(-20, 29),
        "picked": ValueRange(0, 6),
        "narrow": ValueRange(-7, 6),  # an index may count from the end
    }
    # Columns of a packed input and computed values have no range of an input: they are clamped.
    inputs["packed"] = torch.tensor([[10**6, -(10**6)]] * 6)
    inputs["hashed"] = ids - 10**6
    inputs["offset"] = ids - 20
    assert program.module()(**inputs).isfinite().all()
    clamps = [node for node in program.graph.nodes if node.target is torch.ops.aten.clamp.default]
    assert [node.args[1:] for node in clamps].count((0, 9)) == 2  # hashed keeps its own
    assert [node.args[1:] for node in clamps].count((0, 49)) == 2  # a column; a part of the cat


class Lengths(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cand_to_user: Tensor, lengths: Tensor) -> Tensor:
        return ikbo.target_attention(q, k, k, cand_to_user, user_lengths=lengths)[0]


class SelfLengths(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cand_to_user: Tensor, lengths: Tensor) -> Tensor:
        return ikbo.self_target_attention(k, q, k, k, cand_to_user, user_lengths=lengths)[1]


@pytest.mark.parametrize("module", [Lengths, SelfLengths])
@pytest.mark.parametrize("history", [5, 8])
def test_lengths_of_histories(history: int, module: type[nn.Module]) -> None:
    index = torch.zeros(4, dtype=torch.int32)
    lengths = torch.ones(2, dtype=torch.int32)
    inputs = (torch.randn(4, 1, 2, 8), torch.randn(2, history, 2, 8), index, lengths)
    program = torch.export.export(module(), inputs)
    assert bound_values(program) == {"lengths": ValueRange(0, history)}


class PackedLengths(nn.Module):
    def forward(self, q: Tensor, k: Tensor, index: Tensor, offsets: Tensor, seen: Tensor) -> Tensor:
        return ikbo.target_attention(q, k, k, index, cand_lengths=seen, user_offsets=offsets)[0]


def test_lengths_in_packed_histories() -> None:
    index, seen = torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    inputs = (torch.randn(4, 1, 2, 8), torch.randn(5, 2, 8), index, offsets, seen)
    program = torch.export.export(PackedLengths(), inputs)
    # What is beyond a history means all of it; offsets are the operator's to check.
    assert bound_values(program) == {"seen": ValueRange(0, 2**31 - 1)}
