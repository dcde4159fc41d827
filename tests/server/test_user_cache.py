# SPDX-License-Identifier: Apache-2.0
"""What the server keeps of users between requests: when it is found, and that no answer changes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http

from ikbo.transform import TransformedModule
from tests.server.serving import Arrays, Server, make_mixed_inputs, place, running
from tests.server.test_batching import asking, http_and_grpc
from tests.server.test_server import metrics

USERS = ("user_id", "history", "history_length")
OUTPUTS = ("click", "like")
CACHE = ("--user-cache-bytes", "10000000")


def request_of(user: int, num_candidates: int, seed: int = 0) -> Arrays:
    """A request of one user: who it is follows from `user` alone."""
    rng = np.random.default_rng(user)
    inputs = {
        "user_id": rng.integers(0, 50, 1),
        "history": rng.integers(0, 200, (1, 12)),
        "history_length": rng.integers(1, 13, 1),
    }
    rng = np.random.default_rng([user, seed])
    return inputs | {
        "item_id": rng.integers(0, 200, num_candidates),
        "price": rng.random((num_candidates, 4), dtype=np.float32),
        "cand_to_user": np.zeros(num_candidates, np.int32),
    }


def ask(server: Server, inputs: Arrays, **parameters: Any) -> Arrays:
    client = asking(tritonclient.http, server.address, network_timeout=60.0)
    result = client(inputs, model="model", **parameters)
    return {name: result.as_numpy(name) for name in OUTPUTS}


def counts(server: Server, version: str = "7") -> dict[str, float]:
    """`hits_total` and the like to what /metrics says."""
    labels = f'{{model="model",version="{version}"}}'
    names = ("hits_total", "misses_total", "evictions_total", "expirations_total")
    page = metrics(server)
    found = {name: page.get(f"ikbo_user_cache_{name}{labels}") for name in names}
    found |= {name: page.get(f"ikbo_user_cache_{name}{labels}") for name in ("bytes", "entries")}
    return {
        name.removesuffix("_total"): value for name, value in found.items() if value is not None
    }


def assert_equal(got: Arrays, want: Arrays) -> None:
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], want[name])


def assert_answer(got: Arrays, transformed: TransformedModule, inputs: Arrays) -> None:
    with torch.no_grad():
        expected = transformed(**{name: torch.from_numpy(x) for name, x in inputs.items()})
    for name in OUTPUTS:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_users_next_request_finds_the_state(
    staged_package: Path, transformed: TransformedModule
) -> None:
    """Answers are bit for bit those of the same package without a cache."""
    with running([staged_package]) as plain, running([staged_package], *CACHE) as server:
        assert counts(plain) == {}
        assert counts(server)["misses"] == 0, "runs before the first request are nobody's"
        asked = 0
        for turn in range(3):
            for user in range(4):
                inputs = request_of(user, 50 + user, seed=turn)
                got = ask(server, inputs)
                assert_equal(got, ask(plain, inputs))
                assert_answer(got, transformed, inputs)
                asked += 1
        found = counts(server)
        assert (found["hits"], found["misses"], found["entries"]) == (asked - 4, 4, 4)
        assert 0 < found["bytes"] < 10_000_000
        for name in USERS:  # somebody else, but for one input
            changed = request_of(0, 20)
            changed[name] = changed[name].copy()
            changed[name].flat[0] += 1 if changed[name].flat[0] < 5 else -1
            assert_equal(ask(server, changed), ask(plain, changed))
        assert counts(server)["misses"] == 4 + len(USERS)
        with tritonclient.http.InferenceServerClient(server.address) as client:
            (stats,) = client.get_inference_statistics("model")["model_stats"]
        found = counts(server)
        shown = stats["user_cache"]
        assert (shown["hit_count"], shown["miss_count"]) == (found["hits"], found["misses"])
        assert shown["hit_rate"] == pytest.approx(found["hits"] / (asked + len(USERS)))
        assert (shown["entry_count"], shown["bytes"]) == (found["entries"], found["bytes"])


def test_user_keys_tell_users_apart(staged_package: Path) -> None:
    with running([staged_package], *CACHE) as server:
        inputs = request_of(1, 9)
        for key in ("ann", "bob"):
            for _ in range(2):
                ask(server, inputs, parameters={"user_key": key})
        assert counts(server)["misses"] == counts(server)["hits"] == 2


def test_requests_that_meet_in_runs_get_their_own_answers(
    staged_package: Path, transformed: TransformedModule
) -> None:
    """By both protocols, with keys and without, of one user and of several, split and whole."""

    def ask_often(number: int) -> None:
        client = http_and_grpc(server)[number % 2]
        for i in range(15):
            if i % 5 == 4:
                inputs, parameters = make_mixed_inputs(), {}
            else:
                inputs = request_of((number + i) % 4, 40 + 17 * i, seed=number)
                parameters = {"user_key": f"user {(number + i) % 4}"} if number % 3 else {}
            result = client(inputs, model="model", parameters=parameters)
            got = {name: result.as_numpy(name) for name in OUTPUTS}
            assert_answer(got, transformed, inputs)

    flags = (*CACHE, "--workers", "2", "--max-batch-candidates", "200")
    with running([staged_package], *flags) as server, ThreadPoolExecutor(6) as pool:
        list(pool.map(ask_often, range(6)))
        found = counts(server)
    assert found["hits"] > found["misses"] > 0


def test_memory_is_bounded(staged_package: Path, transformed: TransformedModule) -> None:
    limit = 20_000  # some states of about 3.6 kB
    with running([staged_package], "--user-cache-bytes", str(limit)) as server:
        for user in [*range(25), *range(20, 25)]:
            inputs = request_of(user, 5)
            assert_answer(ask(server, inputs), transformed, inputs)
            assert counts(server)["bytes"] <= limit
        found = counts(server)
    assert found["misses"] - found["evictions"] == found["entries"]
    assert 2 <= found["entries"] <= 6
    assert found["hits"] >= 2, "those who asked last"
    with running([staged_package], "--user-cache-bytes", "100") as server:
        for _ in range(2):
            assert_answer(ask(server, request_of(1, 5)), transformed, request_of(1, 5))
        assert (counts(server)["hits"], counts(server)["entries"]) == (0, 0)


def test_a_state_has_its_time(staged_package: Path) -> None:
    with running([staged_package], *CACHE, "--user-cache-ttl-ms", "400") as server:
        ask(server, request_of(1, 5))
        time.sleep(0.5)
        ask(server, request_of(1, 5))
        found = counts(server)
    assert (found["hits"], found["misses"], found["expirations"]) == (0, 2, 1)


def test_a_model_that_is_loaded_again_begins_anew(
    staged_package: Path, transformed: TransformedModule, tmp_path: Path
) -> None:
    package = place(staged_package, tmp_path / "model.pt2", version="7")
    flags = (*CACHE, "--model-repository", str(tmp_path), "--allow-repository-changes")
    with (
        running([], *flags) as server,
        tritonclient.http.InferenceServerClient(server.address) as client,
    ):
        for _ in range(2):
            ask(server, request_of(1, 5))
        before = counts(server)
        assert (before["hits"], before["misses"]) == (1, 1)
        place(staged_package, package, version="7")
        client.load_model("model")
        assert_answer(ask(server, request_of(1, 5)), transformed, request_of(1, 5))
        wait_for_bytes(server, before["bytes"], "7")
        after = counts(server)
        assert (after["hits"], after["misses"], after["entries"]) == (1, 2, 1)
        place(staged_package, tmp_path / "next.pt2", version="8")
        client.load_model("model")
        ask(server, request_of(1, 5))
        assert counts(server, "8")["misses"] == 1, "another version has states of its own"
        client.unload_model("model")
        assert counts(server) == counts(server, "8") == {}
        client.load_model("model")
        ask(server, request_of(1, 5))
        assert counts(server, "8")["hits"] == 0
        wait_for_bytes(server, before["bytes"], "8")


def wait_for_bytes(server: Server, expected: float, version: str) -> None:
    """A model ends, and its states, some time after it is out of the list."""
    end = time.monotonic() + 20
    while counts(server, version)["bytes"] != expected:
        assert time.monotonic() < end, counts(server, version)
        time.sleep(0.05)


def test_packages_without_a_user_stage_are_served_as_ever(
    transformed_package: Path, transformed: TransformedModule
) -> None:
    with running([transformed_package], *CACHE) as server:
        for _ in range(2):
            assert_answer(ask(server, request_of(1, 5)), transformed, request_of(1, 5))
        assert counts(server) == {}
        assert any("user_stage=no" in line for line in server.log)
