# SPDX-License-Identifier: Apache-2.0
"""Measures `ikbo-server` from outside, under open-loop load, into `bench/results/serve-cpu.json`.

Server and load generator are processes of their own on this machine, every answer is checked. The
parts: what the server adds to a request, alone and beside an echo service of the same stack;
requests a second against the same net with replicated inputs at equal p99; the curve of throughput
and p99 with and without batching; users who ask twice, with and without a cache of their states;
parsing in process; the start of the process. On a GPU (`--device cuda`, into `serve-h200.json`):
against replicated inputs as well, for late ranking; runs with CUDA graphs and without.

usage: python -m bench.bench_serve [--device cuda] [--prepare] [PART ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.serve.contest import Contest
from bench.serve.processes import (
    BINARIES,
    Histogram,
    Ports,
    beside_workers,
    load,
    read_histograms,
    running_echo,
    running_server,
)
from bench.serve.search import Ask, Search, Step, find_rate, show, try_rate
from bench.serve.workloads import (
    HISTORY_USERS,
    MAX_MERGED,
    NUM_CANDIDATES,
    NUM_REQUESTS,
    RATIO,
    Workload,
    make_workloads,
)
from examples.movielens.contestants import MAX_MERGED as DEMO_MERGED
from examples.movielens.data import USER_INPUTS
from examples.movielens.serving import HEADER_LENGTH, MODEL, Client
from ikbo.testing.bench_results import ResultFile

THREADS = 2  # of a run of the demo's net
LIGHT_LOAD, HALF_LOAD = 0.1, 0.5  # of the time in which the model runs
OVERHEAD_SECONDS = 10
CLIENT_NICENESS = 10
CONNECTIONS = 64
TOLERANCE = 1e-4  # of logits of a few units: fp32 sums in another order
BODY_BYTES = 65536
LIGHT_SIZES = {"candidates": NUM_CANDIDATES, "bytes": BODY_BYTES}
# A limit on p99 that the replicated net can keep: a request waits for a run of four merged ones and
# is in the next such run.
P99_IN_RUNS = 8
BATCHING_WORKERS = 2  # of one thread each
SEARCH_STEPS = 4
SEARCH_SECONDS = 10  # at least, of one step
SEARCH_RANGE = (0.1, 1.3)  # in the rate of one request after the other
CURVE_LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0)  # likewise
CURVE_SECONDS = 5
CURVE_LIMITS = (2, 5)  # p99 in the latency of a request alone
CURVE_END = 10  # likewise: beyond, the server is overloaded
STARTS = 5
CACHE_BYTES = 1 << 30  # room for all users
# What must be reached: at most, in the unit of the row; otherwise at least, and in what.
MOST = {"overhead_p50": 100, "overhead_p99": 300, "cold_start": 1}
MAX_ECHO = 1.3  # times the latency of the echo service, over gRPC
MIN_REPLICATED = {"cpu": 7, "cuda": 5}  # times the rate of the replicated net
MIN_JSON = 0.7  # times the speed of simdjson
MIN_BINARY = 2  # GB/s
_SHARED = [
    "bench/bench_serve.py",
    "bench/serve/*",
    "examples/movielens/*.py",
    "examples/nets/*.py",
    "include/ikbo/**/*.h",
    *(f"python/ikbo/{name}" for name in ("*.py", "nn/*.py", "transform/**/*.py")),
    *(f"src/{folder}/*" for folder in ("common", "torch_ops", "runtime", "server")),
]
SOURCES = {
    "cpu": [*_SHARED, "src/cpu/*"],
    "cuda": [*_SHARED, "src/kernels/**/*"],
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What the parts share."""

    workloads: Mapping[str, Workload]
    time_scale: float  # 1 for figures that count
    contest: Contest

    def ask(
        self, ports: Ports, name: str, protocol: str, rate: float, seconds: float, **flags: Any
    ) -> dict[str, Any]:
        """Load with a warm-up of a fifth of the time."""
        return load(
            protocol,
            ports,
            self.workloads[name].requests[protocol],
            model=MODEL,
            rate=rate,
            seconds=seconds * self.time_scale,
            warm_up_seconds=seconds * self.time_scale / 5,
            connections=CONNECTIONS,
            tolerance=self.contest.tolerance,
            **flags,
        )

    def ask_watched(
        self, ports: Ports, name: str, protocol: str, rate: float, seconds: float, **flags: Any
    ) -> tuple[dict[str, Any], dict[str, Histogram]]:
        """The client's figures, and what the server's histograms gained.

        Errors:
            RuntimeError: a request was not answered.
        """
        before = read_histograms(ports["http"])
        seen = self.ask(ports, name, protocol, rate, seconds, **flags)
        if seen["errors"]:
            raise RuntimeError(f"bench_serve: every request must be answered; got {seen['errors']}")
        after = read_histograms(ports["http"])
        return seen, {key: after[key] - before[key] for key in after}


