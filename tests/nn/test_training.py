# SPDX-License-Identifier: Apache-2.0
"""Training with `ikbo.nn` on request-grouped batches gives the losses of the plain model."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo import CandidateIndex, nn
from tests.nn.plain import PlainAttention, PlainCompression, PlainLinear

USERS, HISTORY, WIDTH = 6, 9, 16
USER_FIELDS, CAND_FIELDS, COMPRESSED = 5, 3, 4
STEPS = 200


class Split(torch.nn.Module):
    """A ranking net with users and candidates apart."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TargetAttention(WIDTH, 2)
        self.compression = nn.LinearCompression(USER_FIELDS, CAND_FIELDS, COMPRESSED)
        self.hidden = nn.Linear(WIDTH, WIDTH, 32, activation="relu")
        self.head = torch.nn.Linear(32 + COMPRESSED * WIDTH, 1)

    def forward(
        self,
        history: Tensor,
        lengths: Tensor,
        e_user: Tensor,
        e_cand: Tensor,
        index: CandidateIndex,
    ) -> Tensor:
        interest = self.attention(e_cand[:, 0], history, index, user_lengths=lengths)
        fields = self.compression(e_user, e_cand, index)
        hidden = self.hidden(e_user[:, 0], interest, index)
        return self.head(torch.cat([hidden, fields.flatten(1)], dim=1)).squeeze(1)


class Plain(torch.nn.Module):
    """The same net on one row per candidate, parameters created in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PlainAttention(WIDTH, 2, 2, WIDTH)
        self.compression = PlainCompression(USER_FIELDS, CAND_FIELDS, COMPRESSED)
        self.hidden = PlainLinear(WIDTH, WIDTH, 32, "relu")
        self.head = torch.nn.Linear(32 + COMPRESSED * WIDTH, 1)

    def forward(self, history: Tensor, lengths: Tensor, e_user: Tensor, e_cand: Tensor) -> Tensor:
        mask = torch.arange(HISTORY, device=lengths.device) < lengths[:, None]
        interest = self.attention(e_cand[:, :1], history, mask).squeeze(1)
        fields = self.compression(e_user, e_cand)
        hidden = self.hidden(e_user[:, 0], interest)
        return self.head(torch.cat([hidden, fields.flatten(1)], dim=1)).squeeze(1)


def requests(order: str, steps: int) -> list[tuple[list[Tensor], Tensor, Tensor, CandidateIndex]]:
    """Batches of (user tensors, candidate embeddings, labels, index)."""
    generator = torch.Generator().manual_seed(11)
    batches = []
    for _ in range(steps):
        counts = torch.randint(1, 12, (USERS,), generator=generator)
        index = CandidateIndex.from_counts(counts)
        if order == "shuffled":
            shuffle = torch.randperm(index.num_candidates, generator=generator)
            index = CandidateIndex.from_cand_to_user(index.cand_to_user[shuffle], USERS)
        user = [
            torch.randn(USERS, HISTORY, WIDTH, generator=generator),
            torch.randint(1, HISTORY + 1, (USERS,), dtype=torch.int32, generator=generator),
            torch.randn(USERS, USER_FIELDS, WIDTH, generator=generator),
        ]
        e_cand = torch.randn(index.num_candidates, CAND_FIELDS, WIDTH, generator=generator)
        affinity = user[2][:, 0].sum(1)[index.cand_to_user.long()] + e_cand[:, 0].sum(1)
        batches.append((user, e_cand, (affinity > 0).float(), index))
    return batches


def train(kind: str, order: str, *, steps: int = STEPS, device: str = "cpu") -> Tensor:
    """The losses of all steps, from the same initial weights."""
    torch.manual_seed(7)
    model = (Split() if kind == "split" else Plain()).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for on_cpu in requests(order, steps):
        user, e_cand, labels, index = pytree.tree_map(lambda x: x.to(device), on_cpu)
        if kind == "split":
            scores = model(*user, e_cand, index)
        else:
            rows = index.cand_to_user.long()
            scores = model(*(x[rows] for x in user), e_cand)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and wait long for them on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_losses_are_those_of_the_plain_model(order: str) -> None:
    split, plain = train("split", order), train("plain", order)
    assert plain[-20:].mean() < 0.8 * plain[:20].mean(), "the net learns"
    # Rounding grows with the steps: Adam divides by the root of small second moments.
    torch.testing.assert_close(split[:20], plain[:20], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(split, plain, rtol=1e-3, atol=1e-4)
