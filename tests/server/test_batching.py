# SPDX-License-Identifier: Apache-2.0
"""Requests that fill more than a run, share a user or cannot be in time, by both protocols."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.server.conftest import StartServer
from tests.server.serving import (
    MAX_CANDIDATES,
    MAX_USERS,
    WIRE_NAMES,
    Arrays,
    Served,
    Server,
    eager,
    make_inputs,
    place,
    running,
)
from tests.server.test_server import metrics

LABELS = 'model="ranker",version="3"'

# How a client asks for these inputs, with parameters of `infer`.
Ask = Callable[..., Any]


def asking(module: Any, address: str, **options: Any) -> Ask:
    def ask(inputs: Arrays, model: str = "ranker", **parameters: Any) -> Any:
        with module.InferenceServerClient(address, **options) as client:
            described = []
            for name, x in inputs.items():
                described.append(module.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
                described[-1].set_data_from_numpy(x)
            return client.infer(model, described, **parameters)

    return ask


def http_and_grpc(server: Server) -> list[Ask]:
    return [
        asking(tritonclient.http, server.address, network_timeout=60.0),
        asking(tritonclient.grpc, server.grpc_address),
    ]


def assert_answer(result: Any, ranker: Served, inputs: Arrays) -> None:
    for name, expected in eager(ranker.module, inputs).items():
        np.testing.assert_allclose(result.as_numpy(name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_requests_over_the_package_are_split(
    start_server: StartServer, ranker: Served, order: str
) -> None:
    server = start_server("--workers", "2", "--max-batch-candidates", "1000")
    sizes = [(1, 2 * MAX_CANDIDATES + 1), (3, 2500), (3 * MAX_USERS + 1, 1500), (20, 0)]
    for ask in http_and_grpc(server):
        for seed, (num_users, num_candidates) in enumerate(sizes):
            inputs = make_inputs(num_users, num_candidates, seed)
            if order == "sorted":
                inputs["cand_to_user"] = np.sort(inputs["cand_to_user"])
            assert_answer(ask(inputs), ranker, inputs)
    counts = metrics(server)
    assert counts[f"ikbo_split_requests_total{{{LABELS}}}"] == 2 * len(sizes)
    for size, limit in (("users", MAX_USERS), ("candidates", 1024)):
        runs = f"ikbo_batch_{size}"
        assert (
            counts[f'{runs}_bucket{{{LABELS},le="{limit}"}}'] == counts[f"{runs}_count{{{LABELS}}}"]
        )


def test_a_split_request_is_within_the_memory(start_server: StartServer, ranker: Served) -> None:
    inputs = make_inputs(1, 3000, seed=1)
    size = sum(x.nbytes for x in inputs.values())
    flags = ("--max-batch-candidates", "500", "--max-request-memory")
    ask = http_and_grpc(start_server(*flags, str(size + 20_000)))[0]
    with pytest.raises(InferenceServerException, match="--max-request-memory"):
        ask(inputs)  # its outputs take 24 kB
    assert_answer(ask(make_inputs(1, 400, seed=2)), ranker, make_inputs(1, 400, seed=2))
    ask = http_and_grpc(start_server(*flags, str(size + 30_000)))[0]
    for _ in range(3):
        assert_answer(ask(inputs), ranker, inputs)


def test_a_user_of_many_requests_has_one_row(start_server: StartServer, ranker: Served) -> None:
    server = start_server("--max-batch-users", "1")
    user = make_inputs(1, 1, seed=5)["x_user"]
    long = make_inputs(1, 8 * MAX_CANDIDATES, seed=6)
    num_clients = 24

    def ask_once(number: int) -> None:
        inputs = make_inputs(1, 1 + number % 3, seed=number) | {"x_user": user}
        if number % 5 == 0:
            inputs["x_user"] = user + 1  # somebody else under the same key
        ask = http_and_grpc(server)[number % 2]
        assert_answer(ask(inputs, parameters={"user_key": "ann"}), ranker, inputs)

    counts: dict[str, float] = {}
    shared = f"ikbo_shared_users_total{{{LABELS}}}"
    end = time.monotonic() + 60
    with ThreadPoolExecutor(num_clients + 1) as pool:
        # Many short requests wait for the runs of a long one; where they all come too late, again.
        while counts.get(shared, 0) == 0 and time.monotonic() < end:
            first = pool.submit(http_and_grpc(server)[0], long)
            list(pool.map(ask_once, range(num_clients)))
            assert_answer(first.result(), ranker, long)
            counts = metrics(server)
    runs = counts[f"ikbo_run_seconds_count{{{LABELS}}}"]
    # At most one user is in a run: without sharing, no two requests would be.
    assert counts[shared] == counts[f"ikbo_batch_requests_sum{{{LABELS}}}"] - runs > 0


def test_a_model_that_is_switched_splits_shares_and_counts_on(
    ranker: Served, tmp_path: Path
) -> None:
    """Loaded again under load: no request is lost, wrong or not counted."""
    package = tmp_path / "ranker.pt2"
    place(ranker.package, package, version="3")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    flags += ("--max-batch-users", "1", "--max-batch-candidates", "400")
    user = make_inputs(1, 1, seed=5)["x_user"]
    is_over = threading.Event()

    def ask_often(number: int) -> int:
        ask = http_and_grpc(server)[number % 2]
        for i in itertools.count():
            num_candidates = 450 if number < 2 else number
            inputs = make_inputs(1, num_candidates, seed=100 * number + i) | {"x_user": user}
            parameters = {"user_key": "ann"}
            assert_answer(ask(inputs, parameters=parameters, timeout=60_000_000), ranker, inputs)
            if is_over.is_set():
                return i + 1
        raise AssertionError

    num_clients = 10
    with running([], *flags) as server, ThreadPoolExecutor(num_clients) as pool:
        asked = [pool.submit(ask_often, number) for number in range(num_clients)]
        try:
            with tritonclient.http.InferenceServerClient(server.address) as client:
                for _ in range(3):
                    place(ranker.package, package, version="3")
                    client.load_model("ranker")
        finally:
            is_over.set()
        num_asked = [future.result() for future in asked]
        counts = metrics(server)
        assert sum("event=model_loaded" in line for line in server.log) == 4
    assert counts[f'ikbo_requests_total{{{LABELS},code="200"}}'] == sum(num_asked)
    assert counts[f"ikbo_request_seconds_count{{{LABELS}}}"] == sum(num_asked)
    num_split = num_asked[0] + num_asked[1]
    assert counts[f"ikbo_split_requests_total{{{LABELS}}}"] == num_split
    assert counts[f"ikbo_batch_requests_sum{{{LABELS}}}"] == sum(num_asked) + num_split
    assert counts[f"ikbo_shared_users_total{{{LABELS}}}"] > 0


def test_a_deadline_that_cannot_be_kept_is_refused_at_once(
    start_server: StartServer, ranker: Served
) -> None:
    server = start_server()
    inputs = make_inputs(1, 10 * MAX_CANDIDATES, seed=3)
    for ask in http_and_grpc(server):
        assert_answer(ask(inputs), ranker, inputs)
        begin = time.monotonic()
        assert_answer(ask(inputs), ranker, inputs)
        took = time.monotonic() - begin
        with pytest.raises(InferenceServerException, match="must leave time for") as refused:
            ask(inputs, timeout=2000)
        assert refused.value.status() in {"504", "StatusCode.DEADLINE_EXCEEDED"}
        assert time.monotonic() - begin < 2 * took
        assert_answer(ask(inputs, timeout=600_000_000), ranker, inputs)
