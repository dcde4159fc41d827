# SPDX-License-Identifier: Apache-2.0
"""The three packages that are compared: the same net, options, ranges and server for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor, nn

import ikbo
from examples.movielens.data import CANDIDATE_INPUTS, USER_INPUTS, MovieLens
from examples.movielens.model import Ranker
from examples.movielens.serving import MODEL
from examples.movielens.split import SplitRanker, replicate
from examples.movielens.train import make_batch

NUM_CANDIDATES = 500
MAX_MERGED = 4  # requests of 500 candidates in one run
MAX_CANDIDATES = MAX_MERGED * NUM_CANDIDATES


def example_inputs(data: MovieLens) -> dict[str, Tensor]:
    """Inputs of `SplitRanker` from 16 held-out requests with histories of all lengths."""
    requests = sorted(data.requests(held_out=True), key=lambda request: request.num_history)
    chosen = requests[:: max(1, len(requests) // 16)][:16]
    return make_batch(data, chosen, 8, np.random.default_rng(0), history=True).inputs


def package_replicated(net: Ranker, data: MovieLens, path: Path) -> None:
    """The unmodified net: every input, the user's too, has one row a candidate."""
    inputs = replicate(example_inputs(data))
    roles = dict.fromkeys(inputs, "candidate")
    compile_package(net, path, inputs, roles, max_users=None)


def package_split(net: Ranker, data: MovieLens, path: Path) -> None:
    """The hand-split net."""
    inputs = example_inputs(data)
    roles = dict.fromkeys(USER_INPUTS, "user") | dict.fromkeys(CANDIDATE_INPUTS, "candidate")
    roles["cand_to_user"] = "index"
    compile_package(SplitRanker(net).eval(), path, inputs, roles, max_users=MAX_MERGED)


def compile_package(
    module: nn.Module,
    path: Path,
    inputs: dict[str, Tensor],
    roles: dict[str, str],
    max_users: int | None,
) -> None:
    ikbo.package(
        module,
        path,
        example_inputs=inputs,
        roles=roles,
        max_users=max_users,
        max_candidates=MAX_CANDIDATES,
        name=MODEL,
        progress=show_progress,
    )


def show_progress(text: str) -> None:
    print(f"    {text}", flush=True)


def package_ikbo(net: Ranker, data: MovieLens, path: Path) -> None:
    """The unmodified net again, transformed; report and specification land beside `path`."""
    transformed = ikbo.transform(
        net,
        replicate(example_inputs(data)),
        request_only=USER_INPUTS,
        max_users=MAX_MERGED,
        max_candidates=MAX_CANDIDATES,
    )
    path.with_suffix(".report.txt").write_text(transformed.report(), encoding="utf-8")
    path.with_suffix(".spec.json").write_text(transformed.spec.to_json(), encoding="utf-8")
    ikbo.package(transformed, path, name=MODEL, progress=show_progress)
