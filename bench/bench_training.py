# SPDX-License-Identifier: Apache-2.0
"""Trains one net twice: plain, on user rows repeated for every candidate, and with `ikbo.nn`.

Both start from the same weights and see the same batches. Their losses may differ at any step by no
more than fp32 rounding explains; that is measured too, as the distance of the plain net from itself
in fp64. Then a training step of each is timed. Writes `bench/results/training-cpu.json`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import ikbo
from ikbo.testing.bench import interleaved, write_results

THREADS = 2
SEED = 3
LEARNING_RATE = 0.02
STEPS = 200
TIMED_ROUNDS = 15
NUM_USERS, RATIO, S = 8, 32, 64
W, HEADS = 64, 2
K_USER, K_CAND, M = 16, 8, 16
HIDDEN = 512
VOCABULARY = 500
RARE = 3.0  # about one row in five is positive
# Sums in another order and sums in another precision are errors of the same size, and training
# amplifies both alike; the factor leaves room for chance.
MAX_ROUNDINGS = 3.0
SOURCES = [
    "bench/bench_training.py",
    "include/ikbo/*.h",
    "python/ikbo/*.py",
    "python/ikbo/nn/*.py",
    "python/ikbo/testing/bench.py",
    *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops")),
]


@dataclass(frozen=True)
class Rows:
    """A batch as a log holds it: every row carries its user's features."""

    request: Tensor  # [B] equal for the candidates of one user
    user: Tensor  # [B]
    history: Tensor  # [B, S]
    lengths: Tensor  # [B] valid history entries
    item: Tensor  # [B]
    label: Tensor  # [B] 1 where the item is to the user's taste