def make_row(case: Row, unit: str, ours: float, **peers: float) -> Row:
    others = "".join(f", {name} {value:.4g}" for name, value in peers.items())
    show(f"  {text_of(case)}: {ours:.4g} {unit}{others}")
    return {"case": case, "unit": unit, "ours": ours, "peers": peers}


def text_of(case: Mapping[str, Any]) -> str:
    return " ".join(
        f"{value}" if key == "what" else f"{key}={value}" for key, value in case.items()
    )


def full_rate(bench: Bench, ports: Ports) -> float:
    """Requests a second at which one worker's model would run all of the time."""
    _, gained = bench.ask_watched(ports, "light", "http", 100, 3)
    return 1 / gained["ikbo_run_seconds"].mean()


def measure_overhead(bench: Bench) -> Iterator[Row]:
    """What the server adds, by its own clock at half load and by the client's at a light one."""
    yield from _added_by_server(bench)
    yield from _added_for_client(bench)


def _added_by_server(bench: Bench) -> list[Row]:
    """The worker has a core of its own, and the server's other threads come before the clients'."""
    rows: list[Row] = []
    seconds = OVERHEAD_SECONDS
    flags = ("--threads-per-run=1", "--pin-workers")
    with running_server(bench.workloads["light"].package, *flags) as server, beside_workers(server):
        rate = HALF_LOAD * full_rate(bench, server.ports)
        for protocol in ("http", "grpc"):
            _, gained = bench.ask_watched(
                server.ports, "light", protocol, rate, seconds, niceness=CLIENT_NICENESS
            )
            for figure, share in (("overhead_p50", 0.5), ("overhead_p99", 0.99)):
                case = {"what": figure, "protocol": protocol, "load": HALF_LOAD, **LIGHT_SIZES}
                ours = gained["ikbo_overhead_seconds"].quantile(share) * 1e6
                queue = gained["ikbo_queue_seconds"].quantile(share) * 1e6
                rows.append({**make_row(case, "us", ours), "rate": rate, "queue_us": queue})
    return rows


def _added_for_client(bench: Bench) -> list[Row]:
    with running_server(bench.workloads["light"].package, "--threads-per-run=1") as server:
        rate = LIGHT_LOAD * full_rate(bench, server.ports)
        added_us, run_us = {}, {}
        for protocol in ("http", "grpc"):
            seen, gained = bench.ask_watched(
                server.ports, "light", protocol, rate, OVERHEAD_SECONDS
            )
            run_us[protocol] = round(gained["ikbo_run_seconds"].mean() * 1e6)
            added_us[protocol] = seen["latency_us"]["p50"] - run_us[protocol]
    rows: list[Row] = []
    for protocol, ours in added_us.items():
        echo = partial(_added_by_echo, bench, protocol, rate)
        case = {"what": "client_p50_without_model", "protocol": protocol, **LIGHT_SIZES}
        row = make_row(case, "us", ours, echo=echo(run_us[protocol]), echo_at_once=echo(0))
        rows.append({**row, "rate": rate, "run_us": run_us[protocol]})
    return rows


