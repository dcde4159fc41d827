# SPDX-License-Identifier: Apache-2.0
"""Packages that `bench.bench_serve` serves, and requests to them as files of `ikbo-load`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import ikbo
from examples.movielens.artefacts import (
    FOLDER,
    PACKAGING_SOURCES,
    TRAINING_SOURCES,
    made_once,
    packages,
    trained,
)
from examples.movielens.contestants import example_inputs, show_progress
from examples.movielens.data import USER_INPUTS, MovieLens, fetch_tables
from examples.movielens.model import Ranker
from examples.movielens.serving import HEADER_LENGTH, MODEL, WIRE_NAMES, encode
from examples.movielens.split import replicate
from examples.movielens.train import make_batch
from examples.nets import NETS, contestants, llm_scale
from examples.nets import net as nets
from examples.nets.net import make_inputs
from ikbo._load import ops_library_path

NUM_CANDIDATES = 500
NUM_REQUESTS = 16
RATIO = 70
MAX_MERGED = 32  # requests of RATIO candidates in one run
USER_WIDTH, CAND_WIDTH, HIDDEN = 384, 32, 256
HISTORY = "llm_scale"  # a net of which users are a large part
HISTORY_USERS = 64  # who ask twice
HISTORY_MERGED = 8  # of them in a run

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Workload:
    """A package and its requests, by protocol."""

    package: Path
    requests: Mapping[str, Path]


class LightRanker(nn.Module):
    """About a millisecond for 500 candidates: what the server adds is not lost in the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mixed = ikbo.nn.Linear(USER_WIDTH, CAND_WIDTH, HIDDEN, activation="relu")
        self.deep = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> dict[str, Tensor]:
        return {"score": self.deep(self.mixed(x_user, x_cand, cand_to_user))[:, 0]}


def light_inputs(num_users: int, num_candidates: int, seed: int) -> dict[str, Tensor]:
    """64 KiB of floats for one user with 500 candidates."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x_user": torch.randn(num_users, USER_WIDTH, generator=generator),
        "x_cand": torch.randn(num_candidates, CAND_WIDTH, generator=generator),
        "cand_to_user": torch.arange(num_candidates, dtype=torch.int32) % num_users,
    }


def package_light(net: LightRanker, path: Path) -> None:
    inputs = light_inputs(4, 64, 0)
    roles = {"x_user": "user", "x_cand": "candidate", "cand_to_user": "index"}
    ikbo.package(
        net,
        path,
        example_inputs=inputs,
        roles=roles,
        max_users=8,
        max_candidates=8 * NUM_CANDIDATES,
        name=MODEL,
        progress=show_progress,
    )


def package_wide(net: Ranker, data: MovieLens, path: Path) -> None:
    """The demo's net, transformed for many users with few candidates each."""
    transformed = ikbo.transform(
        net,
        replicate(example_inputs(data)),
        request_only=USER_INPUTS,
        max_users=MAX_MERGED,
        max_candidates=MAX_MERGED * RATIO,
    )
    ikbo.package(transformed, path, name=MODEL, progress=show_progress)


def history_net() -> nets.Ranker:
    return contestants.plain_net(HISTORY, NETS[HISTORY].small, torch.float32, "cpu")


def package_history(path: Path) -> None:
    """A causal encoder in two stages: the user state is its layers' keys and values."""
    limits = HISTORY_MERGED, HISTORY_MERGED * RATIO
    transformed = contestants.transformed(
        history_net(), NETS[HISTORY].small, limits, torch.float32, "cpu"
    )
    ikbo.package(transformed, path, name=MODEL, user_stage=True, progress=show_progress)


@torch.no_grad()
def history_cases() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """All users once, then all of them again, each time with other candidates."""
    net, config = history_net(), NETS[HISTORY].small
    cases = []
    for ask in range(2):
        for number in range(HISTORY_USERS):
            user, _ = make_inputs(config, 1, 1, seed=number)
            _, item = make_inputs(config, 1, RATIO, seed=1000 * ask + number)
            repeated = {name: x.expand(RATIO, *x.shape[1:]) for name, x in user.items()}
            inputs = {f"user.{name}": x for name, x in user.items()}
            inputs |= {f"item.{name}": x for name, x in item.items()}
            cases.append((inputs, {"output": net(repeated, item)}))
    return cases


