# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/kserve, done as KServe does them: the container's arguments, its probes,
and requests by the protocol, the port and the model name that they say. `make test-kserve`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from ikbo._load import ops_library_path
from tests.server.serving import REPOSITORY, START_SECONDS, Served, Server, eager, server_path

FOLDER = REPOSITORY / "deploy/kserve"
PYTHON = os.environ.get("IKBO_KSERVE_PYTHON", "")
MODELS = "/mnt/models"  # where KServe puts what storageUri names
RUNTIME_CONTAINER = "kserve-container"

Document = dict[str, Any]

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="KServe's packages are not here; `make test-kserve`"
)


def read(name: str) -> Document:
    """A manifest; PyYAML is in KServe's environment."""
    script = "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"
    text = (FOLDER / name).read_text()
    command = [PYTHON, "-c", script]
    return json.loads(subprocess.run(command, input=text, text=True, check=True, stdout=-1).stdout)


@pytest.fixture(scope="module")
def container() -> Document:
    runtime = read("serving-runtime.yaml")
    assert (runtime["apiVersion"], runtime["kind"]) == (
        "serving.kserve.io/v1alpha1",
        "ServingRuntime",
    )
    (found,) = (x for x in runtime["spec"]["containers"] if x["name"] == RUNTIME_CONTAINER)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pod:
    """The container as a process: other ports, and folders of this machine for its own."""

    def __init__(self, container: Document, models: Path) -> None:
        self.ports: dict[int, int] = {}  # of the manifest to those of this machine
        command = [str(server_path())]
        for argument in container["args"]:
            flag, _, value = argument.partition("=")
            if flag in ("--port", "--grpc-port"):
                self.ports[int(value)] = free_port()
                value = str(self.ports[int(value)])
            elif value == MODELS:
                value = str(models)
            elif flag == "--ops-library":
                assert value == "/opt/ikbo/lib/libikbo_ops.so"
                value = str(ops_library_path())
            command.append(f"{flag}={value}" if value else flag)
        assert f"--model-repository={models}" in command
        self.server = Server(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))

    def probe(self, probe: Document) -> bool:
        """As the kubelet does: a status from 200 to 399 is a success."""
        get = probe["httpGet"]
        url = f"http://127.0.0.1:{self.ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(url, timeout=probe.get("timeoutSeconds", 1)) as answer:
                return 200 <= answer.status < 400
        except OSError:
            return False


@pytest.fixture
def pod(container: Document, plain: Served, tmp_path: Path):
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(plain.package, folder / "model.pt2")
    started = Pod(container, folder)
    yield started
    started.server.close()


def wait_ready(pod: Pod, container: Document) -> None:
    begin = time.monotonic()
    while not pod.probe(container["startupProbe"]):
        assert pod.server.process.poll() is None, "".join(pod.server.log)
        assert time.monotonic() - begin < START_SECONDS
        time.sleep(0.1)
    assert pod.probe(container["readinessProbe"]) and pod.probe(container["livenessProbe"])


def test_http_as_the_inference_service_says(pod: Pod, container: Document, plain: Served) -> None:
    service = read("inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["protocolVersion"] == "v2" and model["runtime"] == "ikbo-server"
    wait_ready(pod, container)
    # Without `ports` of its own the service exposes the container's.
    (port,) = (x["containerPort"] for x in container["ports"])
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{pod.ports[port]}") as client:
        tensor = tritonclient.http.InferInput("x", [5, 4], "FP32")
        tensor.set_data_from_numpy(x)
        score = client.infer("plain", [tensor]).as_numpy("score")
    np.testing.assert_allclose(score, eager(plain.module, {"x": x})["score"], rtol=1e-4, atol=1e-5)


def test_grpc_as_the_inference_service_says(pod: Pod, container: Document, plain: Served) -> None:
    service = read("inference-service-grpc.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["protocolVersion"] == "grpc-v2" and model["runtime"] == "ikbo-server"
    (port,) = model["ports"]
    assert port["name"] == "h2c"
    wait_ready(pod, container)
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    address = f"127.0.0.1:{pod.ports[port['containerPort']]}"
    with tritonclient.grpc.InferenceServerClient(address) as client:
        tensor = tritonclient.grpc.InferInput("x", [5, 4], "FP32")
        tensor.set_data_from_numpy(x)
        score = client.infer("plain", [tensor]).as_numpy("score")
    np.testing.assert_allclose(score, eager(plain.module, {"x": x})["score"], rtol=1e-4, atol=1e-5)


def test_a_pod_that_is_deleted_is_not_ready_and_ends_in_time(
    pod: Pod, container: Document, plain: Served
) -> None:
    """Kubernetes: SIGTERM, then SIGKILL after terminationGracePeriodSeconds."""
    service = read("inference-service.yaml")
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    drain = next(
        int(found[1])
        for x in container["args"]
        if (found := re.fullmatch(r"--drain-timeout-ms=(\d+)", x))
    )
    assert drain < 1000 * grace, "what is not drained is killed"
    wait_ready(pod, container)
    pod.server.process.terminate()
    assert pod.server.process.wait(grace) == 0
    assert not pod.probe(container["readinessProbe"])


def test_the_parts_fit_together(container: Document) -> None:
    runtime = read("serving-runtime.yaml")["spec"]
    formats = {(x["name"], x["version"]) for x in runtime["supportedModelFormats"]}
    services = [read(name) for name in ("inference-service.yaml", "inference-service-grpc.yaml")]
    for service in services:
        model = service["spec"]["predictor"]["model"]
        assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
        assert model["protocolVersion"] in runtime["protocolVersions"]
    image = (FOLDER / "Containerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[1])
    assert entry == ["/opt/ikbo/bin/ikbo-server"] and "--prefix /opt/ikbo" in image
    ports = [re.search(rf"{flag}=(\d+)", " ".join(container["args"]))[1] for flag in ("--port",)]
    ports += [re.search(r"--grpc-port=(\d+)", " ".join(container["args"]))[1]]
    assert f"EXPOSE {' '.join(ports)}\n" in image
    assert runtime["annotations"]["prometheus.kserve.io/port"] == ports[0]
    mounted = {x["name"] for x in container["volumeMounts"]}
    assert mounted == {x["name"] for x in runtime["volumes"]}