def _added_by_echo(bench: Bench, protocol: str, rate: float, run_us: int) -> float:
    with running_echo(NUM_CANDIDATES * 4 + 200, run_us) as ports:
        seen = bench.ask(ports, "light", protocol, rate, OVERHEAD_SECONDS, ignore_answers=True)
    p50: float = seen["latency_us"]["p50"]
    return p50 - run_us


def demo_flags(
    max_users: int, candidates: int, *, workers: int = 1, threads: int = THREADS
) -> list[str]:
    return [
        f"--workers={workers}",
        f"--threads-per-run={threads}",
        f"--max-batch-users={max_users}",
        f"--max-batch-candidates={max_users * candidates}",
        "--max-queue=1048576",
    ]


def seconds_alone(ports: Ports, workload: Workload, count: int = NUM_REQUESTS) -> float:
    """Median latency of requests one after the other."""
    return statistics.median(latencies_of(ports, workload, count + 2)[2:])


def latencies_of(ports: Ports, workload: Workload, count: int) -> list[float]:
    """Seconds of each of the first requests, one after the other."""
    described = json.loads(workload.requests["http"].read_text())["requests"]
    client = Client(ports["http"])
    latencies = []
    for number in range(count):
        request = described[number % len(described)]
        body = (workload.requests["http"].parent / request["body"]).read_bytes()
        begin = time.perf_counter()
        client.infer(body, {HEADER_LENGTH: str(request["json_size"])})
        latencies.append(time.perf_counter() - begin)
    return latencies


def measure_throughput(bench: Bench) -> list[Row]:
    """With an index against replicated inputs, the same server and clients."""
    contest = bench.contest
    replicated_flags = [*contest.flags, f"--replicated={','.join(contest.user_inputs)}"]
    replicated_net, ours_net = bench.workloads["replicated"], bench.workloads[contest.ours]
    with running_server(replicated_net.package, *replicated_flags) as server:
        alone = seconds_alone(server.ports, replicated_net, count=8)
        limit_ms = P99_IN_RUNS * alone * 1e3
        ask = partial(bench.ask, server.ports, "replicated", "http")
        replicated = find_rate(ask, "replicated", contest.search, alone, limit_ms)
    with running_server(ours_net.package, *contest.flags) as server:
        alone = seconds_alone(server.ports, ours_net)
        ask = partial(bench.ask, server.ports, contest.ours, "http")
        ours = find_rate(ask, contest.ours, contest.search, alone, limit_ms)
    case = {"what": "throughput", "net": contest.net, "candidates": NUM_CANDIDATES}
    row = make_row(case, "requests/s", ours.rate, replicated=replicated.rate)
    p99 = {"limit": limit_ms, "ours": ours.p99_ms, "replicated": replicated.p99_ms}
    return [{**row, "p99_ms": p99}]


def measure_batching(bench: Bench) -> Iterator[Row]:
    """Few candidates a user, where merging users pays most."""
    wide = bench.workloads["wide"]
    curves: dict[str, list[Step]] = {}
    alone = 0.0
    for name, max_users in (("batching_off", 1), ("ours", MAX_MERGED)):
        flags = demo_flags(max_users, RATIO, workers=BATCHING_WORKERS, threads=1)
        with running_server(wide.package, *flags) as server:
            # Merged or not, a request alone takes the same run: both have one limit.
            alone = alone or seconds_alone(server.ports, wide, count=64)
            show(f"  {name}, alone {alone * 1e3:.4g} ms")
            curves[name] = _curve(partial(bench.ask, server.ports, "wide", "http"), alone)
    sizes = {"ratio": RATIO, "net": "movielens"}
    for limit in CURVE_LIMITS:
        best = {
            name: max((step.rate for step in curve if step.keeps(limit * alone * 1e3)), default=0.0)
            for name, curve in curves.items()
        }
        case = {"what": "batching", "p99_within": f"{limit}x", **sizes}
        row = make_row(case, "requests/s", best.pop("ours"), **best)
        yield {**row, "alone_ms": alone * 1e3}
    for number, at in enumerate(CURVE_LOADS):
        points = {name: curve[number] for name, curve in curves.items() if number < len(curve)}
        if "ours" in points:
            case = {"what": "batching_curve", "load": at, **sizes}
            p99 = {name: step.p99_ms for name, step in points.items()}
            row = make_row(case, "ms", p99.pop("ours"), **p99)
            x = {name: step.rate for name, step in points.items()}
            limits = {f"{limit} x alone": limit * alone * 1e3 for limit in CURVE_LIMITS}
            yield {**row, "x": x, "x_unit": "requests/s", "y": "p99", "limits": limits}


