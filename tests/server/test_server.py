# SPDX-License-Identifier: Apache-2.0
"""The protocol as clients use it: the unmodified tritonclient, plain HTTP, several at once."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from ikbo.transform import TransformedModule
from tests.server.conftest import StartServer
from tests.server.serving import (
    MAX_CANDIDATES,
    MAX_USERS,
    REPOSITORY,
    WIRE_NAMES,
    Arrays,
    Served,
    Server,
    eager,
    make_inputs,
    make_mixed_inputs,
    running,
    server_path,
)


def infer_inputs(inputs: Arrays, binary: bool = True) -> list[triton.InferInput]:
    described = []
    for name, x in inputs.items():
        described.append(triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        described[-1].set_data_from_numpy(x, binary_data=binary)
    return described


def assert_answer(result: triton.InferResult, module, inputs: Arrays, names=None) -> None:
    expected = eager(module, inputs)
    for name in names or expected:
        np.testing.assert_allclose(result.as_numpy(name), expected[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def client(server: Server):
    with triton.InferenceServerClient(server.address) as client:
        yield client


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("ranker") and client.is_model_ready("ranker", "3")
    assert not client.is_model_ready("ranker", "4") and not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("ranker", "3")
    assert metadata["versions"] == ["3"]
    described = {x["name"]: (x["datatype"], x["shape"]) for x in metadata["inputs"]}
    assert described == {
        "x_user": ("FP32", [-1, 16]),
        "x_cand": ("FP32", [-1, 48]),
        "genre": ("INT64", [-1]),
        "is_new": ("BOOL", [-1]),
        "cand_to_user": ("INT32", [-1]),
    }
    assert [x["name"] for x in metadata["outputs"]] == ["score", "profile"]
    assert metadata["parameters"]["max_users"] == MAX_USERS
    assert metadata["parameters"]["max_candidates"] == MAX_CANDIDATES


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("num_users, num_candidates", [(1, 1), (1, 37), (3, 100), (8, 5)])
def test_infer(client, ranker: Served, num_users: int, num_candidates: int, binary: bool) -> None:
    inputs = make_inputs(num_users, num_candidates, seed=num_candidates)
    outputs = [triton.InferRequestedOutput(x, binary_data=binary) for x in ("score", "profile")]
    result = client.infer(
        "ranker", infer_inputs(inputs, binary), outputs=outputs, request_id="request 7"
    )
    assert_answer(result, ranker.module, inputs)
    assert result.get_response()["id"] == "request 7"
    assert result.get_response()["model_version"] == "3"


def test_outputs_are_the_ones_asked_for(client, ranker: Served) -> None:
    inputs = make_inputs(2, 9, seed=1)
    everything = client.infer("ranker", infer_inputs(inputs))
    assert_answer(everything, ranker.module, inputs)
    assert all("data" not in output for output in everything.get_response()["outputs"])
    wanted = [
        triton.InferRequestedOutput("profile", binary_data=False),
        triton.InferRequestedOutput("score", binary_data=True),
    ]
    mixed = client.infer("ranker", infer_inputs(inputs), outputs=wanted)
    assert_answer(mixed, ranker.module, inputs)
    assert [x["name"] for x in mixed.get_response()["outputs"]] == ["profile", "score"]
    one = client.infer("ranker", infer_inputs(inputs), outputs=wanted[:1])
    assert [x["name"] for x in one.get_response()["outputs"]] == ["profile"]


def test_one_user_needs_no_index(client, ranker: Served) -> None:
    inputs = make_inputs(1, 20, seed=2)
    without = {name: x for name, x in inputs.items() if name != "cand_to_user"}
    assert_answer(client.infer("ranker", infer_inputs(without)), ranker.module, inputs)


def test_users_without_candidates(client, ranker: Served) -> None:
    inputs = make_inputs(3, 0, seed=3)
    result = client.infer("ranker", infer_inputs(inputs))
    assert result.as_numpy("score").shape == (0, 2)
    np.testing.assert_allclose(
        result.as_numpy("profile"), eager(ranker.module, inputs)["profile"], rtol=1e-4, atol=1e-5
    )


def test_a_model_of_candidates_alone(client, plain: Served) -> None:
    inputs = {"x": np.arange(20, dtype=np.float32).reshape(5, 4)}
    assert_answer(client.infer("plain", infer_inputs(inputs)), plain.module, inputs)


def test_a_transformed_model(transformed: TransformedModule, transformed_package: Path) -> None:
    inputs = make_mixed_inputs()
    with running([transformed_package]) as server:
        client = triton.InferenceServerClient(server.address)
        result = client.infer("model", infer_inputs(inputs))
        client.close()
    with torch.no_grad():
        expected = transformed(**{name: torch.from_numpy(x) for name, x in inputs.items()})
    for name in ("click", "like"):
        np.testing.assert_allclose(result.as_numpy(name), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reply", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_compression(client, ranker: Served, request_coding: str, reply, binary: bool) -> None:
    inputs = make_inputs(2, 500, seed=4)
    outputs = [triton.InferRequestedOutput(x, binary_data=binary) for x in ("score", "profile")]
    result = client.infer(
        "ranker",
        infer_inputs(inputs, binary),
        outputs=outputs,
        request_compression_algorithm=request_coding,
        response_compression_algorithm=reply,
    )
    assert_answer(result, ranker.module, inputs)


@pytest.mark.parametrize(
    "accepted, coding",
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("br, gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("identity, gzip;q=0.9", None),
        ("gzip;q=0", None),
        ("br", None),
        (None, None),
    ],
)
def test_replies_come_as_the_client_accepts_them(server: Server, accepted, coding) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    for _ in range(2):  # on one connection
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        body = response.read()
        assert response.headers["Content-Encoding"] == coding
        if coding == "gzip":
            body = gzip.decompress(body)
        elif coding == "deflate":
            body = zlib.decompress(body)
        assert b"# TYPE ikbo_requests_total counter" in body
    # What fits a packet anyway stays as it is.
    connection.request("GET", "/v2/health/live", headers=headers)
    response = connection.getresponse()
    assert response.headers["Content-Encoding"] is None
    assert response.read() == b'{"live":true}'
    connection.close()


def test_curl_with_expect_continue(server: Server, ranker: Served) -> None:
    inputs = make_inputs(1, 3, seed=5)
    body = json.dumps(
        {
            "inputs": [
                {
                    "name": name,
                    "datatype": WIRE_NAMES[x.dtype.name],
                    "shape": x.shape,
                    "data": x.tolist(),
                }
                for name, x in inputs.items()
            ]
        }
    )
    url = f"http://{server.address}/v2/models/ranker/infer"
    command = ["curl", "-sS", "--max-time", "20", "-H", "Expect: 100-continue", "-d", "@-", url]
    reply = json.loads(subprocess.run(command, input=body, text=True, capture_output=True).stdout)
    score = next(x for x in reply["outputs"] if x["name"] == "score")
    expected = eager(ranker.module, inputs)["score"]
    np.testing.assert_allclose(
        np.reshape(score["data"], score["shape"]), expected, rtol=1e-4, atol=1e-5
    )


def metrics(server: Server) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = response.read().decode()
    connection.close()
    return {m[1]: float(m[2]) for m in re.finditer(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


def test_many_clients_get_their_own_answers(start_server: StartServer, ranker: Served) -> None:
    num_clients, num_requests, num_long_runs = 16, 6, 8
    server = start_server()

    def ask(number: int) -> None:
        with triton.InferenceServerClient(server.address) as client:
            for i in range(num_requests):
                inputs = make_inputs(1 + (number + i) % 3, 4 + number, seed=97 * number + i)
                result = client.infer("ranker", infer_inputs(inputs), request_id=f"{number} {i}")
                assert result.get_response()["id"] == f"{number} {i}"
                assert_answer(result, ranker.module, inputs)

    def ask_for_long() -> None:
        inputs = make_inputs(1, num_long_runs * MAX_CANDIDATES, seed=1)
        with triton.InferenceServerClient(server.address) as client:
            assert_answer(client.infer("ranker", infer_inputs(inputs)), ranker.module, inputs)

    with ThreadPoolExecutor(num_clients + 1) as pool:
        first = pool.submit(ask_for_long)  # its runs are full; others wait behind them
        list(pool.map(ask, range(num_clients)))
        first.result()
    counts = metrics(server)
    labels = 'model="ranker",version="3"'
    total = num_clients * num_requests + num_long_runs
    assert counts[f'ikbo_requests_total{{{labels},code="200"}}'] == num_clients * num_requests + 1
    assert counts[f"ikbo_batch_requests_sum{{{labels}}}"] == total
    assert counts[f"ikbo_queue_seconds_count{{{labels}}}"] == total
    assert counts[f"ikbo_run_seconds_count{{{labels}}}"] < total, "no two requests were merged"
    assert (
        counts[f'ikbo_batch_users_bucket{{{labels},le="{MAX_USERS}"}}']
        == (counts[f"ikbo_batch_users_count{{{labels}}}"])
    )


def test_a_full_queue_refuses_and_serves_on(start_server: StartServer, ranker: Served) -> None:
    server = start_server("--max-queue", "1")
    inputs = make_inputs(1, MAX_CANDIDATES, seed=6)

    def ask(_: int) -> str:
        with triton.InferenceServerClient(server.address, network_timeout=60) as client:
            try:
                assert_answer(client.infer("ranker", infer_inputs(inputs)), ranker.module, inputs)
            except InferenceServerException as refusal:
                assert "--max-queue 1" in refusal.message()
                return refusal.status()
        return "200"

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(ask, range(8)))
    assert set(statuses) == {"200", "429"}
    assert ask(0) == "200"


def test_a_timeout_in_the_queue(client, ranker: Served) -> None:
    inputs = make_inputs(1, 4, seed=4)
    with pytest.raises(InferenceServerException, match="us in the queue") as refusal:
        client.infer("ranker", infer_inputs(inputs), timeout=1)
    assert refusal.value.status() == "504"
    in_time = client.infer("ranker", infer_inputs(inputs), timeout=60_000_000)
    assert_answer(in_time, ranker.module, inputs)


def test_help_and_version_and_documented_flags() -> None:
    text = subprocess.run([str(server_path()), "--help"], capture_output=True, text=True)
    assert text.returncode == 0
    flags = set(re.findall(r"--[a-z-]+", text.stdout))
    document = (REPOSITORY / "docs/serving.md").read_text()
    table = document.split("## Flags")[1].split("## Stopping")[0]
    assert set(re.findall(r"`(--[a-z-]+)", table)) == flags
    version = subprocess.run([str(server_path()), "--version"], capture_output=True, text=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version.stdout)


def test_every_metric_is_documented(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    documented = set(re.findall(r"`(ikbo_[a-z_]+)`", (REPOSITORY / "docs/serving.md").read_text()))
    assert names == documented
