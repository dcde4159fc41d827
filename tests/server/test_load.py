# SPDX-License-Identifier: Apache-2.0
"""`ikbo-load`: what it counts, and that a server that stalls cannot hide it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.serve.processes import Histogram, read_histograms
from bench.serve.workloads import write_requests
from tests.server.conftest import StartServer
from tests.server.serving import Served, Server, make_inputs, server_path, wait_until

RATE, SECONDS = 50, 2


def run_load(port: int, requests: Path, *flags: str, model: str = "ranker") -> dict[str, Any]:
    command = [str(server_path().with_name("ikbo-load")), f"--port={port}", f"--seconds={SECONDS}"]
    command += [f"--requests={requests}", f"--model={model}", f"--rate={RATE}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def port_of(server: Server, protocol: str) -> int:
    address = server.address if protocol == "http" else server.grpc_address
    return int(address.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def requests(ranker: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cases = []
    for seed in range(3):
        inputs = {name: torch.from_numpy(x) for name, x in make_inputs(2, 8, seed).items()}
        with torch.no_grad():
            cases.append((inputs, ranker.module(*inputs.values())))
    return write_requests("ranker", cases, tmp_path_factory.mktemp("requests"))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_counts_and_checks_answers(
    server: Server, requests: dict[str, Path], protocol: str
) -> None:
    flags = (f"--protocol={protocol}", "--warm-up-seconds=0.5", "--tolerance=1e-3")
    figures = run_load(port_of(server, protocol), requests[protocol], *flags)
    assert figures["errors"] == {}
    assert 0.5 * RATE * SECONDS < figures["answered"] < 1.5 * RATE * SECONDS
    assert figures["achieved_rate"] == pytest.approx(figures["answered"] / SECONDS, rel=0.2)
    latency = figures["latency_us"]
    assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
    assert 0 < figures["max_difference"] < 1e-3
    assert figures["lateness_us"]["p50"] < latency["p50"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_wrong_answer_is_no_answer(
    server: Server, requests: dict[str, Path], tmp_path: Path, protocol: str
) -> None:
    listed = json.loads(requests[protocol].read_text())["requests"]
    for item in listed:
        for key in ("body", "expected"):
            data = (requests[protocol].parent / item[key]).read_bytes()
            (tmp_path / item[key]).write_bytes(data)
    first = tmp_path / listed[0]["expected"]
    first.write_bytes(first.read_bytes()[:-4] + b"\0\0\0\x42")  # 32.0
    changed = tmp_path / "requests.json"
    changed.write_text(json.dumps({"requests": listed}))
    flags = (f"--protocol={protocol}", "--tolerance=1e-3")
    figures = run_load(port_of(server, protocol), changed, *flags)
    wrong = figures["errors"].pop("wrong_answer")
    assert figures["errors"] == {} and figures["max_difference"] > 1
    assert wrong == pytest.approx(figures["answered"] / 2, abs=2)


def test_refusals_are_counted_by_kind(server: Server, requests: dict[str, Path]) -> None:
    figures = run_load(port_of(server, "http"), requests["http"], model="absent")
    assert figures["answered"] == 0 and set(figures["errors"]) == {"status_404"}
    with_http_body = run_load(port_of(server, "grpc"), requests["http"], "--protocol=grpc")
    assert set(with_http_body["errors"]) == {"grpc_3"}


@contextmanager
def stalling_server(at: int, seconds: float) -> Iterator[int]:
    """Answers at once, but for one request, before which it rests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        count = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.count += 1
            if Handler.count == at:
                time.sleep(seconds)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_stall_counts_for_all_that_were_due_in_it(requests: dict[str, Path]) -> None:
    stall = 1.0
    with stalling_server(at=20, seconds=stall) as port:
        flags = ("--connections=1", "--ignore-answers")
        figures = run_load(port, requests["http"], *flags)
    # About half of the requests were due during the stall: they waited half of it on average.
    assert figures["errors"] == {}
    assert figures["latency_us"]["max"] > 0.8e6 * stall
    assert figures["latency_us"]["p90"] > 0.5e6 * stall
    assert figures["lateness_us"]["p90"] > 0.5e6 * stall


def test_a_slow_answer_is_a_timeout(requests: dict[str, Path]) -> None:
    with stalling_server(at=20, seconds=0.5) as port:
        flags = ("--connections=4", "--ignore-answers", "--timeout-ms=200")
        figures = run_load(port, requests["http"], *flags)
    assert figures["errors"] == {"timeout": 1}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_server_measures_what_it_adds(
    start_server: StartServer, requests: dict[str, Path], protocol: str
) -> None:
    server = start_server()
    flags = (f"--protocol={protocol}", "--ignore-answers")
    figures = run_load(port_of(server, protocol), requests[protocol], *flags)

    def added() -> Histogram:
        return read_histograms(port_of(server, "http"))["ikbo_overhead_seconds"]

    # It is observed once the answer is sent, which the client may see before.
    wait_until(lambda: added().count >= figures["answered"])
    seen = added()
    assert seen.count == figures["answered"] and figures["errors"] == {}
    assert 1e-6 < seen.mean() < figures["latency_us"]["max"] / 1e6
    assert seen.quantile(0.5) <= seen.quantile(0.99)


def test_unusable_requests_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    load = [str(server_path().with_name("ikbo-load")), "--port=1", "--rate=1", "--seconds=1"]
    for text, part in (
        ("{}", "must be a list of requests"),
        ('{"requests": []}', "must have at least one request; got none"),
        ('{"requests": [{"body": "absent"}]}', "absent must be a file that can be read"),
    ):
        path.write_text(text)
        command = [*load, f"--requests={path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and part in done.stderr, done.stderr


def test_quantiles_of_a_histogram() -> None:
    inf = float("inf")
    before = Histogram({1.0: 5.0, 2.0: 5.0, inf: 5.0}, 2.0, 5.0)
    after = Histogram({1.0: 15.0, 2.0: 25.0, inf: 25.0}, 27.0, 25.0)
    change = after - before
    assert change.mean() == 1.25
    assert change.quantile(0.25) == 0.5
    assert change.quantile(0.75) == 1.5
    assert Histogram({1.0: 1.0, inf: 2.0}, 9.0, 2.0).quantile(0.9) == 1.0
