# SPDX-License-Identifier: Apache-2.0
"""Transformed models against the unmodified ones from ratio 1 on: does the cost model decide well?

Both get the same inputs, users once per user; the unmodified model repeats their rows first
(`replicated`). `slowdown` in a case is the median of ours / replicated, pair by pair: calls take
turns, each behind an untimed one that finds the heap as the other left it, in the CPU time of the
one thread, so that other processes of the machine count little. A package is loaded several times:
where its weights come to lie decides some per cent.
Eager: the module that `ikbo.transform` returns by default, which chooses per batch. Package: a
package made for the ratio, and one for `usual` ratios (the default); which form runs where is
measured when they are made.
usage: bench/bench_cost_model.py [--blocks NAME,...] [--packages NAME,...]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ikbo
from bench.in_turn import loaded_in_turn
from examples.movielens.data import MAX_GENRES, MAX_HISTORY, USER_INPUTS, VOCABULARY
from examples.movielens.model import Ranker
from ikbo.testing.bench import REPOSITORY, write_results

SOURCES = (
    "bench/bench_cost_model.py",
    "bench/in_turn.py",
    "examples/movielens/model.py",
    "python/ikbo/_forms.py",
    "python/ikbo/_inductor*.py",
    "python/ikbo/_measured.py",
    "python/ikbo/transform/**/*.py",
    "python/ikbo/transform/devices/cpu.json",
    "src/cpu/*",
)
# (U, B): ratio 1 with few and many users, then usual ones.
SIZES = (
    (1, 1),
    (8, 8),
    (64, 64),
    (8, 16),
    (1, 10),
    (8, 80),
    (1, 70),
    (8, 560),
    (1, 500),
    (4, 2000),
)
MAX_USERS, MAX_CANDIDATES = 64, 2048
ROWS = 64  # of the example inputs
SECONDS = 5.0  # for each case
COPIES = 4  # of a package
Inputs = dict[str, Tensor]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Block:
    """A model and what makes rows of its user and candidate inputs."""

    model: nn.Module
    users: Callable[[int], Inputs]
    candidates: Callable[[int], Inputs]


class Deep(nn.Module):
    """Three layers over user and candidate features."""

    def __init__(self, k_user: int, k_cand: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(k_user + k_cand, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.layers(torch.cat([user, item], dim=1)).sigmoid()


class AttentionMlp(nn.Module):
    """Scores of a history by an MLP over `[q, k, q - k, q * k]`, and a deep net over its sum."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4 * width, hidden), nn.Linear(hidden, 1)
        self.deep = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        queries = item.unsqueeze(1).expand(-1, user.size(1), -1)
        features = torch.cat([queries, user, queries - user, queries * user], dim=-1)
        scores = self.second(torch.sigmoid(self.first(features))).transpose(1, 2)
        pooled = torch.matmul(torch.softmax(scores, dim=-1), user).squeeze(1)
        return self.deep(torch.cat([pooled, item], dim=1)).sigmoid()


