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
# Attention over a history, field compressions, norms folded into layers, rows that meet.
MODELS = ("attention", "lce", "norms", "coupled")


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    wanted = [{"model": name, "own_linear": False} for name in MODELS]
    wanted.append({"model": "norms", "own_linear": True})
    done = subprocess.run(
        [sys.executable, "-m", "tests.transform.other_device"],
        input="\n".join(map(json.dumps, wanted)),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("place", range(len(MODELS)), ids=MODELS)
def test_results_are_those_of_the_unmodified_model(place: int, runs: list[dict[str, Any]]) -> None:
    assert runs[place]["error"] is None
    assert runs[place]["calls"], "nothing ran on the device"


def test_no_history_is_replicated(runs: list[dict[str, Any]]) -> None:
    """Neither the history nor what the encoder makes of it is there once per candidate."""
    sizes = [math.prod(sizes) for _, sizes in runs[0]["calls"]]
    assert max(sizes) < CANDIDATES * S * D
    # The device does a norm over rows as one over their statistics: [1, rows, features].
    norms = [size for name, size in runs[0]["calls"] if "batch_norm" in name and len(size) == 3]
    assert norms == [[1, USERS * S, D]] * 2


def test_a_kernel_of_the_device_is_used(runs: list[dict[str, Any]]) -> None:
    own, composite = runs[-1], runs[MODELS.index("norms")]
    assert own["error"] is None
    assert (own["own_linear"], composite["own_linear"]) == (2, 0)
    products = [name for name, _ in own["calls"] if "mm" in name]
    assert products == []
    assert [name for name, _ in composite["calls"] if "mm" in name]
