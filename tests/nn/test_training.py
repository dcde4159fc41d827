# SPDX-License-Identifier: Apache-2.0
"""Training with `ikbo.nn` on request-grouped batches gives the losses of the plain model."""

import copy
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


def train(
    kind: str,
    order: str,
    *,
    steps: int = STEPS,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The losses of all steps, from the same initial weights.

    In another type than fp32 inputs, weights and gradients have that type; Adam works on fp32
    weights, of which they are a copy, and the loss is scaled so that no gradient gets too small.
    """
    torch.manual_seed(7)
    master = (Split() if kind == "split" else Plain()).to(device)
    model = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
    scale = 1.0 if dtype == torch.float32 else 256.0
    optimiser = torch.optim.Adam(master.parameters(), lr=3e-3)
    losses = []
    for on_cpu in requests(order, steps):
        user, e_cand, labels, index = pytree.tree_map(lambda x: x.to(device), on_cpu)
        user, e_cand = pytree.tree_map(
            lambda x: x.to(dtype) if x.is_floating_point() else x, (user, e_cand)
        )
        if kind == "split":
            scores = model(*user, e_cand, index)
        else:
            rows = index.cand_to_user.long()
            scores = model(*(x[rows] for x in user), e_cand)
        assert scores.dtype == dtype
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores.float(), labels)
        model.zero_grad()
        (loss * scale).backward()
        for weight, used in zip(master.parameters(), model.parameters(), strict=True):
            assert used.grad is not None
            weight.grad = used.grad.float() / scale
        optimiser.step()
        with torch.no_grad():
            for weight, used in zip(master.parameters(), model.parameters(), strict=True):
                used.copy_(weight)
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def check_losses_in_16_bits(order: str, dtype: torch.dtype, device: str) -> None:
    """The split net strays from the fp32 losses no further than twice what the plain one does."""
    steps = 50
    exact = train("plain", order, steps=steps, device=device)
    split, plain = (
        train(kind, order, steps=steps, device=device, dtype=dtype) for kind in ("split", "plain")
    )
    assert split[-10:].mean() < split[:10].mean(), "the net learns"
    stray, allowed = ((losses - exact).abs() for losses in (split, plain))
    one_rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    # What a rounding does to a loss differs from step to step: the worst step up to each counts.
    budget = 2 * torch.cummax(allowed + one_rounding, dim=0).values
    worst = int((stray - budget).argmax())
    assert bool((stray <= budget).all()), (
        f"step {worst}: fp32 {exact[worst]}, plain {plain[worst]}, split {split[worst]}, "
        f"budget {budget[worst]}"
    )


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_losses_in_16_bits_are_those_of_the_plain_model(order: str, dtype: torch.dtype) -> None:
    check_losses_in_16_bits(order, dtype, "cpu")
