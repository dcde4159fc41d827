# SPDX-License-Identifier: Apache-2.0
"""Packages for the server's tests, and one server to share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import ikbo
from tests.server.serving import (
    MAX_CANDIDATES,
    MAX_USERS,
    Plain,
    Ranker,
    Served,
    Server,
    make_inputs,
    running,
)

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Served:
    module = Ranker().eval()
    path = tmp_path_factory.mktemp("ranker") / "ranker.pt2"
    example = {name: torch.from_numpy(x) for name, x in make_inputs(4, 64, 0).items()}
    roles = dict.fromkeys(example, "candidate") | {"x_user": "user", "cand_to_user": "index"}
    ikbo.package(
        module,
        path,
        example_inputs=example,
        roles=roles,
        max_users=MAX_USERS,
        max_candidates=MAX_CANDIDATES,
        name="ranker",
        version="3",
    )
    return Served(module, path)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Served:
    module = Plain().eval()
    path = tmp_path_factory.mktemp("plain") / "plain.pt2"
    ikbo.package(
        module,
        path,
        example_inputs={"x": torch.randn(8, 4)},
        roles={"x": "candidate"},
        max_candidates=MAX_CANDIDATES,
        name="plain",
    )
    return Served(module, path)


@pytest.fixture
def start_server(ranker: Served) -> Iterator[StartServer]:
    """Starts servers of the ranker with flags of the test's choice, and ends them with the test."""
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(running([ranker.package], *flags))


@pytest.fixture(scope="session")
def server(ranker: Served, plain: Served) -> Iterator[Server]:
    """One server of both models for the tests that only send requests."""
    flags = ("--max-body-bytes", "4194304", "--read-timeout-ms", "1000", "--workers", "2")
    flags += ("--max-request-runs", "1")
    with running([ranker.package, plain.package], *flags) as shared:
        yield shared
        shared.send(signal.SIGTERM)
        assert shared.wait() == 0, "".join(shared.log)
