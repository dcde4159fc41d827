# SPDX-License-Identifier: Apache-2.0
"""What transformed programs build for each candidate: no copy of a user's rows, nothing larger than
the layers that read them (docs/decisions/013-no-operators-of-their-own.md).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.transform.device_costs import FREE
from ikbo.transform.spec_build import batch_symbols

ROWS, WIDTH = 50, 32
FIELDS_USER, FIELDS_CAND = 20, 6


class Din(nn.Module):
    """Scores of a history by an MLP over `[q, k, q - k, q * k]`; pooled by them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4 * WIDTH, hidden), nn.Linear(hidden, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        q = item.unsqueeze(1).expand(-1, user.size(1), -1)
        hidden = self.first(torch.cat([q, user, q - user, q * user], dim=-1)).sigmoid()
        weights = self.second(hidden).transpose(1, 2).softmax(-1)
        return torch.matmul(weights, user).squeeze(1)


class Dlrm(nn.Module):
    """Dot products of all pairs of fields."""

    def __init__(self) -> None:
        super().__init__()
        fields = FIELDS_USER + FIELDS_CAND
        self.over = nn.Linear(fields * (fields - 1) // 2, 16)
        rows, columns = torch.tril_indices(fields, fields, -1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([user, item], dim=1)
        return self.over(torch.bmm(x, x.mT)[:, self.rows, self.columns])


def built(model: nn.Module, user_rows: int, cand_rows: tuple[int, ...]) -> dict[str, int]:
    """Of each value at B that is no view of an input: how many elements it has per candidate."""
    inputs = {"user": torch.randn(16, user_rows, WIDTH), "item": torch.randn(16, *cand_rows, WIDTH)}
    module = ikbo.transform(model.eval(), inputs, ["user"], device_costs=FREE)
    _, candidates = batch_symbols(module.exported_program, module.captured)
    found: dict[str, int] = {}
    for node in module.exported_program.graph.nodes:
        value: Any = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        sizes = [d.node.expr if isinstance(d, torch.SymInt) else d for d in value.shape]
        if candidates in sizes:
            name = f"{node.name}: {node.target}"
            found[name] = math.prod(int(d) for d in sizes if d != candidates)
    return found


@pytest.mark.parametrize("hidden", [16, 36, 64, 99])
def test_attention_mlp_reads_the_history_by_index(hidden: int) -> None:
    sizes = built(Din(hidden), ROWS, ())
    assert not any("expand" in name for name in sizes)
    # The hidden layer itself, and a weight of each candidate's own.
    large = sorted(n for n in sizes.values() if n > max(ROWS, hidden))
    assert large == sorted([hidden * WIDTH, *[ROWS * hidden] * 3])


def test_attention_mlp_of_few_rows_multiplies_them() -> None:
    """Where weights would be more than twice the rows: both are little beside the hidden layer."""
    sizes = built(Din(128), ROWS, ())
    assert max(sizes.values()) == ROWS * 128
    assert sorted(n for name, n in sizes.items() if "mul" in name) == [ROWS * WIDTH]


def test_pairs_of_fields_are_built_for_a_candidate_alone() -> None:
    sizes = built(Dlrm(), FIELDS_USER, (FIELDS_CAND,))
    assert not any("expand" in name for name in sizes)
    pairs = FIELDS_USER * FIELDS_CAND + FIELDS_CAND * (FIELDS_CAND - 1) // 2
    copies = FIELDS_CAND * WIDTH  # of the candidate's own fields, which a permutation only views
    assert max(n for name, n in sizes.items() if "permute" not in name) <= max(pairs, copies)
