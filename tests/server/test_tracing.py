# SPDX-License-Identifier: Apache-2.0
"""Trace context in, spans out, and the log: what can be learnt of one request."""

from __future__ import annotations

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import tritonclient.http as triton
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.server.collector import Collector, attributes
from tests.server.conftest import StartServer
from tests.server.serving import MAX_CANDIDATES, WIRE_NAMES, Server, make_inputs
from tests.server.test_grpc import raw_request
from tests.server.test_server import metrics

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "rojo=00f067aa0ba902b7"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


def ask(
    server: Server,
    protocol: str = "http",
    headers: dict[str, str] | None = None,
    inputs: dict[str, np.ndarray] | None = None,
    request_id: str = "",
    timeout: int | None = None,
) -> None:
    inputs = inputs or make_inputs(2, 30, seed=1)
    if protocol == "grpc":
        request = raw_request(inputs)
        request.id = request_id
        with grpc.insecure_channel(server.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stub.ModelInfer(request, metadata=tuple((headers or {}).items()), timeout=60)
        return
    described = []
    for name, x in inputs.items():
        described.append(triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        described[-1].set_data_from_numpy(x)
    own = dict(headers or {})  # the client writes into it
    with triton.InferenceServerClient(server.address) as client:
        client.infer("ranker", described, headers=own, request_id=request_id, timeout=timeout)


def by_name(spans: list[Span]) -> dict[str, Span]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def assert_steps(spans: list[Span]) -> Span:
    """Queue and run are within the request; returns its span."""
    request = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    queue, run = by_name(spans)["queue"], by_name(spans)["run"]
    for step in (queue, run):
        assert step.kind == Span.SPAN_KIND_INTERNAL
        assert step.trace_id == request.trace_id and step.parent_span_id == request.span_id
    assert len({span.span_id for span in spans}) == 3
    assert request.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano == run.start_time_unix_nano
    assert run.start_time_unix_nano < run.end_time_unix_nano <= request.end_time_unix_nano
    assert abs(request.end_time_unix_nano / 1e9 - time.time()) < 60
    return request


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_sampled_request(start_server: StartServer, protocol: str) -> None:
    with Collector() as collector:
        flags = ("--otlp-endpoint", collector.url, "--trace-sample-rate", "0")
        server = start_server(*flags, "--service-name", "ranking")
        ask(server, protocol, UNSAMPLED)
        ask(server, protocol)
        ask(server, protocol, SAMPLED, request_id="seven")
        spans = collector.wait_for(lambda spans: len(spans) >= 3)
        assert collector.paths == ["/v1/traces"]
        resource = collector.exports[0].resource_spans[0].resource
        assert {x.key: x.value.string_value for x in resource.attributes}[
            "service.name"
        ] == "ranking"
    assert len(spans) == 3, "the other two are not to be traced"
    request = assert_steps(spans)
    assert request.trace_id.hex() == TRACE and request.parent_span_id.hex() == PARENT
    assert all(span.trace_state == SAMPLED["tracestate"] for span in spans)
    told = attributes(request)
    if protocol == "http":
        assert request.name == "POST /v2/models/{model}/infer"
        assert told["http.response.status_code"] == 200
    else:
        assert request.name == "inference.GRPCInferenceService/ModelInfer"
        assert told["rpc.system"] == "grpc"
    assert (told["ikbo.model"], told["ikbo.version"]) == ("ranker", "3")
    assert (told["ikbo.users"], told["ikbo.candidates"]) == (2, 30)
    assert told["ikbo.request_id"] == "seven"
    run = by_name(spans)["run"]
    assert attributes(run) == {
        "ikbo.run.requests": 1,
        "ikbo.run.users": 2,
        "ikbo.run.candidates": 30,
    }
    assert not run.links
    assert metrics(server)['ikbo_trace_spans_total{outcome="sent"}'] == 3


@pytest.mark.parametrize(
    "headers",
    [None, {"traceparent": "00-zz"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-00"}],
    ids=["none", "malformed", "zero"],
)
def test_requests_without_a_trace_begin_one(start_server: StartServer, headers) -> None:
    with Collector() as collector:
        server = start_server("--otlp-endpoint", collector.url, "--trace-sample-rate", "1")
        ask(server, headers=headers)
        request = assert_steps(collector.wait_for(lambda spans: len(spans) >= 3))
    assert request.trace_id != bytes(16) and not request.parent_span_id


def test_runs_name_the_requests_that_they_merged(start_server: StartServer) -> None:
    with Collector() as collector:
        server = start_server("--otlp-endpoint", collector.url, "--trace-sample-rate", "1")
        inputs = make_inputs(1, 4, seed=3)
        long = make_inputs(1, 8 * MAX_CANDIDATES, seed=4)  # its runs are full; others wait behind

        def ask_often(_: int) -> None:
            for _ in range(4):
                ask(server, inputs=inputs)

        with ThreadPoolExecutor(17) as pool:
            first = pool.submit(ask, server, headers=UNSAMPLED, inputs=long)
            list(pool.map(ask_often, range(16)))
            first.result()
        spans = collector.wait_for(lambda spans: len(spans) >= 3 * 64)
    requests = {span.span_id: span for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    runs = [span for span in spans if span.name == "run"]
    assert len(requests) == len(runs) == 64
    for run in runs:
        told = attributes(run)
        assert len(run.links) == told["ikbo.run.requests"] - 1
        assert told["ikbo.run.candidates"] == 4 * told["ikbo.run.requests"]
        for link in run.links:
            assert link.span_id != run.parent_span_id
            assert requests[link.span_id].trace_id == link.trace_id
    assert any(run.links for run in runs), "no two requests were merged"


def test_a_refused_request_has_no_run(start_server: StartServer) -> None:
    with Collector() as collector:
        server = start_server("--otlp-endpoint", collector.url)
        with pytest.raises(InferenceServerException):
            ask(server, headers=SAMPLED, timeout=1)
        spans = collector.wait_for(lambda spans: len(spans) >= 2)
    request = next(span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    assert {span.name for span in spans} == {request.name, "queue"}
    assert attributes(request)["http.response.status_code"] == 504
    assert request.status.code == Status.STATUS_CODE_ERROR


def test_a_collector_that_fails_for_a_while(start_server: StartServer) -> None:
    with Collector([503, 429]) as collector:
        server = start_server("--otlp-endpoint", f"{collector.url}/custom")
        ask(server, headers=SAMPLED)
        collector.wait_for(lambda spans: len(spans) >= 3)
        assert collector.num_posts == 3 and collector.paths == ["/custom"]
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def test_what_a_collector_refuses_is_counted(start_server: StartServer) -> None:
    reply = b'{"partialSuccess": {"rejectedSpans": "2", "errorMessage": "no"}}'
    with Collector([400], reply) as collector:
        server = start_server("--otlp-endpoint", collector.url)
        ask(server, headers=SAMPLED)
        wait_for_metric(server, "failed", 3)
        ask(server, headers=SAMPLED)
        wait_for_metric(server, "failed", 5)
        assert metrics(server)['ikbo_trace_spans_total{outcome="sent"}'] == 1
    assert sum("event=spans_not_sent" in line for line in server.log) == 1


def wait_for_metric(server: Server, outcome: str, value: int) -> None:
    end = time.monotonic() + 20
    while metrics(server)[f'ikbo_trace_spans_total{{outcome="{outcome}"}}'] != value:
        assert time.monotonic() < end, metrics(server)
        time.sleep(0.05)


def test_what_waits_for_the_collector_is_sent_at_the_end(start_server: StartServer) -> None:
    with Collector() as collector:
        server = start_server("--otlp-endpoint", collector.url)
        ask(server, headers=SAMPLED)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        assert len(collector.spans()) == 3


def test_an_endpoint_that_is_no_url(start_server: StartServer) -> None:
    server = start_server("--otlp-endpoint", "https://collector:4318")
    assert server.wait() != 0
    assert "must be a URL http://host[:port][/path]" in "".join(server.log)


def test_slow_requests_in_a_log_of_json(start_server: StartServer) -> None:
    server = start_server("--log-format", "json", "--slow-request-ms", "1")
    inputs = make_inputs(1, MAX_CANDIDATES, seed=5)
    ask(server, headers=UNSAMPLED, inputs=inputs, request_id='a "b"\n' + "x" * 1000)
    ask(server, "grpc", inputs=inputs)
    with pytest.raises(InferenceServerException):
        ask(server, inputs=make_inputs(1, 4, seed=1) | {"genre": np.full(4, 99)})
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    lines = [json.loads(line) for line in server.log]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("info", "warning")
    assert [line["event"] for line in lines if line["level"] == "info"] == [
        "starting",
        "model_loaded",
        "listening",
        "stopping",
        "stopped",
    ]
    slow = [line for line in lines if line["event"] == "slow_request" and line["status"] == 200]
    assert [line["protocol"] for line in slow] == ["http", "grpc"]
    assert [line["id"] for line in slow] == ['a "b"\n' + "x" * 250 + "...", ""]
    assert [line["trace_id"] for line in slow] == [TRACE, ""]
    steps = ("read", "decode", "queue", "run", "write")
    for line in slow:
        assert (line["model"], line["version"]) == ("ranker", "3")
        assert line["candidates"] == line["run_candidates"] == MAX_CANDIDATES
        times = {step: line[f"{step}_us"] for step in steps}
        assert all(us >= 0 for us in times.values())
        assert abs(sum(times.values()) - line["us"]) <= len(steps), "each is rounded down"
        assert line["mostly"] == max(times, key=times.__getitem__) == "run"


def test_quick_requests_are_not_slow(start_server: StartServer) -> None:
    server = start_server("--slow-request-ms", "60000")
    ask(server)
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    assert not any("slow_request" in line for line in server.log)
