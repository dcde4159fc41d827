# SPDX-License-Identifier: Apache-2.0
"""Runs on a GPU in this process: with CUDA graphs and without, and two at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ikbo.runtime
from bench.serve.late_ranking import make_ids
from ikbo.testing.bench import interleaved

GRAPHS = 256
# Users and candidates of steps of the grid, and of the emptiest runs of some of them.
SIZES = ((1, 16), (1, 64), (1, 128), (1, 256), (1, 512), (2, 1024), (4, 2048))
PADDED = {(1, 57): (1, 64), (1, 113): (1, 128), (1, 225): (1, 256), (3, 225): (4, 256)}
ROUNDS = 41
OVERLAP_SIZE = (1, 500)
OVERLAP_SECONDS = 1.5


def requests_of(num_users: int, num_candidates: int, seed: int) -> dict[str, np.ndarray]:
    inputs = {name: x.numpy() for name, x in make_ids(num_users, num_candidates, seed).items()}
    index = np.arange(num_candidates) * num_users // num_candidates
    return inputs | {"cand_to_user": index.astype(np.int32)}


def latencies_ms(
    models: Mapping[str, ikbo.runtime.Model], size: tuple[int, int]
) -> dict[str, float]:
    inputs = requests_of(*size, seed=5)
    return interleaved({name: partial(model, **inputs) for name, model in models.items()}, ROUNDS)


def graph_rows(package: Path) -> list[dict[str, Any]]:
    """A row for each size: `launches` is the share of a run without a graph that a graph saves;
    `padding` what the run of a step takes over the emptiest one that is padded to it.
    """
    models = {
        "ours": ikbo.runtime.Model(package, cuda_graphs=GRAPHS),
        "without_graphs": ikbo.runtime.Model(package),
    }
    rows = []
    sizes = dict.fromkeys((*SIZES, *PADDED, *PADDED.values()))
    found = {size: latencies_ms(models, size) for size in sizes}
    for size, peers in found.items():
        case = {"what": "graph_latency", "net": "late_ranking", "U": size[0], "B": size[1]}
        ours, plain = peers["ours"], peers["without_graphs"]
        row = {"case": case, "unit": "ms", "ours": ours, "peers": {"without_graphs": plain}}
        row["launches"] = 1 - ours / plain
        if size in PADDED:
            row["padded_to"] = list(PADDED[size])
            row["padding"] = found[PADDED[size]]["without_graphs"] / plain - 1
        rows.append(row)
    return rows


def runs_per_second(model: ikbo.runtime.Model, num_threads: int) -> float:
    inputs = requests_of(*OVERLAP_SIZE, seed=6)
    counts = [0] * num_threads
    begin = time.perf_counter()

    def work(thread: int) -> None:
        while time.perf_counter() - begin < OVERLAP_SECONDS:
            model(**inputs)
            counts[thread] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def overlap_row(package: Path) -> dict[str, Any]:
    """Two sessions, one of which copies while the other computes, against one."""
    model = ikbo.runtime.Model(package, num_sessions=2)
    runs_per_second(model, 2)  # warms both up
    users, candidates = OVERLAP_SIZE
    return {
        "case": {"what": "overlap", "net": "late_ranking", "U": users, "B": candidates},
        "unit": "runs/s",
        "ours": runs_per_second(model, 2),
        "peers": {"one_session": runs_per_second(model, 1)},
    }
