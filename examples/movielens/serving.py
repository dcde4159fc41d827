# SPDX-License-Identifier: Apache-2.0
"""`ikbo-server` as a child process, and a client of its protocol (Open Inference Protocol v2)."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

HEADER_LENGTH = "Inference-Header-Content-Length"
WIRE_NAMES = {
    "int64": "INT64", "int32": "INT32", "int16": "INT16", "float32": "FP32", "float16": "FP16",
    "bool": "BOOL",
}  # fmt: skip
NUMPY_NAMES = {wire: name for name, wire in WIRE_NAMES.items()}
MODEL = "ranker"
START_SECONDS = 60


def encode(inputs: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an infer request."""
    described = [
        {
            "name": name,
            "datatype": WIRE_NAMES[x.dtype.name],
            "shape": x.shape,
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in inputs.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(np.ascontiguousarray(x).tobytes() for x in inputs.values())
    return body, {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}


def decode(body: bytes, head_bytes: int) -> dict[str, np.ndarray]:
    """The outputs in the body of an infer response."""
    outputs, offset = {}, head_bytes
    for spec in json.loads(body[:head_bytes])["outputs"]:
        size = spec["parameters"]["binary_data_size"]
        values = np.frombuffer(body[offset : offset + size], NUMPY_NAMES[spec["datatype"]])
        outputs[spec["name"]] = values.reshape(spec["shape"])
        offset += size
    return outputs


class Client:
    """One connection to one server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def infer(self, body: bytes, headers: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Sends an encoded request and returns the outputs."""
        self._connection.request("POST", f"/v2/models/{MODEL}/infer", body, dict(headers))
        response = self._connection.getresponse()
        reply = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"movielens: ikbo-server answered {response.status}: {reply!r}")
        return decode(reply, int(response.headers[HEADER_LENGTH]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running_server(command: list[str], log: Path) -> Iterator[int]:
    """Runs `command` (an `ikbo-server` without its port) and yields the port once it is ready."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--no-grpc"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_ready(process, port, log)
            yield port
        finally:
            process.terminate()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", f"/v2/models/{MODEL}/ready")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise RuntimeError(
        f"movielens: ikbo-server did not get ready in {START_SECONDS} s; its log {log} says:\n"
        f"{log.read_text(errors='replace')[-2000:]}"
    )