def grpc_body(inputs: Arrays) -> bytes:
    from tritonclient.grpc import service_pb2  # which the GPU machine lacks

    message = service_pb2.ModelInferRequest(model_name=MODEL)
    for name, x in inputs.items():
        message.inputs.add(name=name, datatype=WIRE_NAMES[x.dtype.name], shape=x.shape)
        message.raw_input_contents.append(np.ascontiguousarray(x).tobytes())
    return bytes(message.SerializeToString())


def write_requests(
    name: str,
    cases: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]],
    folder: Path,
    protocols: Sequence[str] = ("http", "grpc"),
) -> dict[str, Path]:
    """Files of `ikbo-load` for pairs of inputs and outputs, by protocol, HTTP among them."""
    described: dict[str, list[dict[str, str | int]]] = {key: [] for key in protocols}
    for number, (inputs, outputs) in enumerate(cases):
        arrays = {key: x.numpy() for key, x in inputs.items()}
        body, headers = encode(arrays)
        names = {key: f"{name}-{number}.{key}" for key in (*protocols, "expected")}
        (folder / names["http"]).write_bytes(body)
        if "grpc" in protocols:
            (folder / names["grpc"]).write_bytes(grpc_body(arrays))
        (folder / names["expected"]).write_bytes(
            b"".join(x.numpy().tobytes() for x in outputs.values())
        )
        for protocol, requests in described.items():
            requests.append({"body": names[protocol], "expected": names["expected"]})
        described["http"][-1]["json_size"] = int(headers[HEADER_LENGTH])
    paths = {protocol: folder / f"{name}.{protocol}.json" for protocol in described}
    for protocol, path in paths.items():
        path.write_text(json.dumps({"requests": described[protocol]}))
    return paths


@torch.no_grad()
def demo_cases(
    net: Ranker, data: MovieLens, num_candidates: int
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Held-out requests of different users. The index is left out: a request has one user."""
    rng = np.random.default_rng(7)
    requests = data.requests(held_out=True)
    users = rng.permutation(sorted({request.user for request in requests}))
    cases = []
    for user in users[:NUM_REQUESTS]:
        request = [request for request in requests if request.user == user][-1]
        drawn = num_candidates - len(request.targets)
        inputs = make_batch(data, [request], drawn, rng, history=True).inputs
        outputs = net(**replicate(inputs))
        del inputs["cand_to_user"]
        cases.append((inputs, outputs))
    return cases


@torch.no_grad()
def light_cases(net: LightRanker) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    cases = []
    for seed in range(NUM_REQUESTS):
        inputs = light_inputs(1, NUM_CANDIDATES, seed)
        outputs = net(**inputs)
        del inputs["cand_to_user"]
        cases.append((inputs, outputs))
    return cases


def make_workloads() -> dict[str, Workload]:
    """`light`, `ikbo` and `replicated` of 500 candidates, the others of RATIO; made once."""
    folder = FOLDER.parent / "bench-serve"
    for made in (folder, FOLDER):
        made.mkdir(parents=True, exist_ok=True)
    data = MovieLens(fetch_tables(FOLDER))
    net, _ = trained(data)
    light = LightRanker().eval()
    paths = packages(net, data) | {
        name: folder / f"{name}.pt2" for name in ("wide", "light", "history")
    }
    sources = [Path(__file__), FOLDER / "ranker.pt", ops_library_path()]
    sources += [*TRAINING_SOURCES, *PACKAGING_SOURCES]
    made_once(paths["wide"], sources, partial(package_wide, net, data, paths["wide"]))
    net_sources = [Path(contestants.__file__), Path(nets.__file__), Path(llm_scale.__file__)]
    made_once(
        paths["history"], [*sources, *net_sources], partial(package_history, paths["history"])
    )
    made_once(paths["light"], sources, partial(package_light, light, paths["light"]))
    demo = write_requests("demo", demo_cases(net, data, NUM_CANDIDATES), folder)
    requests = {
        "light": write_requests("light", light_cases(light), folder),
        "wide": write_requests("wide", demo_cases(net, data, RATIO), folder),
        "history": write_requests("history", history_cases(), folder),
        "ikbo": demo,
        "replicated": demo,
    }
    return {name: Workload(paths[name], requests[name]) for name in requests}
