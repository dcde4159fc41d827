# SPDX-License-Identifier: Apache-2.0
"""Packages whose forms were measured: what is kept, and that it says and computes the right thing.

A timer that the tests decide stands in for the real one; programs are compiled once for all tests.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ikbo
from ikbo import _inductor_products, _measured
from ikbo._archive import read_manifest
from ikbo._manifest import Manifest
from ikbo.transform import Spec, TransformedModule
from ikbo.transform.break_even import Timing
from tests.e2e.conftest import AskPackage
from tests.e2e.replay import replay, run
from tests.e2e.test_variants import ROWS, Ranker, code_of

MAX_USERS, MAX_CANDIDATES = 4, 64
# U and B to the slowdown of the transformed form, and of the program that chooses.
Slowdown = Callable[[int, int], float]

# The module, whose name in the package `ikbo` is the function's.
packaging = importlib.import_module("ikbo.package")


@pytest.fixture(scope="module")
def ranker() -> tuple[nn.Module, TransformedModule]:
    torch.manual_seed(0)
    model = Ranker().eval()
    inputs = {"user_id": torch.arange(24) * 800, "item": torch.randn(24, 6)}
    limits = {"max_users": MAX_USERS, "max_candidates": MAX_CANDIDATES}
    return model, ikbo.transform(model, inputs, ["user_id"], **limits)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Archives of the same form of the model are compiled once; what was asked for, in order."""
    kept, asked = tmp_path_factory.mktemp("archives"), []
    compile_archive = packaging.compile_archive

    def reused(path: Path, *arguments: Any) -> None:
        form = path.name.split(".")[-2]
        asked.append(form)
        if not (kept / form).exists():
            with mock.patch.object(_inductor_products, "_SMALL", 0):
                compile_archive(path, *arguments)
            shutil.copy(path, kept / form)
        shutil.copy(kept / form, path)

    with mock.patch.object(packaging, "compile_archive", reused):
        yield asked


@pytest.fixture
def asked(compiled_once: list[str]) -> list[str]:
    compiled_once.clear()
    return compiled_once


def decide(
    monkeypatch: pytest.MonkeyPatch, transformed: Slowdown, choosing: Slowdown = lambda u, b: 1.0
) -> None:
    """What timing finds from here on."""

    class Decided:
        def __init__(self, served: object, first: Path, second: Path) -> None:
            assert first.stat().st_size and second.stat().st_size
            assert second.name.endswith(".replicated.pt2")
            self.slowdown = choosing if "both" in first.name else transformed

        def __call__(self, users: int, candidates: int) -> Sequence[Timing]:
            return [Timing("call", users, candidates, self.slowdown(users, candidates), 1.0)]

    monkeypatch.setattr(_measured, "Contest", Decided)


def few_lose(users: int, candidates: int) -> float:
    """Both take as long at 2.95 candidates per user."""
    return (2.95 * users / candidates) ** 0.5


@torch.no_grad()
def assert_right(path: Path, model: nn.Module) -> None:
    """At all sizes around the break-evens, and in C++."""
    for users in range(1, MAX_USERS + 1):
        for candidates in (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, MAX_CANDIDATES):
            index = torch.arange(candidates, dtype=torch.int32) * 3 % users
            user_id, item = torch.randint(ROWS, (users,)), torch.randn(candidates, 6)
            (got,) = run(path, [user_id, item, index])
            torch.testing.assert_close(got, model(user_id[index.long()], item))
    done = replay(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(read_manifest(path).replay)} passed, 0 failed" in done.stdout


def variants(manifest: Manifest) -> list[tuple[str, list[int], list[int]]]:
    return [(v["form"], v["users"], v["candidates"]) for v in manifest.spec["variants"]]


def products(path: Path) -> int:
    """Layers that the code runs: the transformed form takes the first one apart."""
    return code_of(path).count("aoti_torch_cpu__linear_pointwise(")


def test_both_where_each_is_faster_somewhere(
    ranker: tuple[nn.Module, TransformedModule],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    decide(monkeypatch, few_lose)
    steps: list[str] = []
    path = tmp_path / "m.pt2"
    manifest = ikbo.package(ranker[1], path, both_forms="measured", progress=steps.append)
    assert asked == ["transformed", "replicated", "both_forms"]
    assert steps[-3:] == [
        "measured: replicated and transformed",
        "computing the replay cases",
        "running the compiled package on the replay cases",
    ]
    assert manifest.spec["pays_from"]["package"] == [[1, 3], [2, 6], [3, 12]]
    assert variants(manifest) == [
        ("replicated", [1, 1], [1, 2]),
        ("transformed", [1, 1], [3, 64]),
        ("replicated", [2, 2], [1, 5]),
        ("transformed", [2, 2], [6, 64]),
        ("replicated", [3, 4], [1, 11]),
        ("transformed", [3, 4], [12, 64]),
    ]
    assert "// subgraph: false_graph_0" in code_of(path)
    assert_right(path, ranker[0])
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]