class Experts(nn.Module):
    """Four experts, a gate and a tower for each of two tasks."""

    def __init__(self, k_user: int, k_cand: int) -> None:
        super().__init__()
        k = k_user + k_cand
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(k, 128), nn.ReLU()) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(k, 4) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(128, 1) for _ in range(2))

    def forward(self, user: Tensor, item: Tensor) -> list[Tensor]:
        x = torch.cat([user, item], dim=1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        outs = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = gate(x).softmax(dim=1).unsqueeze(1)
            outs.append(tower(torch.bmm(weights, experts).squeeze(1)).sigmoid())
        return outs


class CrossNetwork(nn.Module):
    """Three cross layers with one weight vector each, beside a deep net."""

    def __init__(self, k_user: int, k_cand: int) -> None:
        super().__init__()
        k = k_user + k_cand
        self.cross = nn.ModuleList(nn.Linear(k, 1, bias=False) for _ in range(3))
        self.deep, self.out = Deep(k_user, k_cand), nn.Linear(k + 1, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = x_0 = torch.cat([user, item], dim=1)
        for layer in self.cross:
            x = x_0 * layer(x) + x
        return self.out(torch.cat([x, self.deep(user, item)], dim=1)).sigmoid()


def of_two(model: nn.Module, user: tuple[int, ...], item: tuple[int, ...]) -> Block:
    return Block(
        model,
        lambda rows: {"user": torch.randn(rows, *user)},
        lambda rows: {"item": torch.randn(rows, *item)},
    )


def movielens() -> Block:
    """The net of the demo, on random ids; its weights do not change what a run costs."""

    def column(name: str, rows: int) -> Tensor:
        if name == "history_length":
            return torch.randint(1, MAX_HISTORY + 1, (rows,))
        kind = {"history_item": "item_id", "history_rating": "rating", "history_gap": "gap"}
        width = {"item_genres": (MAX_GENRES,)} | dict.fromkeys(kind, (MAX_HISTORY,))
        return torch.randint(VOCABULARY[kind.get(name, name)], (rows, *width.get(name, ())))

    items = ("item_id", "item_year", "item_genres", "item_popularity", "item_score")
    return Block(
        Ranker(),
        lambda rows: {name: column(name, rows) for name in USER_INPUTS},
        lambda rows: {name: column(name, rows) for name in items},
    )


BLOCKS: dict[str, Callable[[], Block]] = {
    "deep": lambda: of_two(Deep(512, 256), (512,), (256,)),
    "deep_tiny_user": lambda: of_two(Deep(2, 512), (2,), (512,)),
    "attention_mlp": lambda: of_two(AttentionMlp(32, 64), (50, 32), (32,)),
    "experts": lambda: of_two(Experts(512, 256), (512,), (256,)),
    "cross_network": lambda: of_two(CrossNetwork(512, 256), (512,), (256,)),
    "movielens": movielens,
}


class Replicated(nn.Module):
    """The unmodified model, users repeated before it."""

    def __init__(self, model: nn.Module, users: tuple[str, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.users, self.names = model, users, names

    def forward(self, *tensors: Tensor) -> Any:
        *rest, index = tensors
        rows = dict(zip(self.names, rest, strict=True))
        rows |= {name: rows[name].index_select(0, index) for name in self.users}
        return self.model(**rows)


class Contest:
    """One block, both forms of it, and what they measured."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name, self.block = name, BLOCKS[name]()
        self.block.model.eval()
        examples = self.block.users(ROWS) | self.block.candidates(ROWS)
        self.users = tuple(self.block.users(1))
        self.examples, self.names = examples, tuple(examples)
        self.replicated = Replicated(self.block.model, self.users, self.names).eval()

    def transform(self, ratio: int | None) -> Any:
        return ikbo.transform(
            self.block.model, self.examples, self.users, ratio=ratio,
            max_users=MAX_USERS, max_candidates=MAX_CANDIDATES,
        )  # fmt: skip

    def inputs(self, num_users: int, num_candidates: int) -> Inputs:
        torch.manual_seed(1)
        index = torch.arange(num_candidates, dtype=torch.int32) * num_users // num_candidates
        rows = self.block.users(num_users) | self.block.candidates(num_candidates)
        return rows | {"cand_to_user": index}

    def eager(self) -> list[dict[str, Any]]:
        module = self.transform(None)
        found = []
        for sizes in SIZES:
            inputs = self.inputs(*sizes)
            flat = tuple(inputs.values())
            calls = ([lambda: module(**inputs)], [lambda: self.replicated(*flat)])  # noqa: B023
            found.append(self.row("eager", "usual", sizes, calls))
        return found

    def packages(self, folder: Path) -> list[dict[str, Any]]:
        sides = {name: "user" if name in self.users else "candidate" for name in self.names}
        ikbo.package(
            self.replicated, folder / "replicated.pt2",
            example_inputs=(*self.examples.values(), torch.zeros(ROWS, dtype=torch.int32)),
            roles={
                f"tensors.{i}": role for i, role in enumerate([*sides.values(), "index"])
            },
            max_users=MAX_USERS, max_candidates=MAX_CANDIDATES,
        )  # fmt: skip
        found = []
        for ratio in (1, None):
            path = folder / f"ratio_{ratio}.pt2"
            made_for = "usual" if ratio is None else ratio
            try:
                ikbo.package(self.transform(ratio), path, both_forms="measured")
            except RuntimeError as error:
                case = {"block": self.name, "how": "package", "made_for": made_for}
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
                found.append({"case": case, "unit": "ms", "ours": reason, "peers": {}})
                print(f"{self.name:16}package {made_for!s:6} {found[-1]['ours']}", flush=True)
                continue
            ours, peer = loaded_in_turn([path, folder / "replicated.pt2"], COPIES)
            for users, candidates in SIZES:
                if ratio is not None and candidates != users * ratio:
                    continue
                flat = tuple(self.inputs(users, candidates).values())
                calls = tuple([partial(copy, *flat) for copy in side] for side in (ours, peer))
                found.append(self.row("package", made_for, (users, candidates), calls))
        return found

    def row(
        self, how: str, made_for: Any, sizes: tuple[int, int], calls: Sequence[Sequence[Call]]
    ) -> dict[str, Any]:
        ours, theirs = paired(*calls)
        users, candidates = sizes
        case = {
            "block": self.name, "how": how, "made_for": made_for, "U": users, "B": candidates,
            "ratio": candidates // users,
            "slowdown": round(statistics.median(map(truediv, ours, theirs)), 3),
        }  # fmt: skip
        print(
            f"{self.name:16}{how:8}{made_for!s:6} U={users:<3} B={candidates:<5} "
            f"{statistics.median(ours):9.3f} ms, replicated {statistics.median(theirs):9.3f}: "
            f"{case['slowdown']:.3f}",
            flush=True,
        )
        peers = {"replicated": statistics.median(theirs)}
        return {"case": case, "unit": "ms", "ours": statistics.median(ours), "peers": peers}


def paired(*sides: Sequence[Call]) -> list[list[float]]:
    """CPU milliseconds of this thread; a side's copies take turns, the sides' order alternates."""
    times: list[list[float]] = [[] for _ in sides]
    for call in itertools.chain(*sides):
        call()
    end = time.perf_counter() + SECONDS
    order = list(enumerate(map(itertools.cycle, sides)))
    while time.perf_counter() < end or len(times[0]) < 11:
        for number, copies in order:
            call = next(copies)
            call()
            start = time.thread_time_ns()
            call()
            times[number].append((time.thread_time_ns() - start) / 1e6)
        order.reverse()
    return times


def chosen(text: str, names: Mapping[str, Any]) -> list[str]:
    found = [name for name in text.split(",") if name]
    unknown = [name for name in found if name not in names]
    if unknown:
        raise SystemExit(f"bench_cost_model: blocks must be of {list(names)}; got {unknown}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="to run eagerly (all)")
    parser.add_argument("--packages", default="deep,movielens", help="to run as packages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    packed = chosen(options.packages, BLOCKS)
    with torch.no_grad():
        for name in dict.fromkeys([*chosen(options.blocks, BLOCKS), *packed]):
            contest = Contest(name)
            if name in options.blocks.split(","):
                rows += contest.eager()
            if name in packed:
                with tempfile.TemporaryDirectory() as folder:
                    rows += contest.packages(Path(folder))
    path = write_results("cost_model", rows, sources=SOURCES)
    print(path.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
