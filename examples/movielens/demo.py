# SPDX-License-Identifier: Apache-2.0
"""The whole way of one ranking model: data, training, transform, package, C++ server, comparison.

Everything lands in `build/demo/`; what is there already and still fits is not made again. With
`--results` the latencies are also written to `bench/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.movielens.artefacts import FOLDER, REPOSITORY, packages, trained
from examples.movielens.contestants import MAX_CANDIDATES, MAX_MERGED, NUM_CANDIDATES
from examples.movielens.data import MovieLens, Request, fetch_tables
from examples.movielens.flops import flops_per_candidate
from examples.movielens.measure import Answers, Exchange, Target, one_client, several_clients
from examples.movielens.model import Ranker
from examples.movielens.serving import Client, encode, running_server
from examples.movielens.split import replicate
from examples.movielens.train import make_batch
from ikbo._load import ops_library_path
from ikbo.testing.bench import write_results

SERVER = REPOSITORY / "build" / "cpu" / "bin" / "ikbo-server"
THREADS = 2
NUM_REQUESTS = 16
NUM_CLIENTS = 4
ROUNDS = 10
LOADED_ROUNDS = 3
MIN_SPEEDUP = {"replicated": 6.0, "split": 1.35}
MAX_USER_SHARE = 0.8
MAX_DIFFERENCE = 1e-4  # of logits of a few units: fp32 sums in another order
RESULT_SOURCES = [
    "examples/movielens/*.py",
    "include/ikbo/**/*.h",
    *(f"python/ikbo/{name}" for name in ("*.py", "testing/bench.py", "transform/**/*.py")),
    *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops", "runtime", "server")),
]
LABELS = {
    "replicated": "unmodified net, replicated",
    "split": "hand-split net",
    "ikbo": "unmodified net, ikbo.transform",
}


@dataclass(frozen=True)
class Case:
    """A real user's request with 500 candidates, and what the unmodified net says to it."""

    request: Request
    inputs: dict[str, Tensor]  # one user row, 500 candidate rows
    watched: np.ndarray
    expected: Mapping[str, np.ndarray]


def make_cases(net: Ranker, data: MovieLens) -> list[Case]:
    """Held-out requests of different users, their own next films among the candidates."""
    rng = np.random.default_rng(7)
    requests = data.requests(held_out=True)
    users = rng.permutation(sorted({request.user for request in requests}))
    cases = []
    for user in users[:NUM_REQUESTS]:
        request = [request for request in requests if request.user == user][-1]
        drawn = NUM_CANDIDATES - len(request.targets)
        batch = make_batch(data, [request], drawn, rng, history=True)
        with torch.no_grad():
            outputs = net(**replicate(batch.inputs))
        expected = {name: values.numpy() for name, values in outputs.items()}
        cases.append(Case(request, batch.inputs, batch.watched.numpy(), expected))
    return cases


def make_exchanges(cases: list[Case], is_replicated: bool) -> list[Exchange]:
    """The cases as bytes. `cand_to_user` is left out: a request has one user."""
    exchanges = []
    for case in cases:
        inputs = dict(case.inputs)
        if is_replicated:
            inputs = replicate(inputs)
        else:
            del inputs["cand_to_user"]
        body, headers = encode({name: x.numpy() for name, x in inputs.items()})
        exchanges.append(Exchange(body, headers, case.expected))
    return exchanges


def server_command(package: Path) -> list[str]:
    """The same server for every package."""
    return [
        str(SERVER),
        f"--model={package}",
        f"--ops-library={ops_library_path()}",
        "--workers=1",
        f"--threads-per-run={THREADS}",
        f"--max-batch-users={MAX_MERGED}",
        f"--max-batch-candidates={MAX_CANDIDATES}",
        "--log-level=warning",
    ]


def show_table(title: str, answers: Mapping[str, Answers]) -> None:
    print(f"\n{title}")
    print(f"  {'':32}{'p50 ms':>9}{'p99 ms':>9}{'requests/s':>12}{'p50 / ikbo':>12}")
    ours = answers["ikbo"].percentile(50)
    for name, answer in answers.items():
        p50, p99 = answer.percentile(50), answer.percentile(99)
        rate = answer.per_second
        print(f"  {LABELS[name]:32}{p50:9.1f}{p99:9.1f}{rate:12.1f}{p50 / ours:11.2f}x")


