# SPDX-License-Identifier: Apache-2.0
"""How many machines for X requests per second: a simulation from measured service times.

Each machine runs one worker that takes what waits, up to ``MAX_MERGED`` requests, into one run, as
ikbo-server does. A run of n requests takes the time on the line through two measured points: one
request alone, and four merged (``movielens-demo-cpu.json``, a closed loop of that many clients).
Requests arrive at random times (Poisson); a user's requests always go to the same machine, and
users are many, so that each request's machine is drawn evenly: no balancing by load helps a machine
that is behind.

usage: python -m bench.capacity [--results]
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ikbo.testing.bench import RESULTS, write_results

MEASURED = "movielens-demo-cpu.json"
MERGED_IN_THE_MEASUREMENT = 4
MAX_MERGED = 8
NUM_REQUESTS = 20_000  # a simulation; those of its first tenth are not counted
RATES = (100, 1_000, 10_000)
P99_TARGETS = (3.0, 5.0)  # in service times of one request alone

ServiceTime = Callable[[int], float]  # of n merged requests, in seconds


def read_service_times(path: Path) -> dict[str, ServiceTime]:
    """By contestant: ours and the peers that ran."""
    points: dict[str, dict[int, float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["case"]["figure"] == "p50":
            if row["unit"] != "ms":
                raise ValueError(f"{path}: unit must be ms; got {row['unit']!r}")
            for name, value in {"ikbo": row["ours"], **row["peers"]}.items():
                points.setdefault(name, {})[row["case"]["clients"]] = value / 1e3
    return {name: _line(known) for name, known in points.items()}


def _line(points: dict[int, float]) -> ServiceTime:
    alone, merged = points[1], points[MERGED_IN_THE_MEASUREMENT]
    slope = max(0.0, (merged - alone) / (MERGED_IN_THE_MEASUREMENT - 1))
    return lambda count: alone + (count - 1) * slope


def latencies(
    service: ServiceTime, rate: float, machines: int, count: int = NUM_REQUESTS, seed: int = 7
) -> list[float]:
    """Seconds from each request's arrival to its answer, in the order of answers."""
    rng = random.Random(seed)
    waiting: list[deque[float]] = [deque() for _ in range(machines)]
    ends: list[tuple[float, int, list[float]]] = []  # end, machine, arrivals of the run
    is_busy = [False] * machines
    done: list[float] = []

    def start(machine: int, now: float) -> None:
        queue = waiting[machine]
        run = [queue.popleft() for _ in range(min(len(queue), MAX_MERGED))]
        is_busy[machine] = bool(run)
        if run:
            heapq.heappush(ends, (now + service(len(run)), machine, run))

    def finish(until: float) -> None:
        while ends and ends[0][0] <= until:
            end, machine, run = heapq.heappop(ends)
            done.extend(end - arrival for arrival in run)
            start(machine, end)

    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        finish(now)
        machine = rng.randrange(machines)
        waiting[machine].append(now)
        if not is_busy[machine]:
            start(machine, now)
    finish(math.inf)
    return done[count // 10 :]


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def machines_for(service: ServiceTime, rate: float, target: float) -> int:
    """The fewest machines whose p99 is at most ``target`` seconds.

    Errors:
        ValueError: one request alone takes longer than the target.
    """
    if service(1) > target:
        raise ValueError(f"capacity: a run alone takes {service(1):.3g} s, more than {target:.3g}")
    low = max(0, math.floor(rate * service(MAX_MERGED) / MAX_MERGED) - 1)  # too few
    high = low + 1
    while p99(latencies(service, rate, high)) > target:
        low, high = high, math.ceil(1.2 * high) + 1
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        if middle > 0 and p99(latencies(service, rate, middle)) <= target:
            high = middle
        else:
            low = middle
    return high


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", action="store_true", help="write capacity-cpu.json")
    options = parser.parse_args(arguments)
    services = read_service_times(RESULTS / MEASURED)
    alone = services["ikbo"](1)
    rows = []
    for rate in RATES:
        for factor in P99_TARGETS:
            needed = {
                name: machines_for(service, rate, factor * alone)
                if service(1) <= factor * alone
                else "one request alone takes longer than that"
                for name, service in services.items()
            }
            rows.append(
                {
                    "case": {"requests_per_second": rate, "p99_ms": 1e3 * factor * alone},
                    "unit": "machines",
                    "ours": needed.pop("ikbo"),
                    "peers": needed,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    if options.results:
        write_results("capacity", rows, sources=("bench/capacity.py", f"bench/results/{MEASURED}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