def _curve(ask: Ask, alone: float) -> list[Step]:
    steps: list[Step] = []
    limit_ms = CURVE_LIMITS[0] * alone * 1e3
    for at in CURVE_LOADS:
        step = try_rate(ask, at / alone, CURVE_SECONDS, limit_ms)
        if step.errors:
            break
        steps.append(step)
        if step.p99_ms > CURVE_END * alone * 1e3:
            break
    return steps


def measure_user_cache(bench: Bench) -> list[Row]:
    """Every user asks twice, about other candidates: what was computed of them is kept, or not."""
    twice = bench.workloads["history"]
    mean_ms, median_ms = {}, {}
    for name, size in (("ours", CACHE_BYTES), ("cache_off", 0)):
        flags = ["--workers=1", f"--threads-per-run={THREADS}", f"--user-cache-bytes={size}"]
        with running_server(twice.package, *flags) as server:
            ms = [1e3 * x for x in latencies_of(server.ports, twice, 2 * HISTORY_USERS)]
            mean_ms[name] = statistics.mean(ms)
            halves = ms[:HISTORY_USERS], ms[HISTORY_USERS:]
            median_ms[name] = [statistics.median(half) for half in halves]
            rate = 0.3 * 1e3 / mean_ms[name]
            seen = bench.ask(server.ports, "history", "http", rate, 2 * HISTORY_USERS / rate)
            if seen["errors"]:
                raise RuntimeError(f"bench_serve: all must be answered; got {seen['errors']}")
    case = {"what": "user_cache", "net": "llm_scale", "candidates": RATIO, "asks": 2}
    row = make_row(case, "ms", mean_ms.pop("ours"), **mean_ms)
    return [{**row, "median_ms_of_first_and_second": median_ms}]


def measure_parsing(_: Bench) -> list[Row]:
    """From a body in memory to a checked request, on one core."""
    command = [str(BINARIES / "ikbo_bench_parsing"), "--benchmark_format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    gbs = {
        run["name"]: run["bytes_per_second"] / 1e9 for run in json.loads(done.stdout)["benchmarks"]
    }
    sizes = {"candidates": NUM_CANDIDATES, "tensor_bytes": BODY_BYTES}
    rows = []
    for body in ("binary", "protobuf", "json"):
        case = {"what": "parsing", "body": body, **sizes}
        peers = {"simdjson": gbs["bare_simdjson"]} if body == "json" else {}
        rows.append(make_row(case, "GB/s", gbs[body], **peers))
    return rows


def measure_start(bench: Bench) -> list[Row]:
    """From the start of the process to listening."""
    cold, warm_up = [], []
    for _ in range(STARTS):
        flags = demo_flags(DEMO_MERGED, NUM_CANDIDATES)
        with running_server(bench.workloads["ikbo"].package, *flags) as server:
            cold.append(server.seconds - server.warm_up_seconds)
            warm_up.append(server.warm_up_seconds)
    row = make_row({"what": "cold_start", "net": "movielens"}, "s", statistics.median(cold))
    return [{**row, "warm_up_s": statistics.median(warm_up)}]


def measure_graphs(bench: Bench) -> list[Row]:
    """Runs in process: as CUDA graphs against runs without, two sessions against one."""
    from bench.serve.graphs import graph_rows, overlap_row

    package = bench.workloads["ours"].package
    rows = [*graph_rows(package), overlap_row(package)]
    return [row | make_row(row["case"], row["unit"], row["ours"], **row["peers"]) for row in rows]


