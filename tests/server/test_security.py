# SPDX-License-Identifier: Apache-2.0
"""Who may ask the server for what, and what it opens: the whole binary."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from ikbo.signing import sign
from tests.e2e.test_signing import make_key
from tests.server.serving import Served, Server, running, server_path

INFER, ADMIN = "infer-infer-infer", "admin-admin-admin"
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [0.5] * 8}]}
)


@pytest.fixture(scope="module")
def guarded(plain: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that wants tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "infer").write_text(INFER + "\n")
    (folder / "admin").write_text(ADMIN + "\n")
    flags = ("--infer-token-file", str(folder / "infer"))
    flags += ("--admin-token-file", str(folder / "admin"), "--allow-repository-changes")
    with running([plain.package], *flags) as server:
        yield server
        assert not [line for line in server.log if INFER in line or ADMIN in line]


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    challenge: str | None


def ask(server: Server, method: str, path: str, token: str | None, body: str = "") -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    connection.request(method, path, body or None, headers)
    reply = connection.getresponse()
    answer = Answer(reply.status, reply.read().decode(), reply.getheader("WWW-Authenticate"))
    connection.close()
    return answer


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/plain/ready"])
def test_health_needs_no_token(guarded: Server, path: str) -> None:
    assert ask(guarded, "GET", path, None).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/metrics"),
        ("GET", "/v2/models/plain"),
        ("POST", "/v2/models/plain/infer"),
        ("POST", "/v2/models/plain/versions/1/infer"),
    ],
)
def test_everything_else_needs_one(guarded: Server, method: str, path: str) -> None:
    body = BODY if method == "POST" else ""
    assert ask(guarded, method, path, INFER, body).status == 200
    for token in (None, ADMIN, INFER + "x", INFER[:-1], ""):
        answer = ask(guarded, method, path, token, body)
        assert (answer.status, answer.challenge) == (401, "Bearer"), token
        assert "Authorization: Bearer <inference token>" in json.loads(answer.text)["error"]


def test_administration_needs_its_own(guarded: Server) -> None:
    path = "/v2/repository/models/plain/load"
    for token in (None, INFER):
        assert ask(guarded, "POST", path, token, "{}").status == 401
        assert ask(guarded, "POST", "/v2/repository/index", token).status == 401
    assert ask(guarded, "POST", path, ADMIN, "{}").status == 200
    index = json.loads(ask(guarded, "POST", "/v2/repository/index", ADMIN).text)
    assert [(entry["name"], entry["state"]) for entry in index] == [("plain", "READY")]


def test_administration_over_grpc_needs_the_same(guarded: Server) -> None:
    with triton_grpc.InferenceServerClient(guarded.grpc_address) as client:
        for headers in (None, {"authorization": f"Bearer {INFER}"}):
            for call in (
                client.get_model_repository_index,
                partial(client.load_model, "plain"),
                partial(client.unload_model, "plain"),
            ):
                with pytest.raises(InferenceServerException) as refusal:
                    call(headers=headers)
                assert refusal.value.status() == str(grpc.StatusCode.UNAUTHENTICATED)
        bearer = {"authorization": f"Bearer {ADMIN}"}
        client.load_model("plain", headers=bearer)
        index = client.get_model_repository_index(headers=bearer)
        assert [(model.name, model.state) for model in index.models] == [("plain", "READY")]


def test_changes_need_a_token_where_inference_does(plain: Served, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(INFER)
    flags = ("--model", plain.package, "--allow-repository-changes")
    assert check_config(*flags).returncode == 0
    done = check_config(*flags, "--infer-token-file", tmp_path / "token")
    assert done.returncode == 1
    assert "--allow-repository-changes: must come with --admin-token-file" in done.stderr
    flags += ("--infer-token-file", tmp_path / "token", "--admin-token-file", tmp_path / "token")
    assert check_config(*flags).returncode == 0


def test_what_a_folder_leads_to_is_refused(plain: Served, tmp_path: Path) -> None:
    """A link in a repository does not lead out of --model-dir, at the start and later."""
    (tmp_path / "models").mkdir()
    flags = ("--model-dir", tmp_path / "models", "--model-repository", tmp_path / "models")
    shutil.copy(plain.package, tmp_path / "models" / "plain.pt2")
    assert check_config(*flags).returncode == 0
    with running([], *map(str, flags), "--allow-repository-changes") as server:
        assert ask(server, "GET", "/v2/health/ready", None).status == 200
        (tmp_path / "models" / "link.pt2").symlink_to(plain.package)
        answer = ask(server, "POST", "/v2/repository/models/plain/load", None, "{}")
        assert answer.status == 500
        assert "must lie below --model-dir" in json.loads(answer.text)["error"]
        assert ask(server, "POST", "/v2/models/plain/infer", None, BODY).status == 200
    done = check_config(*flags)
    assert done.returncode == 1
    assert "--model, --model-repository: must lie below --model-dir" in done.stderr


def test_the_body_of_the_refused_is_not_read(guarded: Server) -> None:
    """The answer comes before the body is sent, and the connection ends."""
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=30) as client:
        client.sendall(b"POST /v2/models/plain/infer HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        answer = b""
        while block := client.recv(4096):
            answer += block
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_refusals_are_counted(guarded: Server) -> None:
    ask(guarded, "GET", "/v2", None)
    metrics = ask(guarded, "GET", "/metrics", INFER).text
    count = metrics.split('ikbo_errors_total{kind="unauthenticated"} ')[1].split()[0]
    assert int(count) > 0


def test_grpc_needs_the_same(guarded: Server) -> None:
    bearer = {"authorization": f"Bearer {INFER}"}
    with triton_grpc.InferenceServerClient(guarded.grpc_address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("plain")
        tensor = triton_grpc.InferInput("x", [2, 4], "FP32")
        tensor.set_data_from_numpy(np.full((2, 4), 0.5, np.float32))
        assert client.infer("plain", [tensor], headers=bearer).as_numpy("score").shape == (2,)
        assert client.get_server_metadata(headers=bearer).name == "ikbo-server"
        assert client.get_model_metadata("plain", headers=bearer).name == "plain"
        for headers in (None, {"authorization": f"Bearer {ADMIN}"}, {"authorization": INFER}):
            for call in (
                partial(client.infer, "plain", [tensor]),
                client.get_server_metadata,
                partial(client.get_model_metadata, "plain"),
            ):
                with pytest.raises(InferenceServerException) as refusal:
                    call(headers=headers)
                assert refusal.value.status() == str(grpc.StatusCode.UNAUTHENTICATED)


def check_config(*flags: object) -> subprocess.CompletedProcess[str]:
    command = [str(server_path()), "--check-config", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_other_addresses_need_a_flag(plain: Served, tmp_path: Path) -> None:
    refused = check_config("--model", plain.package, "--host", "0.0.0.0")
    assert refused.returncode == 1
    assert "--host: must be a loopback address unless --allow-remote is given" in refused.stderr
    done = check_config("--model", plain.package, "--host", "0.0.0.0", "--allow-remote")
    assert done.returncode == 0, done.stderr
    assert "tokens_without_tls" not in done.stderr
    (tmp_path / "token").write_text(INFER)
    flags = ("--host", "0.0.0.0", "--allow-remote", "--infer-token-file", tmp_path / "token")
    done = check_config("--model", plain.package, *flags)
    assert done.returncode == 0, done.stderr
    assert "event=tokens_without_tls host=0.0.0.0" in done.stderr


def test_packages_lie_below_the_folders(plain: Served, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "link.pt2").symlink_to(plain.package)
    inside = Path(shutil.copy(plain.package, models / "plain.pt2"))
    done = check_config("--model-dir", models, "--model", inside)
    assert done.returncode == 0, done.stderr
    for path in (plain.package, models / "link.pt2", models / ".." / ".." / plain.package):
        done = check_config("--model-dir", models, "--model", path)
        assert done.returncode == 1
        assert "--model, --model-repository: must lie below --model-dir" in done.stderr


def test_packages_are_signed(plain: Served, tmp_path: Path) -> None:
    key, public = make_key(tmp_path, "mine")
    package = Path(shutil.copy(plain.package, tmp_path / "plain.pt2"))
    done = check_config("--trusted-key", public, "--model", package)
    assert done.returncode == 1
    assert "must be signed by a trusted key; it holds no manifest.sig" in done.stderr
    sign(package, key)
    done = check_config("--trusted-key", public, "--model", package)
    assert done.returncode == 0, done.stderr
    done = check_config("--trusted-key", key, "--model", package)
    assert done.returncode == 1
    assert "must be a readable PEM file with an Ed25519 public key" in done.stderr
