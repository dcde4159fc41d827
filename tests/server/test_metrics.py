# SPDX-License-Identifier: Apache-2.0
"""The metrics as their readers see them: Prometheus, the statistics, the dashboard."""

from __future__ import annotations

import http.client
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from ikbo.transform import TransformedModule
from tests.server.conftest import StartServer
from tests.server.serving import (
    REPOSITORY,
    WIRE_NAMES,
    Arrays,
    Server,
    make_inputs,
    make_mixed_inputs,
    running,
    wait_until,
)

DASHBOARD = REPOSITORY / "deploy/grafana/ikbo-server.json"


def page(server: Server) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = response.read().decode()
    connection.close()
    return text


def families(server: Server) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(page(server)))
    assert len({family.name for family in found}) == len(found), "a family comes twice"
    return {family.name: family for family in found}


def count_of(family: Metric) -> float:
    return sum(x.value for x in family.samples if x.name == f"{family.name}_count")


def ask(server: Server, model: str, inputs: Arrays) -> None:
    described = []
    for name, x in inputs.items():
        described.append(triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        described[-1].set_data_from_numpy(x)
    with triton.InferenceServerClient(server.address) as client:
        client.infer(model, described)


def test_the_page_is_prometheus_text(start_server: StartServer) -> None:
    server = start_server()
    for num_users, num_candidates in ((1, 5), (2, 300), (3, 90)):
        ask(server, "ranker", make_inputs(num_users, num_candidates, seed=1))
    with pytest.raises(InferenceServerException):
        ask(server, "ranker", make_inputs(1, 5, seed=1) | {"x_other": np.zeros((1, 3), np.float32)})
    # The overhead is observed once an answer is sent, which the client may see before.
    wait_until(lambda: count_of(families(server)["ikbo_overhead_seconds"]) >= 3)
    found = families(server)
    for family in found.values():
        assert family.type in ("counter", "gauge", "histogram"), family
        assert family.documentation.endswith(".")
    model = {"model": "ranker", "version": "3"}
    for name, count, total in (
        ("ikbo_request_seconds", 4, None),
        ("ikbo_overhead_seconds", 3, None),
        ("ikbo_queue_seconds", 3, None),
        ("ikbo_run_seconds", 3, None),
        ("ikbo_batch_requests", 3, 3),
        ("ikbo_batch_users", 3, 6),
        ("ikbo_batch_candidates", 3, 395),
        ("ikbo_batch_ratio", 3, 5 + 150 + 30),
    ):
        assert found[name].type == "histogram"
        assert_histogram(found[name], model, count, total)
    requests = {s.labels["code"]: s.value for s in found["ikbo_requests"].samples}
    assert requests == {"200": 3, "400": 1}
    errors = {s.labels["kind"]: s.value for s in found["ikbo_errors"].samples}
    assert errors["bad_request"] == 1 and sum(errors.values()) == 1
    assert not found["ikbo_flops"].samples, "a package without a spec has no costs"


def assert_histogram(family: Metric, labels: dict[str, str], count: int, total) -> None:
    buckets = {}
    values = {}
    for sample in family.samples:
        assert sample.labels.items() >= labels.items()
        if sample.name == family.name + "_bucket":
            buckets[float(sample.labels["le"])] = sample.value
        else:
            values[sample.name.removeprefix(family.name)] = sample.value
    assert list(buckets) == sorted(buckets) and list(buckets)[-1] == math.inf
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets[math.inf] == values["_count"] == count, family.name
    assert values["_sum"] == total if total is not None else values["_sum"] > 0


def test_saved_work_is_the_specs(transformed: TransformedModule, transformed_package: Path) -> None:
    inputs = make_mixed_inputs()
    with running([transformed_package]) as server:
        ask(server, "model", inputs)
        ask(server, "model", inputs)
        found = families(server)
    for what in ("flops", "bytes"):
        now = found[f"ikbo_{what}"].samples[0].value
        replicated = found[f"ikbo_replicated_{what}"].samples[0].value
        assert now == pytest.approx(2 * transformed.spec.total(f"{what}_after", 3, 70))
        assert replicated == pytest.approx(2 * transformed.spec.total(f"{what}_before", 3, 70))
    assert found["ikbo_flops"].samples[0].value < found["ikbo_replicated_flops"].samples[0].value


def test_statistics_as_tritonclient_reads_them(start_server: StartServer) -> None:
    server = start_server()
    ask(server, "ranker", make_inputs(2, 300, seed=1))
    ask(server, "ranker", make_inputs(1, 257, seed=1))
    ask(server, "ranker", make_inputs(1, 1, seed=1))
    with pytest.raises(InferenceServerException):
        ask(server, "ranker", make_inputs(1, 5, seed=1) | {"x_other": np.zeros((1, 3), np.float32)})
    with triton.InferenceServerClient(server.address) as client:
        (stats,) = client.get_inference_statistics("ranker")["model_stats"]
        assert client.get_inference_statistics("ranker", "3")["model_stats"] == [stats]
        with pytest.raises(InferenceServerException, match="no version '4'"):
            client.get_inference_statistics("ranker", "4")
    assert (stats["name"], stats["version"]) == ("ranker", "3")
    assert (stats["inference_count"], stats["user_count"]) == (558, 4)
    assert stats["execution_count"] == 3
    assert stats["last_inference"] > 1.6e12
    sums = stats["inference_stats"]
    assert {key: value["count"] for key, value in sums.items()} == {
        "success": 3,
        "fail": 1,
        "queue": 3,
        "compute_input": 3,
        "compute_infer": 3,
        "compute_output": 3,
    }
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert sums["success"]["ns"] > sum(sums[part]["ns"] for part in parts) > 0
    assert [x["batch_size"] for x in stats["batch_stats"]] == [1, 512]
    assert [x["compute_infer"]["count"] for x in stats["batch_stats"]] == [1, 2]
    for part in parts[1:]:
        assert sum(x[part]["ns"] for x in stats["batch_stats"]) == sums[part]["ns"]


def test_the_dashboard_names_metrics_that_exist(server: Server) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    known = set()
    for family in families(server).values():
        suffixes = {
            "counter": ["_total"],
            "gauge": [""],
            "histogram": ["_bucket", "_sum", "_count"],
        }
        known |= {family.name + suffix for suffix in suffixes[family.type]}
    named = set()
    labels = set()
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        for target in panel.get("targets", []):
            named |= set(re.findall(r"\bikbo_\w+", target["expr"]))
            labels |= set(re.findall(r"(\w+)=~?\"", target["expr"]))
    for variable in dashboard["templating"]["list"]:
        named |= set(re.findall(r"\bikbo_\w+", str(variable.get("query", ""))))
    assert named <= known, f"unknown: {named - known}"
    drawn = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in known} == drawn
    assert labels <= {"model", "version", "job", "instance"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
