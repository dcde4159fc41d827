# SPDX-License-Identifier: Apache-2.0
"""What `bench.bench_serve --device cuda` serves: the late-ranking net of `examples/nets`, full-size
in fp16, as the pass makes it and with users replicated.

A candidate's embeddings are 436 KiB; no client sends those. Behind a table of embeddings rows are
ids, as they are where ranking models are served: 3.4 KB for a user, 1.7 KB for a candidate.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import ikbo
from bench.serve.contest import Contest
from bench.serve.search import Search
from bench.serve.workloads import NUM_CANDIDATES, NUM_REQUESTS, Workload, write_requests
from examples.movielens.artefacts import REPOSITORY, made_once
from examples.movielens.serving import MODEL
from examples.nets import NETS
from examples.nets.late_ranking import FULL, Config
from examples.nets.net import Ranker
from ikbo._load import ops_library_path

DEVICE = "cuda"
TABLE_ROWS = 32768  # ids of 16 bits
MAX_USERS = 8  # of the packages' runs
MAX_MERGED = 4  # requests of NUM_CANDIDATES in one run of the server
USER_INPUTS = ("fields", "history")
EXAMPLE_ROWS = 64
TOLERANCE = 0.03  # of logits: what 16-bit products of several layers round in another order
CONTEST = Contest(
    "late_ranking",
    "ours",
    [
        "--workers=2",  # one copies while the other computes
        f"--max-batch-users={MAX_MERGED}",
        f"--max-batch-candidates={MAX_MERGED * NUM_CANDIDATES}",
        "--max-queue=1048576",
        "--threads=6",
    ],
    USER_INPUTS,
    Search(2.0, (0.3, 6.0), 6),
    2 * TOLERANCE,  # the package's answers and the expected ones both round
)
_NETS = ("late_ranking", "net")
SOURCES = [Path(__file__), *(REPOSITORY / "examples/nets" / f"{name}.py" for name in _NETS)]


class ByIds(nn.Module):
    """The net of rows of ids, one row a candidate."""

    def __init__(self, net: Ranker, width: int) -> None:
        super().__init__()
        self.net = net
        self.table = nn.Embedding(TABLE_ROWS, width)

    def forward(self, fields: Tensor, history: Tensor, item_fields: Tensor) -> dict[str, Tensor]:
        user = {"fields": self.embedded(fields), "history": self.embedded(history)}
        return {"score": self.net(user, {"fields": self.embedded(item_fields)}).float()}

    def embedded(self, ids: Tensor) -> Tensor:
        return self.table(ids.int())


def build_net(config: Config = FULL, device: str = DEVICE) -> ByIds:
    torch.manual_seed(11)
    dtype = torch.float16 if device == DEVICE else torch.float32
    net = ByIds(NETS["late_ranking"].build(config)[0], config.width)
    return net.to(device=device, dtype=dtype).eval().requires_grad_(False)


def make_ids(
    num_users: int, num_candidates: int, seed: int, config: Config = FULL
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, width: int) -> Tensor:
        return torch.randint(TABLE_ROWS, (rows, width), generator=generator, dtype=torch.int16)

    return {
        "fields": draw(num_users, config.k_user),
        "history": draw(num_users, config.events),
        "item_fields": draw(num_candidates, config.k_cand),
    }


def on(device: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in inputs.items()}


def package_ours(path: Path) -> None:
    net, example = build_net(), on(DEVICE, make_ids(EXAMPLE_ROWS, EXAMPLE_ROWS, 0))
    transformed = ikbo.transform(
        net,
        example,
        request_only=USER_INPUTS,
        max_users=MAX_USERS,
        max_candidates=MAX_USERS * NUM_CANDIDATES,
    )
    ikbo.package(transformed, path, name=MODEL, tolerance=TOLERANCE)


def package_replicated(path: Path) -> None:
    example = on(DEVICE, make_ids(EXAMPLE_ROWS, EXAMPLE_ROWS, 0))
    ikbo.package(
        build_net(),
        path,
        example_inputs=example,
        roles=dict.fromkeys(example, "candidate"),
        max_candidates=MAX_USERS * NUM_CANDIDATES,
        name=MODEL,
        tolerance=TOLERANCE,
    )


MAKERS = {"ours": package_ours, "replicated": package_replicated}


def make_package(name: str, path: Path) -> None:
    """In a process of its own."""
    torch.set_num_threads(6)
    packaging = [ops_library_path(), *(REPOSITORY / "python/ikbo").rglob("*.py")]
    made_once(path, [*SOURCES, *packaging], lambda: MAKERS[name](path))


@torch.no_grad()
def make_cases() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Requests of one user, and what the unmodified net answers. The index is left out."""
    net = build_net()
    cases = []
    for seed in range(1, NUM_REQUESTS + 1):
        inputs = make_ids(1, NUM_CANDIDATES, seed)
        repeated = {
            name: x.expand(NUM_CANDIDATES, -1) if name in USER_INPUTS else x
            for name, x in inputs.items()
        }
        cases.append((inputs, on("cpu", net(**on(DEVICE, repeated)))))
    return cases


def make_workloads() -> dict[str, Workload]:
    """`ours` and `replicated`, made once, both at the same time."""
    folder = REPOSITORY / "build" / "bench-serve-cuda"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"late_ranking-{name}.pt2" for name in MAKERS}
    with ProcessPoolExecutor(len(paths), multiprocessing.get_context("spawn")) as pool:
        made = [pool.submit(make_package, *item) for item in paths.items()]
        requests = write_requests("late", make_cases(), folder, protocols=("http",))
        for job in made:
            job.result()
    return {name: Workload(path, requests) for name, path in paths.items()}
