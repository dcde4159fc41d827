# SPDX-License-Identifier: Apache-2.0
"""Sends the same requests to several servers, times the answers and checks them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from examples.movielens.serving import Client

BLOCK = 10


@dataclass(frozen=True)
class Exchange:
    """An encoded request and the outputs of the unmodified net for it."""

    body: bytes
    headers: Mapping[str, str]
    expected: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Target:
    """A server and the requests in its form, in the same order for every server."""

    port: int
    exchanges: Sequence[Exchange]


@dataclass
class Answers:
    """Latencies of one server, and how far its outputs were from the expected ones."""

    latencies_ms: list[float] = field(default_factory=list)
    max_abs_diff: float = 0.0
    busy_seconds: float = 0.0

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.latencies_ms, q))

    @property
    def per_second(self) -> float:
        return len(self.latencies_ms) / self.busy_seconds

    def ask(self, client: Client, exchange: Exchange) -> None:
        """One timed request."""
        started = time.perf_counter()
        got = client.infer(exchange.body, exchange.headers)
        self.latencies_ms.append((time.perf_counter() - started) * 1e3)
        for name, values in exchange.expected.items():
            difference = float(np.abs(got[name] - values).max())
            if not difference <= self.max_abs_diff:  # true for NaN as well
                self.max_abs_diff = difference

    def merge(self, others: Sequence[Answers], seconds: float) -> None:
        self.busy_seconds += seconds
        for other in others:
            self.latencies_ms += other.latencies_ms
            if not other.max_abs_diff <= self.max_abs_diff:
                self.max_abs_diff = other.max_abs_diff


def one_client(targets: Mapping[str, Target], rounds: int) -> dict[str, Answers]:
    """One request at a time; in each round every server answers `BLOCK` requests in a row.

    Turns are short, so that each server sees the same state of the machine, and not of one request,
    so that most answers come from a server whose weights are in the processor's caches.
    """
    answers = {name: Answers() for name in targets}
    clients = {name: Client(target.port) for name, target in targets.items()}
    for first in range(0, rounds * BLOCK, BLOCK):
        for name, target in targets.items():
            started = time.perf_counter()
            for number in range(first, first + BLOCK):
                answers[name].ask(clients[name], target.exchanges[number % len(target.exchanges)])
            answers[name].busy_seconds += time.perf_counter() - started
    return answers


def several_clients(
    targets: Mapping[str, Target], num_clients: int, rounds: int
) -> dict[str, Answers]:
    """Clients side by side, each with its next request as soon as the last one is answered.

    The servers take turns; in a round each of them answers every request once.
    """
    answers = {name: Answers() for name in targets}
    for _ in range(rounds):
        for name, target in targets.items():
            shares = [target.exchanges[n::num_clients] for n in range(num_clients)]
            started = time.perf_counter()
            with ThreadPoolExecutor(num_clients) as pool:
                parts = list(pool.map(send_all, [target.port] * num_clients, shares))
            answers[name].merge(parts, time.perf_counter() - started)
    return answers


def send_all(port: int, exchanges: Sequence[Exchange]) -> Answers:
    """What one client sees."""
    answers, client = Answers(), Client(port)
    for exchange in exchanges:
        answers.ask(client, exchange)
    return answers