def test_the_transformed_form_alone(
    ranker: tuple[nn.Module, TransformedModule],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    decide(monkeypatch, lambda u, b: 1.01)
    path = tmp_path / "m.pt2"
    manifest = ikbo.package(ranker[1], path, both_forms="measured")
    assert asked == ["transformed", "replicated"]
    assert variants(manifest) == [("transformed", [1, MAX_USERS], [1, MAX_CANDIDATES])]
    assert manifest.spec["pays_from"]["package"] == [[1, 1]]
    assert manifest.spec["measured"][0] == {
        "how": "call", "users": 1, "candidates": 1, "slowdown": 1.01, "replicated_ms": 1.0,
    }  # fmt: skip
    assert "subgraph" not in code_of(path)
    assert products(path) == 6
    assert_right(path, ranker[0])


def test_the_unmodified_form_alone(
    ranker: tuple[nn.Module, TransformedModule],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Behind the same inputs and outputs."""
    decide(monkeypatch, lambda u, b: 1.2)
    path = tmp_path / "m.pt2"
    manifest = ikbo.package(ranker[1], path, both_forms="measured")
    assert asked == ["transformed", "replicated"]
    assert variants(manifest) == [("replicated", [1, MAX_USERS], [1, MAX_CANDIDATES])]
    assert [(x.name, x.role) for x in manifest.inputs] == [
        ("user_id", "user"), ("item", "candidate"), ("cand_to_user", "index"),
    ]  # fmt: skip
    assert manifest.inputs[0].values == (0, ROWS - 1)
    assert [(x.name, x.role) for x in manifest.outputs] == [("output", "candidate")]
    assert "subgraph" not in code_of(path)
    assert products(path) == 5
    assert_right(path, ranker[0])


def test_a_choice_that_costs_what_it_gains_is_not_kept(
    ranker: tuple[nn.Module, TransformedModule],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    decide(monkeypatch, lambda u, b: 1.05 if b < 3 else 0.5, lambda u, b: 1.045)
    manifest = ikbo.package(ranker[1], tmp_path / "m.pt2", both_forms="measured")
    assert asked == ["transformed", "replicated", "both_forms"]
    assert [form for form, *_ in variants(manifest)] == ["transformed"]
    assert max(timing["slowdown"] for timing in manifest.spec["measured"]) == 1.05
    assert "subgraph" not in code_of(tmp_path / "m.pt2")


def test_what_is_slow_once_is_timed_again(
    ranker: tuple[nn.Module, TransformedModule],
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: set[tuple[int, int]] = set()

    def slow_once(users: int, candidates: int) -> float:
        is_first = (users, candidates) not in seen
        seen.add((users, candidates))
        return 1.05 if is_first and candidates < 3 else 0.9

    decide(monkeypatch, slow_once)
    manifest = ikbo.package(ranker[1], tmp_path / "m.pt2", both_forms="measured")
    assert asked == ["transformed", "replicated"]
    assert [form for form, *_ in variants(manifest)] == ["transformed"]


def test_a_smaller_range_is_measured_alone(
    ranker: tuple[nn.Module, TransformedModule], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its variants still cover the range of the spec."""
    decide(monkeypatch, lambda u, b: 1.2)
    path = tmp_path / "m.pt2"
    options = {"max_users": 2, "max_candidates": 8, "both_forms": "measured"}
    manifest = ikbo.package(ranker[1], path, **options)
    assert (manifest.max_users, manifest.max_candidates) == (2, 8)
    assert {(t["users"], t["candidates"]) for t in manifest.spec["measured"]} == {
        (1, 1), (1, 4), (1, 8), (2, 2), (2, 8),
    }  # fmt: skip
    assert variants(manifest) == [("replicated", [1, MAX_USERS], [1, MAX_CANDIDATES])]


def test_real_times(
    ranker: tuple[nn.Module, TransformedModule], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_measured, "_SECONDS", 3.0)
    path = tmp_path / "m.pt2"
    manifest = ikbo.package(ranker[1], path, both_forms="measured")
    timings = manifest.spec["measured"]
    assert (timings[0]["users"], timings[0]["candidates"]) == (1, 1)
    for timing in timings:
        assert timing["how"] == "call"
        assert 0.1 < timing["slowdown"] < 10
        assert 0 < timing["replicated_ms"] < 100
    assert_right(path, ranker[0])
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]


def test_a_failure_leaves_nothing(
    ranker: tuple[nn.Module, TransformedModule], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(users: int, candidates: int) -> float:
        raise RuntimeError("no clock")

    decide(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="no clock"):
        ikbo.package(ranker[1], tmp_path / "m.pt2", both_forms="measured")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("slowdown", [few_lose, lambda u, b: 1.2], ids=["both", "alone"])
def test_no_user_stage_with_the_unmodified_form(
    ranker: tuple[nn.Module, TransformedModule],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    slowdown: Slowdown,
) -> None:
    decide(monkeypatch, slowdown)
    options: dict[str, Any] = {"both_forms": "measured", "user_stage": True}
    with pytest.raises(ValueError, match="user_stage and both_forms must not come together"):
        ikbo.package(ranker[1], tmp_path / "m.pt2", **options)
    assert list(tmp_path.iterdir()) == []


def test_user_stage_of_the_transformed_form(
    ranker: tuple[nn.Module, TransformedModule], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is compiled as two programs: what was timed is of no use."""
    decide(monkeypatch, lambda u, b: 0.5)
    written: dict[str, Any] = {}

    def write(target: Path, manifest: Manifest, made_of: Mapping[str, Any], *_: Any) -> Manifest:
        written.update(made_of)
        return manifest

    monkeypatch.setattr(packaging, "_write", write)
    options: dict[str, Any] = {"both_forms": "measured", "user_stage": True}
    assert ikbo.package(ranker[1], tmp_path / "m.pt2", **options).user_stage is not None
    assert set(written) == {"user_stage", "candidate_stage"}


@pytest.mark.parametrize("value", ["estimated", "", None, 1, 0.5])
def test_other_values_are_refused(
    ranker: tuple[nn.Module, TransformedModule], tmp_path: Path, value: Any
) -> None:
    text = f'ikbo.package: both_forms must be False, True or "measured"; got {value!r}'
    with pytest.raises(ValueError, match=text):
        ikbo.package(ranker[1], tmp_path / "m.pt2", both_forms=value)


def test_a_plain_module_has_one_form(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both_forms is for transformed modules; got a plain one"):
        ikbo.package(
            nn.Linear(4, 1).eval(),
            tmp_path / "m.pt2",
            example_inputs=(torch.randn(3, 4),),
            roles={"input": "candidate"},
            max_candidates=8,
            both_forms="measured",
        )


def test_estimates_are_not_called_measured(ranker: tuple[nn.Module, TransformedModule]) -> None:
    spec = ranker[1].spec
    timing = Timing("graph", 1, 2, 0.5, 0.25)
    again = Spec.from_json(replace(spec, measured=(timing,)).to_json())
    assert (spec.measured, again.measured) == ((), (timing,))


class FakeEvent:
    """An event that counts the milliseconds of a GPU that the test plays."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock(replay=lambda: "replay"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda _: contextlib.nullcontext())
    return calls


def test_rounds_on_a_gpu_are_from_event_to_event(fake_gpu: list[str]) -> None:
    def takes(milliseconds: float) -> Callable[[], None]:
        def call() -> None:
            FakeEvent.now += milliseconds

        return call

    flush = mock.Mock(zero_=takes(100.0))
    rounds = _measured._rounds_on_gpu([takes(3.0), takes(2.0)], flush, 5)
    assert rounds == [(3.0, 2.0)] * 5
    assert fake_gpu == ["synchronize"]


def test_a_call_that_cannot_be_recorded_leaves_no_graph(fake_gpu: list[str]) -> None:
    def waits() -> None:
        if len(fake_gpu) == 2:  # behind the run before the second one's recording
            raise RuntimeError("not permitted when stream is capturing")

    replays = _measured._recorded([lambda: None, lambda: None])
    assert [replay() for replay in replays] == ["replay", "replay"]
    fake_gpu.clear()
    assert _measured._recorded([lambda: None, waits]) == []


def test_the_command_line(ask_package: AskPackage) -> None:
    """A bare flag does not take the model, which may come behind it, for its value."""
    for flags, wanted in (
        ([], False),
        (["--both-forms"], True),
        (["--both-forms=estimated"], True),
        (["--both-forms=measured"], "measured"),
    ):
        assert ask_package(flags, [])["both_forms"] == wanted
