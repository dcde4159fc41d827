# SPDX-License-Identifier: Apache-2.0
"""A server under steady load, its package loaded again and again: nothing wrong, lost or leaked.

Requests arrive at random times (Poisson), at a share of the rate that the same clients reach when
each asks again as soon as it has its answer. Every answer is compared with what the package's
replay cases expect. Memory is flat when the median of the server's resident memory over the last
fifth is within 2 % of that over the second fifth (the first has the warm-up). A request is lost
when it gets no answer, or another one than 200.

usage: python -m bench.soak PACKAGE [--seconds N] [--results]   status 1: something was wrong
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ikbo._load import ops_library_path
from ikbo.testing.bench import REPOSITORY, write_results

MAX_MEMORY_CHANGE = 0.02
CALIBRATION_SECONDS = 5.0
CONNECTIONS = 8
SOURCES = (
    "bench/soak.py",
    "include/ikbo/runtime/*.h",
    "src/runtime/*.cpp",
    "src/runtime/*.h",
    "src/server/*.cpp",
    "src/server/*.h",
)
NUMPY_TYPES = {"bool": "BOOL", "uint8": "UINT8", "int8": "INT8", "int16": "INT16"} | {
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


@dataclass(frozen=True)
class Case:
    """A replay case as a request and what must come back."""

    request: bytes
    outputs: tuple[tuple[str, np.ndarray], ...]  # name and flat values
    atol: float
    rtol: float

    def matches(self, head: dict[str, str], body: bytes) -> bool:
        size = int(head["inference-header-content-length"])
        answer = json.loads(body[:size])
        at = size
        got = {}
        for output in answer["outputs"]:
            end = at + output["parameters"]["binary_data_size"]
            got[output["name"]] = body[at:end]
            at = end
        return all(
            np.allclose(
                np.frombuffer(got[name], expected.dtype),
                expected,
                rtol=self.rtol,
                atol=self.atol,
                equal_nan=True,
            )
            for name, expected in self.outputs
        )


def read_cases(package: Path) -> list[Case]:
    """The replay cases of a package."""
    with zipfile.ZipFile(package) as archive:
        (path,) = (x for x in archive.namelist() if x.endswith("extra/ikbo/manifest.json"))
        folder = path.removesuffix("manifest.json")
        manifest = json.loads(archive.read(path))
        return [_read_case(archive, folder, manifest, case) for case in manifest["replay"]]


def _read_case(archive: zipfile.ZipFile, folder: str, manifest: dict, case: dict) -> Case:
    rows = {"user": case["num_users"], "candidate": case["num_candidates"]}
    rows["index"] = rows["candidate"]
    described, blobs = [], []
    for spec, entry in zip(manifest["inputs"], case["inputs"], strict=True):
        blobs.append(archive.read(folder + entry))
        described.append(
            {
                "name": spec["name"],
                "datatype": NUMPY_TYPES[spec["dtype"]],
                "shape": [rows[spec["role"]], *spec["shape"][1:]],
                "parameters": {"binary_data_size": len(blobs[-1])},
            }
        )
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(blobs)
    request = (
        f"POST /v2/models/{manifest['model']['name']}/infer HTTP/1.1\r\nHost: soak\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    outputs = tuple(
        (spec["name"], np.frombuffer(archive.read(folder + entry), spec["dtype"]))
        for spec, entry in zip(manifest["outputs"], case["outputs"], strict=True)
    )
    return Case(request.encode() + body, outputs, case["atol"], case["rtol"])


@dataclass
class Counts:
    """What came of the requests and the reloads."""

    answered: int = 0
    wrong: int = 0
    lost: int = 0
    reloads: int = 0
    failed_reloads: int = 0
    seconds: list[float] = field(default_factory=list)  # from a request's arrival to its answer
    resident: list[int] = field(default_factory=list)  # bytes, one a second


class Connection:
    """One connection of a client, opened again when the server closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        try:
            if self.streams is None:
                self.streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self.streams
            writer.write(request)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            head = {name.lower(): x for name, x in (line.split(": ", 1) for line in lines)}
            return (
                int(status.split()[1]),
                head,
                await reader.readexactly(int(head["content-length"])),
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


class Soak:
    """The clients of one server."""

    def __init__(self, port: int, process: int, cases: list[Case], model: str) -> None:
        self.port = port
        self.process = process
        self.cases = cases
        self.model = model
        self.random = random.Random(7)

    async def ask(self, connection: Connection, counts: Counts, arrival: float) -> None:
        case = self.random.choice(self.cases)
        try:
            status, head, body = await connection.ask(case.request)
        except (OSError, asyncio.IncompleteReadError) as error:
            print(f"soak: lost: {error!r}", file=sys.stderr)
            counts.lost += 1
            return
        if status != 200:
            print(f"soak: lost: status {status}: {body[:200]!r}", file=sys.stderr)
            counts.lost += 1
            return
        counts.answered += 1
        counts.seconds.append(time.perf_counter() - arrival)
        counts.wrong += not case.matches(head, body)

    async def closed_loop(self, seconds: float) -> float:
        """Requests per second when each connection asks again at once."""
        counts = Counts()
        begin = time.perf_counter()

        async def client() -> None:
            connection = Connection(self.port)
            while time.perf_counter() - begin < seconds:
                await self.ask(connection, counts, time.perf_counter())
            connection.close()

        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
        return counts.answered / (time.perf_counter() - begin)

    async def open_loop(self, rate: float, seconds: float, counts: Counts) -> None:
        """Requests that arrive whether or not the earlier ones have their answers."""
        arrivals: asyncio.Queue[float | None] = asyncio.Queue()

        async def client() -> None:
            connection = Connection(self.port)
            while (arrival := await arrivals.get()) is not None:
                await self.ask(connection, counts, arrival)
            connection.close()

        clients = [asyncio.create_task(client()) for _ in range(CONNECTIONS)]
        begin = due = time.perf_counter()
        while due - begin < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            arrivals.put_nowait(due)
            due += self.random.expovariate(rate)
        for _ in clients:
            arrivals.put_nowait(None)
        await asyncio.gather(*clients)

    async def reload(self, package: Path, every: float, counts: Counts) -> None:
        """Puts the same package in place as a new file and has it loaded, for ever."""
        path = f"/v2/repository/models/{self.model}/load"
        request = f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: 0\r\n\r\n".encode()
        while True:
            await asyncio.sleep(every)
            unfinished = package.with_suffix(".unfinished")
            shutil.copyfile(package, unfinished)
            unfinished.rename(package)
            connection = Connection(self.port)
            status, _, body = await connection.ask(request)
            connection.close()
            counts.reloads += 1
            if status != 200:
                print(f"soak: reload failed: {body!r}", file=sys.stderr)
                counts.failed_reloads += 1

    async def watch_memory(self, counts: Counts) -> None:
        pages = Path(f"/proc/{self.process}/statm")
        while True:
            counts.resident.append(int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(1)

    async def run(self, package: Path, load: float, seconds: float, every: float) -> tuple:
        """Returns the counts and the rate."""
        await self.closed_loop(1)
        rate = load * await self.closed_loop(CALIBRATION_SECONDS)
        counts = Counts()
        others = [
            asyncio.create_task(self.reload(package, every, counts)),
            asyncio.create_task(self.watch_memory(counts)),
        ]
        await self.open_loop(rate, seconds, counts)
        for task in others:
            if task.done():
                task.result()  # what it died of
            task.cancel()
        return counts, rate


@contextmanager
def serving(server: Path, folder: Path, flags: list[str]) -> Iterator[tuple[int, int]]:
    """Port and process of a server of the packages in the folder."""
    command = [str(server), "--model-repository", str(folder), "--allow-repository-changes"]
    command += ["--port", "0", "--no-grpc", "--ops-library", str(ops_library_path()), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"event=listening .* port=(\d+)", _text(log))):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"soak: the server must start; it said: {_text(log)}")
                time.sleep(0.1)
            yield int(found[1]), process.pid
        finally:
            process.kill()
            process.wait()


