# SPDX-License-Identifier: Apache-2.0
"""More requests than the server can run: refusals come at once, and health is never held up."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.server.conftest import StartServer
from tests.server.serving import (
    MAX_CANDIDATES,
    WIRE_NAMES,
    Arrays,
    Served,
    Server,
    eager,
    make_inputs,
)

REFUSAL_SECONDS = 0.010  # by the server's own clock: its clients may take all of this machine
NUM_CLIENTS = 6
NUM_PROBES = 60


def client_of(server: Server, protocol: str):
    if protocol == "http":
        return tritonclient.http.InferenceServerClient(server.address, network_timeout=60)
    return tritonclient.grpc.InferenceServerClient(server.grpc_address)


def described(protocol: str, inputs: Arrays):
    module = tritonclient.http if protocol == "http" else tritonclient.grpc
    tensors = []
    for name, x in inputs.items():
        tensors.append(module.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        tensors[-1].set_data_from_numpy(x)
    return tensors


def outcome_of(call: Callable[[], object]) -> str:
    """ "200", or the status of the refusal."""
    try:
        call()
    except InferenceServerException as refusal:
        return refusal.status()
    return "200"


@contextmanager
def flood(server: Server, ranker: Served, run_seconds: list[float]) -> Iterator[Counter[str]]:
    """Clients that ask for the longest runs again and again, each as soon as it has an answer."""
    inputs = make_inputs(1, MAX_CANDIDATES, seed=6)
    expected = eager(ranker.module, inputs)["score"]
    statuses: Counter[str] = Counter()
    is_over = threading.Event()

    def ask() -> None:
        with client_of(server, "http") as client:
            tensors = described("http", inputs)
            while not is_over.is_set():
                begin = time.perf_counter()
                try:
                    score = client.infer("ranker", tensors).as_numpy("score")
                    np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
                    statuses["200"] += 1
                    run_seconds.append(time.perf_counter() - begin)
                except InferenceServerException as refusal:
                    statuses[refusal.status()] += 1
                    time.sleep(0.005)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask) for _ in range(NUM_CLIENTS)]
        try:
            yield statuses
        finally:
            is_over.set()
        for client in clients:
            client.result()


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_refusals_come_at_once_and_health_goes_on(
    start_server: StartServer, ranker: Served, protocol: str
) -> None:
    server = start_server("--max-queue", "1", "--log-level", "debug")
    refused = "429" if protocol == "http" else str(grpc.StatusCode.RESOURCE_EXHAUSTED)
    small = described(protocol, make_inputs(1, 2, seed=1))
    refusals: list[float] = []
    health: list[float] = []
    runs: list[float] = []
    with flood(server, ranker, runs) as statuses, client_of(server, protocol) as client:
        deadline = time.monotonic() + 60
        while len(refusals) < NUM_PROBES and time.monotonic() < deadline:
            begin = time.perf_counter()
            outcome = outcome_of(lambda: client.infer("ranker", small))
            assert outcome in ("200", refused)
            if outcome == refused:
                refusals.append(time.perf_counter() - begin)
            health.append(seconds_of(client.is_server_live))
            health.append(seconds_of(client.is_server_ready))
    assert len(refusals) == NUM_PROBES, statuses
    assert statuses["200"] > 0 and statuses["429"] > 0 and set(statuses) == {"200", "429"}
    # Neither waits for a run.
    assert statistics.median(refusals) < statistics.median(runs) / 2
    assert statistics.quantiles(health, n=20)[-1] < statistics.median(runs)
    target = r"/v2/models/\S+" if protocol == "http" else r"/inference\S+/ModelInfer"
    by_server = re.findall(rf"target={target} status=429 us=(\d+)", "".join(server.log))
    assert by_server and statistics.median(map(int, by_server)) < 1e6 * REFUSAL_SECONDS
    assert client_of(server, "http").is_server_ready()