def failures(rows: Sequence[Mapping[str, Any]], device: str) -> list[str]:
    """What the server must reach and did not."""
    min_replicated = MIN_REPLICATED[device]
    found = []
    for row in rows:
        ours, peers, case = row["ours"], row["peers"], row["case"]
        what = case["what"]
        if what in MOST and not ours <= MOST[what]:
            found.append(f"{text_of(case)}: {ours:.4g} {row['unit']}; at most {MOST[what]}")
        if (
            case.get("protocol") == "grpc"
            and "echo" in peers
            and not ours <= MAX_ECHO * peers["echo"]
        ):
            found.append(
                f"{text_of(case)}: {ours:.0f} us; at most {MAX_ECHO} x {peers['echo']:.0f}"
            )
        if what == "throughput" and not ours >= min_replicated * peers["replicated"]:
            found.append(
                f"{text_of(case)}: {ours / peers['replicated']:.2f}x replicated's; "
                f"at least {min_replicated}x"
            )
        if what == "user_cache" and not ours < peers["cache_off"]:
            found.append(f"{text_of(case)}: {ours:.4g} ms; less than {peers['cache_off']:.4g}")
        if what == "parsing" and "simdjson" in peers and not ours >= MIN_JSON * peers["simdjson"]:
            found.append(f"{text_of(case)}: {ours:.2f} GB/s; at least {MIN_JSON} x simdjson's")
        if what == "parsing" and "simdjson" not in peers and not ours >= MIN_BINARY:
            found.append(f"{text_of(case)}: {ours:.2f} GB/s; at least {MIN_BINARY}")
    return found


PARTS: dict[str, dict[str, Callable[[Bench], Iterable[Row]]]] = {
    "cpu": {
        "parsing": measure_parsing,
        "start": measure_start,
        "overhead": measure_overhead,
        "batching": measure_batching,
        "throughput": measure_throughput,
        "user_cache": measure_user_cache,
    },
    "cuda": {"graphs": measure_graphs, "throughput": measure_throughput},
}


def make_bench(device: str, time_scale: float) -> Bench:
    if device == "cuda":
        from bench.serve import late_ranking

        return Bench(late_ranking.make_workloads(), time_scale, late_ranking.CONTEST)
    search = Search(SEARCH_SECONDS, SEARCH_RANGE, SEARCH_STEPS)
    flags = demo_flags(DEMO_MERGED, NUM_CANDIDATES)
    contest = Contest("movielens", "ikbo", flags, USER_INPUTS, search, TOLERANCE)
    return Bench(make_workloads(), time_scale, contest)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bench_serve", description=__doc__.split("\n", 1)[0]
    )
    names = "; ".join(f"{device}: {', '.join(parts)}" for device, parts in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {names}; all")
    parser.add_argument("--device", choices=PARTS, default="cpu")
    parser.add_argument("--prepare", action="store_true", help="make packages and requests alone")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, to try it out")
    parser.add_argument("--out", type=Path, help="folder of the result file; with --quick required")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out is None:
        parser.error("--quick: its figures must not be kept; give --out")
    device = arguments.device
    parts = PARTS[device]
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"PART must be one of {', '.join(parts)}; got {', '.join(sorted(unknown))}")
    torch.set_num_threads(THREADS)
    show("packages and requests")
    bench = make_bench(device, 0.1 if arguments.quick else 1.0)
    if arguments.prepare:
        return 0
    results = ResultFile(
        "serve",
        SOURCES[device],
        arguments.out,
        keep=bool(arguments.parts),
        device="cpu" if device == "cpu" else "h200",
    )
    measured: list[Row] = []
    missed: list[str] = []
    started = time.monotonic()
    wanted = arguments.parts or list(parts)
    for number, name in enumerate(wanted, start=1):
        begin = time.monotonic()
        show(f"{name} ({number} of {len(wanted)}, after {begin - started:.0f} s)")
        try:
            for row in parts[name](bench):
                results.add(row)
                measured.append(row)
        except Exception as error:  # the other parts' figures are wanted all the same
            traceback.print_exc()
            missed.append(f"{name}: {type(error).__name__}: {error}")
        show(f"  {name}: {time.monotonic() - begin:.0f} s")
    missed += failures(measured, device)
    for text in missed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