def _text(log) -> str:
    log.seek(0)
    return log.read()


def memory_change(resident: list[int]) -> float:
    """By which share the median of the last fifth differs from that of the second."""
    fifth = len(resident) // 5
    before = statistics.median(resident[fifth : 2 * fifth])
    return statistics.median(resident[-fifth:]) / before - 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--load", type=float, default=0.8, help="share of the closed-loop rate")
    parser.add_argument("--reload-every", type=float, default=30, metavar="SECONDS")
    parser.add_argument("--server", type=Path, default=REPOSITORY / "build/cpu/bin/ikbo-server")
    parser.add_argument("--flag", action="append", default=[], help="another one for the server")
    parser.add_argument(
        "--memory-change", type=float, default=MAX_MEMORY_CHANGE, help="share that is allowed"
    )
    parser.add_argument("--results", action="store_true", help="write bench/results/soak-cpu.json")
    options = parser.parse_args(arguments)
    if options.seconds < 5 * options.reload_every:
        parser.error("--seconds must be at least five times --reload-every")
    cases = read_cases(options.package)
    with zipfile.ZipFile(options.package) as archive:
        (path,) = (x for x in archive.namelist() if x.endswith("extra/ikbo/manifest.json"))
        model = json.loads(archive.read(path))["model"]["name"]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copy(options.package, Path(folder) / "served.pt2"))
        with serving(options.server, Path(folder), options.flag) as (port, process):
            soak = Soak(port, process, cases, model)
            counts, rate = asyncio.run(
                soak.run(package, options.load, options.seconds, options.reload_every)
            )
    change = memory_change(counts.resident)
    row = {
        "case": {"what": "soak", "seconds": options.seconds, "load": options.load},
        "cores": len(os.sched_getaffinity(0)),  # of server and clients together
        "unit": "requests",
        "ours": counts.answered,
        "peers": {},
        "wrong": counts.wrong,
        "lost": counts.lost,
        "reloads": counts.reloads,
        "failed_reloads": counts.failed_reloads,
        "requests_per_second": rate,
        "p50_ms": 1e3 * statistics.median(counts.seconds),
        "p99_ms": 1e3 * statistics.quantiles(counts.seconds, n=100)[-1],
        "resident_mb": statistics.median(counts.resident) / 1e6,
        "memory_change": change,
    }
    print(json.dumps(row))
    is_good = not (counts.wrong or counts.lost or counts.failed_reloads)
    is_good = is_good and counts.reloads > 0 and abs(change) <= options.memory_change
    if options.results and is_good:
        write_results("soak", [row], sources=SOURCES)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
