# SPDX-License-Identifier: Apache-2.0
"""Transformed models on a device that ikbo knows nothing of: right, and nothing is replicated."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.transform.models import D, S
from tests.transform.other_device import CANDIDATES, USERS

REPO = Path(__file__).resolve().parents[2]
# Attention over a history, norms folded into layers.
MODELS = ("attention", "norms")


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.transform.other_device"],
        input="\n".join(MODELS),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*MODELS, "own_linear"])
def test_results_are_those_of_the_unmodified_model(
    name: str, runs: dict[str, dict[str, Any]]
) -> None:
    assert runs[name]["error"] is None
    assert runs[name]["calls"] or name == "own_linear", "nothing ran on the device"


def test_no_history_is_replicated(runs: dict[str, dict[str, Any]]) -> None:
    """Neither the history nor what the encoder makes of it is there once per candidate."""
    calls = runs["attention"]["calls"]
    assert max(math.prod(sizes) for _, sizes in calls) < CANDIDATES * S * D
    # The device does a norm over rows as one over their statistics: [1, rows, features].
    norms = [size for name, size in calls if "batch_norm" in name and len(size) == 3]
    assert norms == [[1, USERS * S, D]] * 2


def test_a_kernel_of_the_device_is_used(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["own_linear"]["runs"] == 2
    assert [name for name, _ in runs["norms"]["calls"] if "mm" in name]
    assert not [name for name, _ in runs["own_linear"]["calls"] if "mm" in name]
