# SPDX-License-Identifier: Apache-2.0
"""KServe's own clients, REST and gRPC, in an environment of their own: `make test-kserve`."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from tests.server.serving import REPOSITORY, Served, eager, running

PYTHON = os.environ.get("IKBO_KSERVE_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="KServe's packages are not here; `make test-kserve`")
def test_kserve_clients(plain: Served) -> None:
    x = np.arange(2000, dtype=np.float32).reshape(500, 4) / 1000
    with running([plain.package]) as server:
        script = str(REPOSITORY / "tests/server/kserve_client.py")
        ended = subprocess.run(
            [PYTHON, script, server.address, server.grpc_address],
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr
    answers = json.loads(ended.stdout.splitlines()[-1])
    assert answers.pop("rest_ready") == answers.pop("grpc_ready") == [True] * 3
    assert set(answers) == {"rest_binary", "rest_json", "grpc_raw", "grpc_typed"}
    expected = eager(plain.module, {"x": x})["score"]
    for kind, score in answers.items():
        np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-5, err_msg=kind)
