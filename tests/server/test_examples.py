# SPDX-License-Identifier: Apache-2.0
"""The shell examples of docs/serving.md, run as they stand but for the ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo._load import ops_library_path
from tests.server.serving import REPOSITORY, Server, running, server_path


class Documented(nn.Module):
    """What the document's requests fit. It calls no operator of ours: some examples load none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> dict[str, Tensor]:
        user = x_user.index_select(0, cand_to_user)
        return {"score": self.linear(torch.cat([user, x_cand], dim=1))}


def write_package(path: Path, version: str) -> Path:
    ikbo.package(
        Documented().eval(),
        path,
        example_inputs={
            "x_user": torch.randn(3, 2),
            "x_cand": torch.randn(8, 3),
            "cand_to_user": torch.randint(3, (8,), dtype=torch.int32),
        },
        roles={"x_user": "user", "x_cand": "candidate", "cand_to_user": "index"},
        max_users=8,
        max_candidates=4096,
        name="ranker",
        version=version,
    )
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("documented") / "ranker.pt2", "3")


@pytest.fixture(scope="module")
def documented(package: Path) -> Iterator[Server]:
    with running([package]) as server:
        yield server


def examples() -> list[str]:
    """The code blocks with a call of curl."""
    text = (REPOSITORY / "docs/serving.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "curl" in block]


# Each block has one of these.
KINDS = ("$ curl", '"id": "42"', "--tls-client-ca", "repository", "--oauth2-bearer")


def shell(script: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, script + done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_here() -> None:
    kinds = [kind for block in examples() for kind in KINDS if kind in block]
    assert sorted(kinds) == sorted(KINDS) and len(examples()) == len(KINDS)


@pytest.mark.parametrize("block", [x for x in examples() if x.startswith("$ ")])
def test_what_is_printed(block: str, documented: Server, tmp_path: Path) -> None:
    command, printed = block.removeprefix("$ ").split("\n", 1)
    command = command.replace("localhost:8000", documented.address)
    assert json.loads(shell(command, tmp_path)) == json.loads(printed)


@pytest.mark.parametrize("block", [x for x in examples() if '"id": "42"' in x])
def test_requests(block: str, documented: Server, tmp_path: Path) -> None:
    reply = json.loads(shell(block.replace("localhost:8000", documented.address), tmp_path))
    assert reply["id"] == "42" and reply["model_name"] == "ranker"
    (score,) = reply["outputs"]
    assert (score["name"], score["shape"], len(score["data"])) == ("score", [2, 2], 4)


@pytest.fixture
def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def serve_in_shell(block: str, folder: Path, port: str, **variables: str) -> str:
    """Runs a block that starts a server in the background, and ends that."""
    assert block.count("ikbo-server") == 1
    return shell(
        "trap 'kill $!; wait' EXIT\n" + block.replace("localhost:8000", f"localhost:{port}"),
        folder,
        PATH=f"{server_path().parent}:{os.environ['PATH']}",
        IKBO_OPTION_PORT=port,
        IKBO_OPTION_GRPC_PORT="0",
        **variables,
    )


@pytest.mark.parametrize("block", [x for x in examples() if "--tls-client-ca" in x])
def test_tls_from_no_certificates(
    block: str, package: Path, tmp_path: Path, free_port: str
) -> None:
    (tmp_path / "ranker.pt2").symlink_to(package)
    serve_in_shell(block.rstrip() + " -sS --fail --max-time 60", tmp_path, free_port)


@pytest.mark.parametrize("block", [x for x in examples() if "repository" in x])
def test_a_repository(block: str, package: Path, tmp_path: Path, free_port: str) -> None:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(package, models / "ranker-3.pt2")
    write_package(tmp_path / "ranker-4.pt2", "4")
    block = re.sub(r"(?<=\s)/models", str(models), block)
    block = block.replace("libikbo_ops.so", str(ops_library_path()))
    block = block.replace("curl ", "curl -sS --fail --max-time 60 ")
    what_is_served = "curl -sS localhost:8000/v2/models/ranker"
    printed = serve_in_shell(f"set -e\n{block}{what_is_served}", tmp_path, free_port)
    assert json.loads(printed[printed.rindex('{"name":"ranker"') :])["versions"] == ["4"]


@pytest.mark.parametrize("block", [x for x in examples() if "--oauth2-bearer" in x])
def test_ten_commands(block: str, tmp_path: Path, free_port: str) -> None:
    commands = re.sub(r"(?ms)<<'?END'?$.*?^END$", "", block).replace("\\\n", "")
    commands = re.sub(r"(?s)'{.*?}'", "", commands)
    assert len(re.findall(r"^\S", commands, re.MULTILINE)) == 10
    home = "$IKBO/"
    for path, here in (
        (".venv/bin/python", sys.executable),
        ("build/cpu/lib/libikbo_ops.so", ops_library_path()),
        ("build/cpu/bin/ikbo-server", server_path()),
    ):
        assert home + path in block
        block = block.replace(home + path, str(here))
    assert home not in block
    block = block.replace("curl ", "curl -sS --fail --max-time 60 ")
    block = block.replace("localhost:8000", f"localhost:{free_port}")
    printed = shell(
        f"set -e\ntrap 'kill $!; wait' EXIT\n{block}",
        tmp_path,
        IKBO_OPTION_PORT=free_port,
        IKBO_OPTION_GRPC_PORT="0",
    )
    reply, _ = json.JSONDecoder().raw_decode(printed[printed.index('{"model_name"') :])
    (score,) = reply["outputs"]
    assert (score["name"], len(score["data"])) == ("score", 2)
    assert '{"ready":true}' in printed
    assert re.search(r'^ikbo_requests_total{model="ranker",.*code="200"} 1$', printed, re.MULTILINE)
    assert re.search("event=listening .*tls=on", (tmp_path / "server.log").read_text())