def show_films(data: MovieLens, cases: list[Case], port: int) -> None:
    """The top films of three users by the chance that they watch and like them, as served."""
    print("\nTop 5 of 500 films, as ikbo-server ranks them (* the user went on to watch it)")
    client = Client(port)
    for case, exchange in zip(cases[:3], make_exchanges(cases[:3], False), strict=True):
        scores = client.infer(exchange.body, exchange.headers)
        chance = sigmoid(scores["watch"]) * sigmoid(scores["like"])
        print(f"  user {case.request.user}, {case.request.num_history} events so far")
        for row in np.argsort(-chance)[:5]:
            item = int(case.inputs["item_id"][row])
            mark = "*" if case.watched[row] else " "
            print(f"    {mark} {chance[row]:.3f}  {data.titles[item]}")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def summarise(
    auc: Mapping[str, float], alone: Mapping[str, Answers], loaded: Mapping[str, Answers]
) -> dict[str, Any]:
    """The figures of `summary.json`: latencies of one client, and under `loaded` of several."""

    def of_each(answers: Mapping[str, Answers], q: float) -> dict[str, float]:
        return {name: answer.percentile(q) for name, answer in answers.items()}

    p50 = of_each(alone, 50)
    everything = [*alone.values(), *loaded.values()]
    return {
        "max_abs_diff": float(np.max([answer.max_abs_diff for answer in everything])),
        **auc,
        "p50_ms": p50,
        "p99_ms": of_each(alone, 99),
        "speedup_p50_replicated": p50["replicated"] / p50["ikbo"],
        "speedup_p50_split": p50["split"] / p50["ikbo"],
        "loaded": {
            "num_clients": NUM_CLIENTS,
            "p50_ms": of_each(loaded, 50),
            "p99_ms": of_each(loaded, 99),
            "requests_per_second": {name: answer.per_second for name, answer in loaded.items()},
        },
    }


def result_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `bench/results/movielens-demo-cpu.json`: latencies, ours against the other two."""
    rows = []
    for num_clients, figures in ((1, summary), (NUM_CLIENTS, summary["loaded"])):
        for name in ("p50", "p99"):
            latency = dict(figures[f"{name}_ms"])
            case = {"figure": name, "clients": num_clients, "candidates": NUM_CANDIDATES}
            ours = latency.pop("ikbo")
            rows.append({"case": case, "unit": "ms", "ours": ours, "peers": latency})
    return rows


def failures(summary: Mapping[str, Any]) -> list[str]:
    """What the demo must show and did not."""
    found = []
    if not summary["max_abs_diff"] <= MAX_DIFFERENCE:
        found.append(
            f"an answer differs from the unmodified net by {summary['max_abs_diff']:.2e}; "
            f"at most {MAX_DIFFERENCE:.0e} is rounding"
        )
    if not summary["auc"] > summary["auc_popularity"]:
        found.append(
            f"AUC {summary['auc']:.3f} does not beat popularity's {summary['auc_popularity']:.3f}"
        )
    if not summary["user_share"] <= MAX_USER_SHARE:
        found.append(
            f"user-only work is {summary['user_share']:.1%} of the FLOPs; "
            f"at most {MAX_USER_SHARE:.0%} was meant"
        )
    for name, least in MIN_SPEEDUP.items():
        speedup = summary[f"speedup_p50_{name}"]
        if not speedup >= least:
            found.append(f"p50 is {speedup:.2f}x better than {LABELS[name]}; must be {least}x")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.movielens", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--results", action="store_true", help="write bench/results/ as well")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    print("[1/5] data: MovieLens 100k", flush=True)
    data = MovieLens(fetch_tables(FOLDER))
    print(f"[2/5] training on {THREADS} threads (about a minute)", flush=True)
    net, auc = trained(data)
    cases = make_cases(net, data)
    total, user = flops_per_candidate(net, cases[0].inputs)
    print(
        f"  held-out AUC {auc['auc']:.3f}, of popularity {auc['auc_popularity']:.3f}\n"
        f"  {total / 1e6:.1f} MFLOP a candidate, {user / total:.1%} of it from the user alone"
    )
    print("[3/5] packages: export, transform, compile (a minute each)", flush=True)
    paths = packages(net, data)
    with ExitStack() as servers:
        print("[4/5] starting ikbo-server for each", flush=True)
        targets = {}
        for name, path in paths.items():
            log = FOLDER / f"server-{name}.log"
            port = servers.enter_context(running_server(server_command(path), log))
            targets[name] = Target(port, make_exchanges(cases, name == "replicated"))
        print(f"[5/5] {NUM_CANDIDATES} candidates a request, every answer checked", flush=True)
        one_client(targets, rounds=1)
        alone = one_client(targets, ROUNDS)
        loaded = several_clients(targets, NUM_CLIENTS, LOADED_ROUNDS)
        summary = summarise(auc, alone, loaded) | {"user_share": user / total}
        print(f"\nLargest difference from the unmodified net: {summary['max_abs_diff']:.1e}")
        show_table(f"One client, {THREADS} threads a run", alone)
        show_table(f"{NUM_CLIENTS} clients at once", loaded)
        show_films(data, cases, targets["ikbo"].port)
    target = FOLDER / "summary.json"
    target.write_text(json.dumps(summary, indent=2) + "\n")
    report = paths["ikbo"].with_suffix(".report.txt")
    print(f"\nWhat the transformation did: {report.relative_to(REPOSITORY)}")
    print(f"The figures: {target.relative_to(REPOSITORY)}")
    if arguments.results:
        written = write_results("movielens-demo", result_rows(summary), sources=RESULT_SOURCES)
        print(f"The latencies: {written.relative_to(REPOSITORY)}")
    missed = failures(summary)
    for text in missed:
        print(f"FAILED: {text}", file=sys.stderr)
    if missed:
        load = os.getloadavg()[0]
        print(f"Load of the machine: {load:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    return 1 if missed else 0
