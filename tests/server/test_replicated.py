# SPDX-License-Identifier: Apache-2.0
"""`--replicated`: a package compiled without users, asked as one with users is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from torch import Tensor, nn

import ikbo
from ikbo._load import ops_library_path
from tests.server.serving import WIRE_NAMES, Served, Server, eager, running, server_path

MAX_CANDIDATES = 64


class Unmodified(nn.Module):
    """Written for one batch: user rows are repeated for each candidate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.taste = nn.Embedding(5, 8)
        self.user = nn.Linear(4, 8)
        self.cand = nn.Linear(6, 8)

    def forward(self, taste: Tensor, x_user: Tensor, x_cand: Tensor) -> dict[str, Tensor]:
        user = torch.tanh(self.user(x_user)) + self.taste(taste)
        return {"score": (user * self.cand(x_cand)).sum(1)}


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory: pytest.TempPathFactory) -> Served:
    module = Unmodified().eval()
    path = tmp_path_factory.mktemp("unmodified") / "unmodified.pt2"
    example = {
        "taste": torch.arange(8) % 5,
        "x_user": torch.randn(8, 4),
        "x_cand": torch.randn(8, 6),
    }
    ikbo.package(
        module,
        path,
        example_inputs=example,
        roles=dict.fromkeys(example, "candidate"),
        max_candidates=MAX_CANDIDATES,
        name="unmodified",
    )
    return Served(module, path)


@pytest.fixture(scope="module")
def replicated(unmodified: Served) -> Iterator[Server]:
    with running([unmodified.package], "--replicated", "taste,x_user") as server:
        yield server


@pytest.mark.parametrize("triton", [triton_http, triton_grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("num_users, num_candidates", [(1, 20), (3, 64), (5, 2), (2, 0)])
def test_answers_as_for_repeated_rows(
    unmodified: Served, replicated: Server, triton, num_users: int, num_candidates: int
) -> None:
    rng = np.random.default_rng(num_candidates)
    index = rng.integers(0, num_users, num_candidates).astype(np.int32)
    inputs = {
        "taste": rng.integers(0, 5, num_users),
        "x_user": rng.standard_normal((num_users, 4), dtype=np.float32),
        "x_cand": rng.standard_normal((num_candidates, 6), dtype=np.float32),
        "cand_to_user": index,
    }
    if num_users == 1:
        del inputs["cand_to_user"]
    described = []
    for name, x in inputs.items():
        described.append(triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name]))
        described[-1].set_data_from_numpy(x)
    address = replicated.address if triton is triton_http else replicated.grpc_address
    with triton.InferenceServerClient(address) as client:
        got = client.infer("unmodified", described).as_numpy("score")
    repeated = {name: inputs[name][index] for name in ("taste", "x_user")}
    want = eager(unmodified.module, repeated | {"x_cand": inputs["x_cand"]})["score"]
    assert got.shape == (num_candidates,)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_clients_see_user_inputs(replicated: Server) -> None:
    with triton_http.InferenceServerClient(replicated.address) as client:
        described = client.get_model_metadata("unmodified")["inputs"]
    assert [(x["name"], x["parameters"]["role"]) for x in described] == [
        ("taste", "user"),
        ("x_user", "user"),
        ("x_cand", "candidate"),
        ("cand_to_user", "index"),
    ]


@pytest.mark.parametrize(
    "fixture, names, text",
    [
        ("unmodified", "x_usr", "must be one of the package's; it has no input x_usr"),
        ("ranker", "x_cand", "must all have a row for each candidate"),
    ],
)
def test_an_impossible_replication_ends_the_process(
    request: pytest.FixtureRequest, fixture: str, names: str, text: str
) -> None:
    package: Path = request.getfixturevalue(fixture).package
    command = [str(server_path()), f"--model={package}", f"--replicated={names}", "--port=0"]
    command += ["--no-grpc", f"--ops-library={ops_library_path()}"]
    for flags in ([], ["--check-config"]):
        done = subprocess.run(
            [*command, *flags], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert f"{package}: " in done.stderr and text in done.stderr
