# SPDX-License-Identifier: Apache-2.0
"""The tools of the benchmarks: cost formulas, timer, result files."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ikbo import reference
from ikbo.testing import bench
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
