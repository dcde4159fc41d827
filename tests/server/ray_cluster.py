# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two workers on this machine serves a package by three replicas, one of which is
killed under load.

Runs in the environment of requirements/ray.txt. Reads JSON from stdin (server, package,
ops_library, path, headers, bodies in hex, seconds) and prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

import ikbo.ray

NUM_REPLICAS = 3
NUM_USERS = 40
NUM_CLIENTS = 4
POLICY = ikbo.ray.RetryPolicy(deadline_s=60.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def replica_of(url: str, body: bytes, headers: dict[str, str], user: int) -> str:
    fields = headers | {ikbo.ray.USER_HEADER: f"user-{user}"}
    status, answer, _ = ikbo.ray.infer(url, body, fields, POLICY)
    assert status == 200, status
    return answer["x-ikbo-replica"]


def load(url: str, options: dict[str, Any], is_over: threading.Event, first: int) -> list:
    """(when it was sent, user, body, status, replica, answer) of all requests of one client."""
    seen = []
    number = first
    while not is_over.is_set():
        body = number % len(options["bodies"])
        user = number % NUM_USERS
        fields = options["headers"] | {ikbo.ray.USER_HEADER: f"user-{user}"}
        sent = time.monotonic()
        status, answer, text = ikbo.ray.infer(
            url, bytes.fromhex(options["bodies"][body]), fields, POLICY
        )
        replica = answer.get("x-ikbo-replica", "")
        seen.append((sent, user, body, status, replica, text.hex()))
        number += NUM_CLIENTS
    return seen


def kill_replica(server: str) -> bool:
    """Kills the actor, as a machine that fails takes all of it; whether its server died, too."""
    status = Path(f"/proc/{server}/status").read_text()
    os.kill(int(status.split("PPid:")[1].split()[0]), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{server}") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{server}")


def main(options: dict[str, Any]) -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"port": port, "location": "HeadOnly"})
    ikbo.ray.deploy(
        [options["package"]],
        name="ranker",
        server=options["server"],
        ops_library=options["ops_library"],
        num_replicas=NUM_REPLICAS,
        deployment_options={"max_replicas_per_node": 2},
    )
    url = f"http://127.0.0.1:{port}{options['path']}"
    body = bytes.fromhex(options["bodies"][0])

    def replicas() -> dict[int, str]:
        users = range(NUM_USERS)
        return {user: replica_of(url, body, options["headers"], user) for user in users}

    before, again = replicas(), replicas()
    is_over = threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(load, url, options, is_over, i) for i in range(NUM_CLIENTS)]
        try:
            time.sleep(options["seconds"] / 2)
            victim = before[0]
            killed = time.monotonic()
            is_server_gone = kill_replica(victim)
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                found = set(replicas().values())
                if len(found) == NUM_REPLICAS and victim not in found:
                    break
                time.sleep(0.5)
        finally:
            is_over.set()
        seen = [request for client in clients for request in client.result()]
    after = replicas()
    new = set(after.values()) - set(before.values())
    joined = min((sent for sent, *_, replica, _ in seen if replica in new), default=0.0)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    return {
        "before": before,
        "again": again,
        "after": after,
        "victim": victim,
        "is_server_gone": is_server_gone,
        "statuses": Counter(str(status) for *_, status, _, _ in seen),
        "replicas": Counter(replica for *_, replica, _ in seen),
        "between": [
            (user, replica) for sent, user, _, _, replica, _ in seen if killed < sent < joined
        ],
        "answers": sorted({(body, text) for _, _, body, _, _, text in seen}),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
