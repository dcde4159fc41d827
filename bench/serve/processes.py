# SPDX-License-Identifier: Apache-2.0
"""`ikbo-server`, `ikbo-echo` and `ikbo-load` as child processes, and the server's metrics."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikbo._load import ops_library_path

REPOSITORY = Path(__file__).resolve().parents[2]
# Where the programs are: beside IKBO_SERVER, else those of the `cpu` preset.
BINARIES = Path(os.environ.get("IKBO_SERVER", REPOSITORY / "build/cpu/bin/ikbo-server")).parent
STOP_SECONDS = 60

Ports = Mapping[str, int]  # protocol to port


@dataclass(frozen=True)
class Started:
    """A server that listens, and how it got there."""

    process_id: int
    ports: Ports
    seconds: float  # from the process's start to listening
    warm_up_seconds: float  # of them


@contextmanager
def running_server(package: Path, *flags: str) -> Iterator[Started]:
    """Runs `ikbo-server` on free ports. Its log is shown when it does not start."""
    command = [str(BINARIES / "ikbo-server"), f"--model={package}", "--port=0", "--grpc-port=0"]
    command.append("--idle-timeout-ms=3600000")  # a connection may be idle at a low rate
    command += [f"--ops-library={ops_library_path()}", *flags]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _wait_listening(process, begin)
    finally:
        process.terminate()
        process.communicate(timeout=STOP_SECONDS)


def _wait_listening(process: subprocess.Popen[str], begin: float) -> Started:
    assert process.stderr is not None
    log, warm_up_us = "", 0
    for line in process.stderr:
        log += line
        if found := re.search(r"event=model_loaded .* warm_up_us=(\d+)", line):
            warm_up_us = int(found[1])
        if found := re.search(r"event=listening .* port=(\d+) grpc_port=(\d+)", line):
            ports = {"http": int(found[1]), "grpc": int(found[2])}
            return Started(process.pid, ports, time.perf_counter() - begin, warm_up_us / 1e6)
    raise RuntimeError(f"bench_serve: ikbo-server must start; its log says:\n{log}")


@contextmanager
def beside_workers(server: Started) -> Iterator[None]:
    """Keeps what is started meanwhile, and this process, where all threads of the server are but
    its pinned workers."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(server.process_id))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def running_echo(reply_bytes: int, run_us: int) -> Iterator[Ports]:
    """Runs `ikbo-echo` on free ports; it works for `run_us` microseconds before each answer."""
    command = [str(BINARIES / "ikbo-echo"), f"--reply-bytes={reply_bytes}", f"--run-us={run_us}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"port=(\d+) grpc_port=(\d+)\n", line)
        if found is None:
            raise RuntimeError(f"bench_serve: ikbo-echo must name its ports; it said {line!r}")
        yield {"http": int(found[1]), "grpc": int(found[2])}
    finally:
        process.terminate()
        process.communicate(timeout=STOP_SECONDS)


def load(
    protocol: str, ports: Ports, requests: Path, *, niceness: int = 0, **flags: float | str | bool
) -> dict[str, Any]:
    """Runs `ikbo-load`, so much nicer than this process, and returns what it prints. A flag that is
    True has no value.

    Errors:
        RuntimeError: it failed, or answers were not the expected ones.
    """
    command = ["nice", "-n", str(niceness), str(BINARIES / "ikbo-load")]
    command += [f"--protocol={protocol}", f"--port={ports[protocol]}", f"--requests={requests}"]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not False:
            command.append(flag if value is True else f"{flag}={value}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"bench_serve: ikbo-load failed with status {done.returncode}: {done.stderr.strip()}"
        )
    figures: dict[str, Any] = json.loads(done.stdout)
    if "wrong_answer" in figures["errors"]:
        raise RuntimeError(f"bench_serve: wrong answers: {figures}")
    return figures


@dataclass(frozen=True)
class Histogram:
    """A histogram of /metrics, or the difference of two readings of it."""

    counts: Mapping[float, float]  # upper bound to observations at or below it
    total: float
    count: float

    def __sub__(self, earlier: Histogram) -> Histogram:
        counts = {bound: count - earlier.counts[bound] for bound, count in self.counts.items()}
        return Histogram(counts, self.total - earlier.total, self.count - earlier.count)

    def mean(self) -> float:
        return self.total / self.count

    def quantile(self, share: float) -> float:
        """Linear within its bucket, as Prometheus's `histogram_quantile` has it.

        Above the last bound that is the last bound.
        """
        rank, below, lower = share * self.count, 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= rank and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / (count - below)
            below, lower = count, bound
        raise ValueError(f"bench_serve: a histogram must have {share:.0%} of its observations")


def read_histograms(port: int) -> dict[str, Histogram]:
    """The histograms of a server of one model, by name."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {
        name: _parse_histogram(name, text)
        for name in re.findall(r"^# TYPE (\w+) histogram$", text, re.MULTILINE)
    }


def _parse_histogram(name: str, text: str) -> Histogram:
    buckets = re.findall(rf'^{name}_bucket{{.*le="([^"]+)"}} (\S+)$', text, re.MULTILINE)

    def value(suffix: str) -> float:
        found = re.search(rf"^{name}_{suffix}{{.*}} (\S+)$", text, re.MULTILINE)
        assert found is not None, f"/metrics has no {name}_{suffix}"
        return float(found[1])

    counts = {float(bound.replace("+Inf", "inf")): float(count) for bound, count in buckets}
    return Histogram(counts, value("sum"), value("count"))
