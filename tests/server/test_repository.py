# SPDX-License-Identifier: Apache-2.0
"""Loading, unloading and switching versions while the server serves."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.server.serving import (
    WIRE_NAMES,
    Arrays,
    Served,
    Server,
    eager,
    make_inputs,
    place,
    running,
    wait_until,
)

PROTOCOLS: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


def connect(server: Server, protocol: str):
    address = server.address if protocol == "http" else server.grpc_address
    return PROTOCOLS[protocol].InferenceServerClient(address)


def ask(client, protocol: str, inputs: Arrays, version: str = ""):
    described = []
    for name, x in inputs.items():
        tensor = PROTOCOLS[protocol].InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name])
        tensor.set_data_from_numpy(x)
        described.append(tensor)
    return client.infer("ranker", described, model_version=version)


def version_of(result) -> str:
    response = result.get_response()
    return response["model_version"] if isinstance(response, dict) else response.model_version


def index(client) -> dict[str, tuple[str, str]]:
    """State and reason by version of the ranker."""
    listed = client.get_model_repository_index()
    if not isinstance(listed, list):
        fields = ("name", "version", "state", "reason")
        listed = [{field: getattr(x, field) for field in fields} for x in listed.models]
    assert all(x["name"] == "ranker" for x in listed)
    return {x["version"]: (x["state"], x["reason"]) for x in listed}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_load_switch_and_unload(ranker: Served, tmp_path: Path, protocol: str) -> None:
    inputs = make_inputs(2, 9, seed=1)
    expected = eager(ranker.module, inputs)["score"]

    def assert_served(version: str, asked: str = "") -> None:
        result = ask(client, protocol, inputs, asked)
        assert version_of(result) == version
        np.testing.assert_allclose(result.as_numpy("score"), expected, rtol=1e-4, atol=1e-5)

    nine = place(ranker.package, tmp_path / "nine.pt2", version="9")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    with running([], *flags) as server, connect(server, protocol) as client:
        metadata = client.get_server_metadata()
        extensions = metadata["extensions"] if protocol == "http" else metadata.extensions
        assert "model_repository" in extensions
        assert index(client) == {"9": ("READY", "")}
        place(ranker.package, tmp_path / "deeper/10.pt2", version="10")
        assert_served("9")
        client.load_model("ranker")
        assert_served("10")
        assert_served("9", "9")
        nine.unlink()
        client.load_model("ranker")
        assert index(client) == {"10": ("READY", "")}
        assert not client.is_model_ready("ranker", "9") and client.is_model_ready("ranker")
        client.unload_model("ranker")
        assert index(client) == {"10": ("UNAVAILABLE", "unloaded")}
        assert not client.is_model_ready("ranker") and client.is_server_ready()
        with pytest.raises(InferenceServerException, match="there is no model 'ranker' here"):
            ask(client, protocol, inputs)
        with pytest.raises(InferenceServerException, match="there is no model 'ranker' here"):
            client.unload_model("ranker")
        client.load_model("ranker")
        assert_served("10")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_failed_load_changes_nothing(ranker: Served, tmp_path: Path, protocol: str) -> None:
    place(ranker.package, tmp_path / "a.pt2", version="3")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    with running([], *flags) as server, connect(server, protocol) as client:

        def assert_refused(text: str) -> None:
            with pytest.raises(InferenceServerException, match=text):
                client.load_model("ranker")
            assert index(client)["3"] == ("READY", "")
            assert version_of(ask(client, protocol, make_inputs(1, 3, seed=1))) == "3"

        (tmp_path / "b.pt2").write_bytes(b"PK no package")
        assert_refused("cannot be opened as a .pt2 archive")
        place(ranker.package, tmp_path / "b.pt2", version="4", torch="2.1.0")
        assert_refused("was compiled by torch 2.1.0")
        assert index(client)["4"][0] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="parameter 'config' is not supported"):
            client.load_model("ranker", config="{}")
        with pytest.raises(InferenceServerException, match="there is no package of model 'other'"):
            client.load_model("other")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_changes_need_a_flag(server: Server, protocol: str) -> None:
    with connect(server, protocol) as client:
        for change in (
            client.get_model_repository_index,
            lambda: client.load_model("ranker"),
            lambda: client.unload_model("ranker"),
        ):
            with pytest.raises(InferenceServerException, match="--allow-repository-changes") as no:
                change()
            assert no.value.status() in ("403", "StatusCode.PERMISSION_DENIED")
        assert client.is_model_ready("ranker")


def test_an_index_of_what_is_ready(ranker: Served, tmp_path: Path) -> None:
    place(ranker.package, tmp_path / "a.pt2", version="3")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    with running([], *flags) as server:

        def post(path: str, body: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("POST", path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()

        everything = [{"name": "ranker", "version": "3", "state": "READY", "reason": ""}]
        status, text = post("/v2/repository/index", '{"ready": true}')
        assert status == 200 and json.loads(text) == everything
        assert post("/v2/repository/models/ranker/unload", "") == (200, "")
        assert post("/v2/repository/index", '{"ready": true}') == (200, "[]")
        for body, part in (
            ("{", "well formed"),
            ("[]", "must be a JSON object"),
            ('{"ready": 1}', "got 1"),
        ):
            status, text = post("/v2/repository/index", body)
            assert status == 400 and part in text
        assert post("/v2/repository/models/ranker/reload", "")[0] == 404


def test_a_hangup_rereads_the_configuration(ranker: Served, plain: Served, tmp_path: Path) -> None:
    file = tmp_path / "server.conf"

    def write(*packages: Path) -> None:
        file.write_text("".join(f"model = {package}\n" for package in packages))

    write(ranker.package)
    with running([], "--config", str(file)) as server, connect(server, "http") as client:
        write(plain.package)
        server.send(signal.SIGHUP)
        wait_until(lambda: client.is_model_ready("plain"))
        assert not client.is_model_ready("ranker")
        file.write_text("unknown = 1\n")
        server.send(signal.SIGHUP)
        wait_until(lambda: any("event=reread_failed" in line for line in server.log))
        assert client.is_model_ready("plain")


def test_a_hangup_while_models_are_loaded_waits(ranker: Served) -> None:
    with running([ranker.package]) as server:
        wait_until(lambda: any("event=starting" in line for line in server.log))
        server.send(signal.SIGHUP)
        with connect(server, "http") as client:
            assert client.is_model_ready("ranker")
            wait_until(lambda: any("event=reread" in line for line in server.log))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_lost_or_wrong_while_versions_change(
    ranker: Served, tmp_path: Path, protocol: str
) -> None:
    num_clients, num_switches = 4, 4
    served = place(ranker.package, tmp_path / "served.pt2", version="1")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    is_over = threading.Event()
    have_begun = threading.Barrier(num_clients + 1)

    def keep_asking(number: int) -> set[str]:
        versions = set()
        inputs = make_inputs(1 + number % 3, 60 + number, seed=number)
        expected = eager(ranker.module, inputs)["score"]
        with connect(server, protocol) as client:
            while not is_over.is_set():
                result = ask(client, protocol, inputs)
                np.testing.assert_allclose(result.as_numpy("score"), expected, rtol=1e-4, atol=1e-5)
                if not versions:
                    have_begun.wait(60)
                versions.add(version_of(result))
        return versions

    with running([], *flags) as server, ThreadPoolExecutor(num_clients) as pool:
        askers = [pool.submit(keep_asking, number) for number in range(num_clients)]
        try:
            have_begun.wait(60)
            with connect(server, "http") as operator:
                for switch in range(num_switches):
                    place(ranker.package, served, version=str(2 + switch))
                    operator.load_model("ranker")
                    time.sleep(0.2)
        finally:
            is_over.set()
        for asker in askers:
            assert {"1", str(1 + num_switches)} <= asker.result()


def test_memory_of_old_versions_is_given_back(ranker: Served, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        """Mappings of compiled code, and threads of runs."""
        process = Path(f"/proc/{server.process.pid}")
        maps = (process / "maps").read_text()
        num_threads = 0
        for task in (process / "task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                num_threads += (task / "comm").read_text() == "ikbo-worker\n"
        return maps.count("model.so") + maps.count("wrapper.so"), num_threads

    def switch_to(version: str) -> None:
        place(ranker.package, served, version=version)
        client.load_model("ranker")

    served = place(ranker.package, tmp_path / "served.pt2", version="1")
    flags = ("--model-repository", str(tmp_path), "--allow-repository-changes")
    with running([], *flags) as server, connect(server, "http") as client:
        before = held()
        assert min(before) > 0
        for version in ("2", "3", "4"):
            switch_to(version)
        wait_until(lambda: held() <= before, show=lambda: f"{held()} after {before}")


def affinities(server: Server) -> list[set[int]]:
    """Of the threads of the process."""
    tasks = os.listdir(f"/proc/{server.process.pid}/task")
    return [os.sched_getaffinity(int(task)) for task in tasks]


def test_pinned_workers_have_cores_of_their_own(ranker: Served) -> None:
    allowed = os.sched_getaffinity(0)
    inputs = make_inputs(2, 200, seed=3)
    with running([ranker.package], "--workers", "2", "--pin-workers") as server:
        with connect(server, "http") as client:
            score = ask(client, "http", inputs).as_numpy("score")
            expected = eager(ranker.module, inputs)["score"]
            np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
        found = affinities(server)
    assert allowed in found, "the threads of connections go where they like"
    pinned = [cpus for cpus in found if cpus != allowed]
    if len(allowed) > 1:
        assert set().union(*pinned) == allowed and len(pinned) >= 2
        assert set.intersection(*pinned) == set()


def num_cores() -> int:
    """Two processors of one core name the same siblings."""
    lists = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return len({Path(lists.format(cpu)).read_text() for cpu in os.sched_getaffinity(0)})


@pytest.mark.skipif(num_cores() < 2, reason="a core for runs, and one beside it")
def test_cores_beside_pinned_workers_are_for_all_other_threads(ranker: Served) -> None:
    allowed = os.sched_getaffinity(0)
    flags = ("--workers", "1", "--threads-per-run", "1", "--pin-workers")
    with running([ranker.package], *flags) as server:
        with connect(server, "http") as client:
            ask(client, "http", make_inputs(2, 200, seed=3))
        others = os.sched_getaffinity(server.process.pid)
        (worker,) = [cpus for cpus in affinities(server) if cpus != others]
    assert worker and others and not worker & others and worker | others == allowed
