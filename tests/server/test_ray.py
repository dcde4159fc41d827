# SPDX-License-Identifier: Apache-2.0
"""ikbo.ray on a real cluster of two workers, in an environment of its own: `make test-ray`."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from ikbo._load import ops_library_path
from tests.server.serving import (
    REPOSITORY,
    WIRE_NAMES,
    Arrays,
    Served,
    eager,
    make_inputs,
    server_path,
)

PYTHON = os.environ.get("IKBO_RAY_PYTHON", "")


def body_of(inputs: Arrays) -> bytes:
    described = [
        {
            "name": name,
            "datatype": WIRE_NAMES[x.dtype.name],
            "shape": x.shape,
            "data": x.flatten().tolist(),
        }
        for name, x in inputs.items()
    ]
    wanted = [{"name": "score", "parameters": {"binary_data": False}}]
    return json.dumps({"inputs": described, "outputs": wanted}).encode()


@pytest.mark.skipif(not PYTHON, reason="Ray is not here; `make test-ray`")
@pytest.mark.timeout(900)
def test_a_killed_replica_loses_nothing(ranker: Served) -> None:
    cases = [make_inputs(1, 20 + i, seed=i) for i in range(4)]
    options = {
        "server": str(server_path()),
        "package": str(ranker.package),
        "ops_library": str(ops_library_path()),
        "path": "/v2/models/ranker/infer",
        "headers": {},
        "bodies": [body_of(case).hex() for case in cases],
        "seconds": 8,
    }
    script = str(REPOSITORY / "tests/server/ray_cluster.py")
    environment = os.environ | {
        "PYTHONPATH": f"{REPOSITORY / 'python'}:{REPOSITORY}",
        # A busy machine: Ray gives up on its own processes sooner, and starts actors at nice 15.
        "RAY_raylet_start_wait_time_s": "200",
        "RAY_worker_niceness": "0",
    }
    ended = subprocess.run(
        [PYTHON, script],
        input=json.dumps(options),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["before"] == said["again"], "a user's requests go to one replica"
    victim, first = said["victim"], set(said["before"].values())
    assert len(first) == 3, "every replica has users"
    assert said["is_server_gone"], "the server dies with its replica"
    assert set(said["statuses"]) == {"200"}, "every request got its answer, by a retry if need be"
    assert said["replicas"][victim] > 0 and len(said["replicas"]) == 4, "one took its place"
    others = [(str(user), replica) for user, replica in said["between"]]
    others = [(user, replica) for user, replica in others if said["before"][user] != victim]
    assert others and all(said["before"][user] == replica for user, replica in others), (
        "users of the other replicas stay where they were"
    )
    now = set(said["after"].values())
    assert len(now) == 3 and len(now - first) == 1 and victim not in now
    moved = [user for user, replica in said["after"].items() if replica != said["before"][user]]
    lost = [user for user, replica in said["before"].items() if replica == victim]
    assert set(lost) <= set(moved)
    taken = [said["after"][user] for user in moved if user not in lost]
    assert set(taken) <= now - first, "the new replica alone takes users from those that lived on"
    for body, text in said["answers"]:
        score = json.loads(bytes.fromhex(text))["outputs"][0]["data"]
        expected = eager(ranker.module, cases[body])["score"].flatten()
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5)
