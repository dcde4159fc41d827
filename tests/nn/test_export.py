# SPDX-License-Identifier: Apache-2.0
"""A model of `ikbo.nn` modules exports with two named batch dimensions and runs at other sizes."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from ikbo import CandidateIndex, nn


class Model(torch.nn.Module):
    """One of each module; the index comes in as a tensor, as an exported program takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TargetAttention(8, 2)
        self.compression = nn.LinearCompression(4, 2, 3)
        self.hidden = nn.Linear(8, 8, 5, activation="silu")
        self.expand = nn.Expand()

    def forward(
        self, history: Tensor, lengths: Tensor, e_user: Tensor, e_cand: Tensor, cand_to_user: Tensor
    ) -> Tensor:
        interest = self.attention(e_cand[:, 0], history, cand_to_user, user_lengths=lengths)
        fields = self.compression(e_user, e_cand, cand_to_user).flatten(1)
        hidden = self.hidden(e_user[:, 0], interest, cand_to_user)
        return torch.cat([hidden, fields, self.expand(e_user[:, 1], cand_to_user)], dim=1)


def inputs(num_users: int, num_candidates: int) -> tuple[Tensor, ...]:
    owners = torch.randint(num_users, (num_candidates,))
    return (
        torch.randn(num_users, 6, 8),
        torch.randint(7, (num_users,), dtype=torch.int32),
        torch.randn(num_users, 4, 8),
        torch.randn(num_candidates, 2, 8),
        CandidateIndex.from_cand_to_user(owners, num_users).cand_to_user,
    )


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(1)
    u, b = Dim("U", min=1, max=64), Dim("B", min=1, max=4096)
    return torch.export.export(
        Model().eval(), inputs(3, 11), dynamic_shapes=({0: u}, {0: u}, {0: u}, {0: b}, {0: b})
    )


def test_both_dimensions_stay_free(program: torch.export.ExportedProgram) -> None:
    ranges = sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values())
    assert ranges == [(1, 64), (1, 4096)]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 50), (5, 64), (64, 3)])
def test_other_sizes_give_the_eager_result(
    program: torch.export.ExportedProgram, sizes: tuple[int, int]
) -> None:
    model = Model().eval()
    model.load_state_dict(program.state_dict)
    arguments = inputs(*sizes)
    torch.testing.assert_close(program.module()(*arguments), model(*arguments))
