# SPDX-License-Identifier: Apache-2.0
"""Models for the server's tests, and the server as a child process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ikbo
from ikbo._load import ops_library_path

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_USERS, MAX_CANDIDATES = 8, 4096
DECODING = 14  # bytes that the server needs to parse one of JSON
NUM_GENRES = 12
START_SECONDS = 60
STOP_SECONDS = 60

# In either format of the log.
LISTENING = re.compile(r"\blistening\b.*\bport\W+(\d+)\W+grpc_port\W+(\d+|none)")

Arrays = dict[str, np.ndarray]

WIRE_NAMES = {"float32": "FP32", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}


def wait_until(
    holds: Callable[[], bool], seconds: float = 60, show: Callable[[], str] = lambda: ""
) -> None:
    """Polls; fails with what `show` says."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, show()
        time.sleep(0.02)


class Ranker(nn.Module):
    """Hand-written for two batches; wide enough for a run of 4096 candidates to take a while."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tower = nn.Linear(16, 32)
        self.genres = nn.Embedding(NUM_GENRES, 48)
        self.w_user = nn.Parameter(torch.randn(1024, 32) / 6)
        self.w_cand = nn.Parameter(torch.randn(1024, 48) / 7)
        self.deep = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))

    def forward(
        self, x_user: Tensor, x_cand: Tensor, genre: Tensor, is_new: Tensor, cand_to_user: Tensor
    ) -> dict[str, Tensor]:
        user = torch.tanh(self.tower(x_user))
        cand = x_cand + self.genres(genre) + is_new[:, None]
        mixed = ikbo.linear(user, cand, self.w_user, self.w_cand, None, cand_to_user, "relu")
        return {"score": self.deep(mixed), "profile": user[:, :3]}


class Plain(nn.Module):
    """Candidates alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"score": self.linear(x)[:, 0]}


def make_inputs(num_users: int, num_candidates: int, seed: int) -> Arrays:
    """Inputs of `Ranker`, candidates in no order of their users."""
    rng = np.random.default_rng(seed)
    return {
        "x_user": rng.standard_normal((num_users, 16), dtype=np.float32),
        "x_cand": rng.standard_normal((num_candidates, 48), dtype=np.float32),
        "genre": rng.integers(0, NUM_GENRES, num_candidates),
        "is_new": rng.integers(0, 2, num_candidates).astype(bool),
        "cand_to_user": rng.integers(0, num_users, num_candidates).astype(np.int32),
    }


def make_mixed_inputs() -> Arrays:
    """Inputs of the transformed model: 3 users of uneven histories, 70 candidates."""
    rng = np.random.default_rng(9)
    return {
        "user_id": np.array([7, 3, 9]),
        "history": rng.integers(0, 200, (3, 12)),
        "history_length": np.array([12, 1, 5]),
        "item_id": rng.integers(0, 200, 70),
        "price": rng.random((70, 4), dtype=np.float32),
        "cand_to_user": rng.integers(0, 3, 70).astype(np.int32),
    }


def eager(module: nn.Module, inputs: Arrays) -> Arrays:
    """What the module itself answers."""
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(x) for x in inputs.values()))
    return {name: x.numpy() for name, x in outputs.items()}


@dataclass(frozen=True)
class Served:
    """A module and the package made of it."""

    module: nn.Module
    package: Path


class Server:
    """A running ikbo-server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._ports: tuple[int, int | None] | None = None  # HTTP, gRPC
        self._has_port = threading.Event()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            listening = LISTENING.search(line)
            if listening:
                grpc_port = None if listening[2] == "none" else int(listening[2])
                self._ports = int(listening[1]), grpc_port
                self._has_port.set()
        self._has_port.set()

    def _wait_ports(self) -> tuple[int, int | None]:
        assert self._has_port.wait(START_SECONDS), "ikbo-server did not start in time"
        assert self._ports is not None, "ikbo-server ended: " + "".join(self.log)
        return self._ports

    @property
    def port(self) -> int:
        return self._wait_ports()[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        port = self._wait_ports()[1]
        assert port is not None, "ikbo-server runs without gRPC"
        return f"127.0.0.1:{port}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit status, once the process has ended by itself."""
        status = self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        return status

    def close(self) -> None:
        """Ends the process, however it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def place(package: Path, path: Path, *, version: str, torch: str | None = None) -> Path:
    """A copy of the package as another version, put at `path` at once as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(unfinished, "w") as copy:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("/extra/ikbo/manifest.json"):
                manifest = json.loads(content)
                manifest["model"]["version"] = version
                manifest["torch_version"] = torch or manifest["torch_version"]
                content = json.dumps(manifest).encode()
            copy.writestr(entry, content)
    return unfinished.rename(path)


def server_path() -> Path:
    """The binary under test: IKBO_SERVER, else that of the `cpu` preset."""
    path = Path(os.environ.get("IKBO_SERVER", REPOSITORY / "build/cpu/bin/ikbo-server"))
    assert path.is_file(), f"{path} must exist; build it with `make build` or set IKBO_SERVER"
    return path


@contextmanager
def running(packages: Sequence[Path], *flags: str, port: int = 0) -> Iterator[Server]:
    """A server of these packages; port 0: a free one."""
    command = [str(server_path()), "--port", str(port), "--ops-library", str(ops_library_path())]
    if not {"--grpc-port", "--no-grpc"} & set(flags):
        command += ["--grpc-port", "0"]
    for package in packages:
        command += ["--model", str(package)]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    server = Server(process)
    try:
        yield server
    finally:
        server.close()
