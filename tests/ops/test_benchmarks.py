# SPDX-License-Identifier: Apache-2.0
"""The tools of the benchmarks: cost formulas, timer, result files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ikbo import reference
from ikbo.testing import bench, bench_cuda, lce_peers
from ikbo.testing.cost import cost_of
from ikbo.testing.inputs import case, make_inputs

# As many candidates as users: the reference, which replicates, then does what ours does.
SIZES = {
    "expand": {"K_user": 5},
    "linear": {"K_user": 5, "K_cand": 7, "M": 3},
    "lce": {"K_user": 5, "K_cand": 7, "M": 3, "N": 4},
    "bmm": {"P": 5, "R": 7, "N": 3},
    "target_attention": {"Q": 2, "H": 3, "H_kv": 3, "S": 11, "D": 4},
}
ROW = {"case": {"op": "expand"}, "unit": "ms", "ours": 1.23456, "peers": {"a": 2.0, "b": "no GPU"}}


@pytest.mark.parametrize("op", SIZES)
def test_flops_are_those_of_the_reference(op: str) -> None:
    sizes = {"U": 6, "B": 6, **SIZES[op]}
    inputs = make_inputs(case(op, "fp32", "one_each", "contiguous", sizes))
    with FlopCounterMode(display=False) as counter:
        getattr(reference, op)(**inputs)
    assert cost_of(op, sizes, torch.float32).flops == counter.get_total_flops()


def test_bytes() -> None:
    sizes = {"U": 2, "B": 6, "Q": 1, "S": 10, "H": 4, "H_kv": 2, "D": 8}
    cost = cost_of("target_attention", sizes, torch.bfloat16)
    q_and_out, keys = 2 * 6 * 4 * 8, 2 * 10 * 2 * 8
    assert cost.unique_bytes == 2 * (q_and_out + 2 * keys)
    assert cost.requested_bytes == 2 * (q_and_out + 6 * keys)


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    times = bench.interleaved({n: lambda n=n: calls.append(n) for n in "ab"}, rounds=3)
    assert calls == list("ab") * 4
    assert set(times) == {"a", "b"}
    calls.clear()
    bench.interleaved({"a": lambda: calls.append("a")}, rounds=9, min_rounds=2, seconds=0.0)
    assert len(calls) == 1 + 2


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "op.cpp").write_text("int a;")
    return tmp_path


def test_results_are_stale_once_their_sources_change(repository: Path) -> None:
    results = repository / "results"
    sources = ["src/*.cpp", repository / "src" / "op.cpp"]
    path = bench.write_results("ops", [ROW], sources=sources, results=results)
    content = json.loads(path.read_text())
    assert path.name == "ops-cpu.json"
    assert content["rows"] == [{**ROW, "ours": 1.235}]
    assert content["environment"]["sources"] == ["src/*.cpp", "src/op.cpp"]
    assert bench.stale_results(results) == []
    source = repository / "src" / "op.cpp"
    source.write_text("int b;")
    assert bench.stale_results(results)[0].startswith("ops-cpu.json: stale, its sources changed")
    source.write_text("int a;")
    assert bench.stale_results(results) == []
    (repository / "src" / "new.cpp").write_text("")
    assert len(bench.stale_results(results)) == 1
    (repository / "src" / "new.cpp").unlink()
    source.unlink()
    assert "must match a file" in bench.stale_results(results)[0]


def test_bad_results_are_refused(repository: Path) -> None:
    with pytest.raises(ValueError, match=r"a row must have \['peers'\]"):
        bench.write_results("x", [{"case": {}, "unit": "ms", "ours": 1.0}], sources=["src/*"])
    with pytest.raises(ValueError, match="device must be cpu or h200; got 'tpu'"):
        bench.write_results("x", [ROW], sources=["src/*"], device="tpu")
    with pytest.raises(FileNotFoundError, match=r"source 'src/\*\.rs' must match a file"):
        bench.write_results("x", [ROW], sources=["src/*.rs"])


@pytest.fixture
def result_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bench_cuda.ResultFile]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def make(*, keep: bool = False) -> bench_cuda.ResultFile:
        return bench_cuda.ResultFile("lce", ["src/*.cpp"], repository / "results", keep=keep)

    return make


def cases_in(path: Path) -> list[int]:
    return [row["case"]["B"] for row in json.loads(path.read_text())["rows"]]


def row_of(b: int, ours: float = 1.0) -> dict[str, Any]:
    return {"case": {"B": b}, "unit": "ms", "ours": ours, "peers": {}}


def test_a_result_file_has_every_row_so_far(
    result_file: Callable[..., bench_cuda.ResultFile],
) -> None:
    results = result_file()
    order = [{"B": b} for b in (1, 2, 3)]
    for b, so_far in ((3, [3]), (1, [1, 3])):
        results.add(row_of(b), order)
        assert cases_in(results.path) == so_far
    kept = result_file(keep=True)
    kept.add(row_of(3, ours=2.0), order)
    assert cases_in(kept.path) == [1, 3]
    assert json.loads(kept.path.read_text())["rows"][1]["ours"] == 2.0
    kept.add(row_of(2), order[1:])  # case 1 is no case any more
    assert cases_in(kept.path) == [2, 3]
    assert [path.name for path in kept.folder.iterdir()] == ["lce-h200.json"]


def test_rows_of_other_sources_are_not_kept(
    repository: Path, result_file: Callable[..., bench_cuda.ResultFile]
) -> None:
    result_file().add(row_of(1))
    (repository / "src" / "op.cpp").write_text("int b;")
    with pytest.raises(SystemExit, match=r"bench_lce: .*lce-h200.json is stale"):
        result_file(keep=True)


def test_a_contestant_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 10**9, 4 * 10**9))

    def fails() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    contestants = bench_cuda.without_oversized(
        {
            "right": lambda: torch.ones(3),
            "wrong": lambda: torch.zeros(3),
            "less": lambda: torch.zeros(3),
            "fails": fails,
            "absent": "not installed",
            "large": lambda: torch.ones(3),
        },
        {"large": 4 * 10**9, "right": 10**9},
    )
    verdicts = bench_cuda.checked(contestants, torch.ones(3), unchecked=["less"])
    assert callable(verdicts.pop("right"))
    assert callable(verdicts.pop("less"))
    assert verdicts == {
        "wrong": "wrong result: relative error 1",
        "fails": "OutOfMemoryError: CUDA out of memory.",
        "absent": "not installed",
        "large": "needs 4 GB; 2.73 GB are free",
    }


def test_padding_adds_zeros_up_to_a_multiple_of_8() -> None:
    tensor = torch.ones(2, 9)
    assert bench_cuda.padded(tensor, 1).sum(1).tolist() == [9.0, 9.0]
    assert bench_cuda.padded(tensor, 1).shape == (2, 16)
    assert bench_cuda.padded(tensor, 0).shape == (8, 9)
    aligned = torch.ones(8, 2)
    assert bench_cuda.padded(aligned, 0) is aligned


def test_one_compilation_serves_cases_of_one_shape() -> None:
    tasks = {
        lce_peers.warm_task(name, lce_peers.LceCase(b, ratio))
        for name in lce_peers.PUBLIC
        for b, ratio in ((1024, 70), (512, 70), (1024, 1), (1024, 2), (64, 64))
    }
    assert sorted((task.name, task.case.num_users) for task in tasks) == [
        ("tlx", 1),
        ("tlx", 3),
        ("tlx", 16),
        ("triton", 1),
    ]
