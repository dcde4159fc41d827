# SPDX-License-Identifier: Apache-2.0
"""A package for a GPU: what its manifest says, and its replay by a process without Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ikbo
from ikbo._archive import read_manifest
from ikbo._load import ops_library_path
from ikbo._manifest import Manifest
from tests.e2e.models import Recipe, split_ranker
from tests.e2e.replay import may_lack_replay, replay, replay_binary, replay_path
from tests.e2e.test_variants import Ranker
from tests.runtime.test_ikbo_replay import edited

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="compiles for the GPU that it finds; there is none"
)
needs_replay = pytest.mark.skipif(
    may_lack_replay(), reason=f"{replay_path()} is not built; IKBO_REPLAY names another"
)


def write(recipe: Recipe, path: Path) -> Path:
    ikbo.package(
        recipe.module,
        path,
        example_inputs=recipe.inputs,
        roles=recipe.roles,
        max_users=recipe.max_users,
        max_candidates=recipe.max_candidates,
        # The fp16 products of the eager module and of compiled code round in another order.
        tolerance=0.01,
    )
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(split_ranker("cuda"), tmp_path_factory.mktemp("gpu") / "cuda.pt2")


def launches(manifest: Manifest, op: str) -> list[str]:
    return [run.kernel for case in manifest.replay for run in case.kernels if run.op == op]


@needs_gpu
def test_manifest_names_device_and_kernels_on_the_gpu(package: Path) -> None:
    manifest = read_manifest(package)
    major, minor = torch.cuda.get_device_capability()
    assert (manifest.device, manifest.compute_capability) == ("cuda", 10 * major + minor)
    called = {"ikbo::linear", "ikbo::linear.prepacked", "ikbo::lce", "ikbo::lce.prepacked"}
    assert called | {"ikbo::target_attention"} <= {op.name for op in manifest.ops}
    linear, lce = launches(manifest, "linear"), launches(manifest, "lce")
    assert len(linear) == 3 * len(manifest.replay)
    assert lce
    assert all(kernel.startswith("linear_") for kernel in linear)
    assert all(kernel.startswith("lce_") for kernel in lce)


@needs_gpu
@needs_replay
def test_replays_in_cpp_on_the_gpu(package: Path) -> None:
    """Another kernel than the manifest's fails the case: the trace is compared."""
    done = replay(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(read_manifest(package).replay)} passed, 0 failed" in done.stdout


@needs_gpu
@needs_replay
def test_fails_when_another_kernel_ran_on_the_gpu(package: Path, tmp_path: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        document["replay"][0]["kernels"][0]["kernel"] = "another"

    done = replay(edited(package, tmp_path / "renamed.pt2", rename))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "must run kernel another as the compilation spec says" in done.stdout
    assert "which the compilation spec does not name" in done.stdout


@needs_gpu
@needs_replay
def test_refuses_another_gpu_and_none_on_the_gpu(package: Path, tmp_path: Path) -> None:
    def other_gpu(document: dict[str, Any]) -> None:
        document["compute_capability"] = 75

    other = edited(package, tmp_path / "other.pt2", other_gpu)
    done = replay(other)
    assert done.returncode == 2, done.stdout
    assert f"{other}: was compiled for compute capability 7.5; this process" in done.stderr
    done = subprocess.run(
        [replay_binary(), package, "--ops-library", ops_library_path()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout
    assert f"{package}: was compiled for device cuda and needs a GPU; this process" in done.stderr


@needs_gpu
@needs_replay
def test_forms_are_measured_as_calls_and_as_graphs_on_the_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker().eval().cuda()
    inputs = {"user_id": torch.arange(24).cuda() * 800, "item": torch.randn(24, 6).cuda()}
    fast = ikbo.transform(model, inputs, ["user_id"], max_users=4, max_candidates=64)
    path = tmp_path / "measured.pt2"
    timings = ikbo.package(fast, path, both_forms="measured").spec["measured"]
    sizes = {(t["users"], t["candidates"]) for t in timings}
    assert {(1, 1), (2, 2), (4, 4)} <= sizes
    for how in ("call", "graph"):
        assert {(t["users"], t["candidates"]) for t in timings if t["how"] == how} == sizes
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_replay_binary_that_is_named_must_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IKBO_REPLAY", str(tmp_path / "absent"))
    assert not may_lack_replay()
    with pytest.raises(AssertionError, match="absent must exist"):
        replay_binary()
    monkeypatch.delenv("IKBO_REPLAY")
    assert may_lack_replay() != replay_path().is_file()


def test_kernels_of_the_same_model_on_the_cpu(tmp_path: Path) -> None:
    package = write(split_ranker("cpu"), tmp_path / "cpu.pt2")
    manifest = read_manifest(package)
    assert (manifest.device, manifest.compute_capability) == ("cpu", None)
    done = replay(package)
    assert done.returncode == 0, done.stdout + done.stderr
