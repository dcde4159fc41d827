# SPDX-License-Identifier: Apache-2.0
"""What a request gets from a package for the CPU alone, and from a run merged as by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo._archive import read_manifest
from ikbo._manifest import Manifest
from tests.e2e.models import history_ranker

WIDTH, HEADS, HISTORY = 32, 2, 12
Request = dict[str, Tensor]


class Exact(nn.Module):
    """What is the same bits whoever else is in the run: attention without ragged candidates, the
    broadcast, and arithmetic that IEEE 754 rounds in one way only.
    """

    def forward(
        self, query: Tensor, history: Tensor, gate: Tensor, price: Tensor, cand_to_user: Tensor
    ) -> dict[str, Tensor]:
        seen, _ = ikbo.target_attention(query, history, history * 0.5, cand_to_user)
        gated = ikbo.expand(gate, cand_to_user) * price + price
        return {"seen": seen, "gated": gated, "scaled": gate * 2 + 1}


@pytest.fixture(scope="module")
def exact_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mates") / "exact.pt2"
    torch.manual_seed(5)
    ikbo.package(
        Exact().eval(),
        path,
        example_inputs={
            "query": torch.randn(9, 1, HEADS, WIDTH),
            "history": torch.randn(3, HISTORY, HEADS, WIDTH),
            "gate": torch.randn(3, 7),
            "price": torch.randn(9, 7),
            "cand_to_user": torch.randint(3, (9,), dtype=torch.int32),
        },
        roles={
            "query": "candidate",
            "history": "user",
            "gate": "user",
            "price": "candidate",
            "cand_to_user": "index",
        },
        max_users=16,
        max_candidates=2048,
    )
    return path


def exact_rows(num_users: int, num_candidates: int) -> Request:
    return {
        "query": torch.randn(num_candidates, 1, HEADS, WIDTH),
        "history": torch.randn(num_users, HISTORY, HEADS, WIDTH),
        "gate": torch.randn(num_users, 7),
        "price": torch.randn(num_candidates, 7),
    }


def ranker_rows(num_users: int, num_candidates: int) -> Request:
    _, example = history_ranker()
    users = torch.randint(len(example["user_id"]), (num_users,))
    items = torch.randint(len(example["item_id"]), (num_candidates,))
    is_user = {"user_id", "history", "history_length"}
    return {name: x[users if name in is_user else items] for name, x in example.items()}


def make_requests(rows: Callable[[int, int], Request], sizes: Iterable[tuple[int, int]]):
    requests = []
    for num_users, num_candidates in sizes:
        index = torch.randint(num_users, (num_candidates,), dtype=torch.int32)
        requests.append(rows(num_users, num_candidates) | {"cand_to_user": index})
    return requests


def merge(manifest: Manifest, requests: list[Request]) -> Request:
    """As `runtime::batch` does: rows one behind the other, the index moved by the users before."""
    users = next(spec.name for spec in manifest.inputs if spec.role == "user")
    first, moved = 0, []
    for request in requests:
        moved.append(request | {"cand_to_user": request["cand_to_user"] + first})
        first += len(request[users])
    return {spec.name: torch.cat([x[spec.name] for x in moved]) for spec in manifest.inputs}


def alone_and_merged(
    package: Path, rows: Callable[[int, int], Request], seed: int
) -> Iterable[tuple[str, Tensor, Tensor]]:
    """Each output of each request of a random mix, from a run of its own and from one of all."""
    torch.manual_seed(seed)
    manifest = read_manifest(package)
    compiled = torch._inductor.aoti_load_package(str(package))
    mixes = [[(1, 1), (1, 500)], [(1, 70)] * 8, [(4, 3), (1, 1000), (2, 33), (1, 7)], [(1, 1)] * 16]
    for sizes in mixes:
        requests = make_requests(rows, sizes)
        together = merge(manifest, requests)
        whole = compiled(*(together[spec.name] for spec in manifest.inputs))
        users = candidates = 0
        for request, (num_users, num_candidates) in zip(requests, sizes, strict=True):
            alone = compiled(*(request[spec.name] for spec in manifest.inputs))
            for spec, mine, all_rows in zip(manifest.outputs, alone, whole, strict=True):
                first, count = (
                    (users, num_users) if spec.role == "user" else (candidates, num_candidates)
                )
                yield spec.name, mine, all_rows[first : first + count]
            users += num_users
            candidates += num_candidates


@pytest.mark.parametrize("seed", range(3))
def test_what_the_kernels_promise_is_bitwise_equal(exact_package: Path, seed: int) -> None:
    names = set()
    for name, alone, merged in alone_and_merged(exact_package, exact_rows, seed):
        names.add(name)
        assert torch.equal(alone.view(torch.int32), merged.view(torch.int32)), name
    assert names == {"seen", "gated", "scaled"}


def test_the_rest_is_equal_but_for_rounding(transformed_package: Path) -> None:
    """Matrix products choose their order of summation by the size of the run."""
    limit = 16 * torch.finfo(torch.float32).eps
    for name, alone, merged in alone_and_merged(transformed_package, ranker_rows, 7):
        assert (alone - merged).abs().max() <= limit, name