def make_rows(seed: int, dtype: torch.dtype) -> Rows:
    """Ragged groups of candidates; planted vectors say who likes what."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(1, high, shape, generator=generator)

    taste = torch.randn(VOCABULARY, 8, generator=torch.Generator().manual_seed(0))
    index = torch.randint(NUM_USERS, (NUM_USERS * RATIO,), generator=generator).sort().values
    user, history = draw(VOCABULARY, NUM_USERS), draw(VOCABULARY, NUM_USERS, S)
    lengths = draw(S + 1, NUM_USERS)
    item = draw(VOCABULARY, len(index))
    fit = (taste[user][index] * taste[item]).sum(1)
    label = (fit + 3 * taste[item, 0] > RARE).to(dtype)
    return Rows(1000 + index, user[index], history[index], lengths[index], item, label)


class Net(nn.Module):
    """The layers that read a user alone or a candidate alone, the same in both nets."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(VOCABULARY, W)
        self.item = nn.Embedding(VOCABULARY, W)
        self.encoder = nn.TransformerEncoderLayer(W, HEADS, 2 * W, dropout=0.0, batch_first=True)
        self.user_fields = nn.Linear(2 * W, K_USER * W)
        self.cand_fields = nn.Linear(2 * W, K_CAND * W)
        self.gate = nn.Linear(K_USER * W, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN // 2)
        self.head = nn.Linear(HIDDEN // 2, 1)

    def user_side(self, user: Tensor, history: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded history `[rows, S, W]` and fields `[rows, K_USER * W]`."""
        padding = torch.arange(S) >= lengths[:, None]
        encoded = self.encoder(self.item(history), src_key_padding_mask=padding)
        present = (~padding)[:, :, None].to(encoded.dtype)
        mean = (encoded * present).sum(1) / present.sum(1)
        return encoded, self.user_fields(torch.cat([self.user(user), mean], dim=1))

    def top(self, hidden: Tensor) -> Tensor:
        return self.head(functional.relu(self.second(hidden)))[:, 0]


class PlainAttention(nn.Module):
    """Multi-head attention of one query a row over its history."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(W, W), nn.Linear(W, W)
        self.v_proj, self.out_proj = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, query: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        parts = self.q_proj(query)[:, None], self.k_proj(history), self.v_proj(history)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
        mask = (torch.arange(S) < lengths[:, None])[:, None, None]
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(1))


class PlainNet(Net):
    """Everything at B rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PlainAttention()
        self.compress = nn.Linear(K_USER + K_CAND, M)
        self.first = nn.Linear((K_USER + M) * W, HIDDEN)

    def forward(self, rows: Rows) -> Tensor:
        encoded, user = self.user_side(rows.user, rows.history, rows.lengths)
        item = self.item(rows.item)
        match = self.attention(item, encoded, rows.lengths)
        cand = self.cand_fields(torch.cat([item, match], dim=1))
        fields = torch.cat([user, cand], dim=1).unflatten(1, (K_USER + K_CAND, W))
        mixed = self.compress(fields.transpose(1, 2)).transpose(1, 2).flatten(1)
        hidden = functional.relu(self.first(torch.cat([user, mixed], dim=1)))
        return self.top(hidden * torch.sigmoid(self.gate(user)))


class DirectNet(Net):
    """The user's layers at U rows; `ikbo.nn` where user and candidate meet."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ikbo.nn.TargetAttention(W, HEADS)
        self.compress = ikbo.nn.LinearCompression(K_USER, K_CAND, M)
        self.first = ikbo.nn.Linear(K_USER * W, M * W, HIDDEN, activation="relu")
        self.expand = ikbo.nn.Expand()

    def forward(self, rows: Rows) -> Tensor:
        index = ikbo.CandidateIndex.from_request_ids(rows.request)
        of_user = index.first_candidates()
        lengths = rows.lengths[of_user]
        encoded, user = self.user_side(rows.user[of_user], rows.history[of_user], lengths)
        item = self.item(rows.item)
        match = self.attention(item, encoded, index, user_lengths=lengths.int())
        cand = self.cand_fields(torch.cat([item, match], dim=1)).unflatten(1, (K_CAND, W))
        mixed = self.compress(user.unflatten(1, (K_USER, W)), cand, index).flatten(1)
        hidden = self.first(user, mixed, index)
        return self.top(hidden * self.expand(torch.sigmoid(self.gate(user)), index))


class Training:
    """A net with its optimizer; `step` takes the next batch."""

    def __init__(self, net: Net, dtype: torch.dtype) -> None:
        torch.manual_seed(SEED)
        self.net = net
        self.net.load_state_dict(PlainNet().state_dict())
        self.net.to(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.batches = [make_rows(seed, dtype) for seed in range(STEPS)]
        self.losses: list[float] = []

    def step(self) -> None:
        rows = self.batches[len(self.losses) % STEPS]
        loss = functional.binary_cross_entropy_with_logits(self.net(rows), rows.label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def trained(net: Net, dtype: torch.dtype, name: str) -> Training:
    training = Training(net, dtype)
    for _ in range(STEPS):
        training.step()
    first, last = training.losses[0], training.losses[-1]
    print(f"{name}: loss {first:.6f} -> {last:.6f} in {STEPS} steps", flush=True)
    return training


def largest_difference(a: Training, b: Training) -> float:
    return max(abs(x - y) for x, y in zip(a.losses[:STEPS], b.losses[:STEPS], strict=True))


def main() -> int:
    torch.set_num_threads(THREADS)
    exact = trained(PlainNet(), torch.float64, "replicated, fp64")
    plain = trained(PlainNet(), torch.float32, "replicated, fp32")
    direct = trained(DirectNet(), torch.float32, "ikbo.nn, fp32")
    difference = largest_difference(direct, plain)
    rounding = largest_difference(plain, exact)
    ms = interleaved({"ours": direct.step, "replicated": plain.step}, rounds=TIMED_ROUNDS)

    sizes = {"U": NUM_USERS, "B": NUM_USERS * RATIO, "ratio": RATIO, "S": S, "dtype": "fp32"}
    peers = {"replicated": ms["replicated"]}
    rows = [
        {"case": {"what": "step", **sizes}, "unit": "ms", "ours": ms["ours"], "peers": peers},
        {
            "case": {"what": "largest difference of the loss", "steps": STEPS, **sizes},
            "unit": "nats",
            "ours": difference,
            "peers": {"replicated_fp32_from_fp64": rounding},
        },
    ]
    write_results("training", rows, sources=SOURCES)
    speedup = ms["replicated"] / ms["ours"]
    print(
        f"largest difference of the loss {difference:.1e}, "
        f"of the plain net from itself in fp64 {rounding:.1e}"
    )
    print(f"step {ms['ours']:.1f} ms, replicated {ms['replicated']:.1f} ms: {speedup:.2f}x faster")
    failed = []
    if not difference <= MAX_ROUNDINGS * rounding:
        failed.append("the losses differ by more than fp32 rounding")
    if not speedup > 1:
        failed.append("training with ikbo.nn is not faster")
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
