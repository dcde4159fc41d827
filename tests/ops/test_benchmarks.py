# SPDX-License-Identifier: Apache-2.0
"""The tools of the benchmarks: cost formulas, timer, result files."""

import itertools
import json
import re
import runpy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.in_turn import MOST_TURNS, in_turn
from ikbo import reference
from ikbo.testing import bench, bench_cuda, bench_results, bench_sources, lce_peers
from ikbo.testing.cost import cost_of
from ikbo.testing.inputs import case, make_inputs

# As many candidates as users: the reference, which replicates, then does what ours does.
SIZES = {
    "expand": {"K_user": 5},
    "linear": {"K_user": 5, "K_cand": 7, "M": 3},
    "lce": {"K_user": 5, "K_cand": 7, "M": 3, "N": 4},
    "bmm": {"P": 5, "R": 7, "N": 3},
    "target_attention": {"Q": 2, "H": 3, "H_kv": 3, "S": 11, "D": 4},
    "self_target_attention": {"Q": 2, "H": 3, "H_kv": 3, "S": 11, "D": 4},
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
    cost = cost_of("self_target_attention", sizes, torch.bfloat16)
    of_history = keys + 2 * 10 * 4 * 8
    assert cost.unique_bytes == 2 * (q_and_out + 2 * of_history)
    assert cost.requested_bytes == 2 * (q_and_out + 6 * of_history)


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    times = bench.interleaved({n: lambda n=n: calls.append(n) for n in "ab"}, rounds=3)
    assert [sorted(calls[i : i + 2]) for i in range(0, 8, 2)] == [["a", "b"]] * 4
    assert set(times) == {"a", "b"}
    calls.clear()
    bench.interleaved({"a": lambda: calls.append("a")}, rounds=9, min_rounds=2, seconds=0.0)
    assert len(calls) == 1 + 2


def test_no_contestant_is_always_behind_the_same_one() -> None:
    calls: list[str] = []
    bench.interleaved({n: lambda n=n: calls.append(n) for n in "abc"}, rounds=30)
    behind = set(itertools.pairwise(calls[3:]))
    assert behind >= set(itertools.permutations("abc", 2))


def test_a_timed_call_is_right_behind_an_untimed_one_of_the_same_copy() -> None:
    calls: list[str] = []
    copies = [lambda n=n: calls.append(n) for n in ("a0", "a1")]

    def slow() -> None:
        calls.append("b")
        time.sleep(0.02)

    rounds = 3
    times = in_turn({"a": copies, "b": slow}, rounds=rounds)
    assert set(times) == {"a", "b"} and times["b"] >= 20 > times["a"]
    assert calls[::2] == calls[1::2]
    fast = [call for call in calls[::2] if call != "b"]
    assert len(set(itertools.pairwise(fast))) == 2, "the copies take turns"
    # Before the rounds: once to see how long it takes, and each turn once.
    assert calls.count("b") == 2 * (2 + rounds)
    assert len(fast) == 1 + MOST_TURNS * (1 + rounds)


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


def sources_of(name: str) -> list[str]:
    """Of a benchmark; ``name/op`` where there is a list for each operator."""
    script, _, op = name.partition("/")
    names = runpy.run_path(str(bench.REPOSITORY / "bench" / f"{script}.py"), run_name=script)
    sources: list[str] = names["SOURCES"][op] if op else names["SOURCES"]
    return sources


def missing_includes(sources: Sequence[str]) -> list[str]:
    """What the files include by a name of the repository, and is none of them."""
    files = {path.relative_to(bench.REPOSITORY).as_posix() for path in bench.source_files(sources)}
    missing = []
    for file in sorted(files):
        if not file.endswith((".h", ".cuh", ".cpp", ".cu")):
            continue
        for line in (bench.REPOSITORY / file).read_text().splitlines():
            if include := re.fullmatch(r'\s*#include "(.+)"', line):
                missing.append(
                    ("include/" if include[1].startswith("ikbo/") else "src/") + include[1]
                )
    return sorted({path for path in missing if path not in files})


SCRIPTS = {
    # what calls run through without including it; what they never run
    "bench_lce": (["kernels/lce/lce.cu", "torch_ops/prepack.cpp"], ["linear"]),
    "bench_lce_ladder": (["kernels/lce/lce.cu", "torch_ops/packed_weight.cpp"], ["linear"]),
    "bench_linear": (["kernels/linear/linear_config.cpp"], ["lce", "packed_weight"]),
    "bench_bmm": (["kernels/host/tensor_map.cpp"], ["lce"]),
    "bench_target_attention": (["torch_ops/attention_args.cpp"], ["lce", "attention_cpu"]),
    "bench_self_target_attention": (
        ["torch_ops/self_attention_cuda.cpp", "kernels/device/cta_groups.cuh"],
        ["lce", "attention_cpu"],
    ),
    "bench_generic": (
        ["kernels/lce/lce.cu", "kernels/lce/lce_generic.cu", "torch_ops/expand.cpp"],
        ["kernels/lce/lce_sm90.cuh", "lce/instances"],
    ),
    "bench_end_to_end/cuda": (
        ["kernels/lce/lce_sm90.cuh", "kernels/bmm/bmm.cu", "torch_ops/target_attention.cpp"],
        ["src/runtime/", "src/server/"],
    ),
    "bench_models/cuda": (
        ["kernels/linear/linear.cu", "kernels/bmm/bmm.cu", "torch_ops/expand.cpp"],
        ["src/runtime/", "src/server/"],
    ),
    "profile_cuda/lce": (["torch_ops/packed_weight.cpp"], ["linear"]),
    "profile_cuda/target_attention": (["kernels/device/cta_groups.cuh"], ["lce"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_gpu_benchmark_names_all_code_that_it_times(name: str) -> None:
    sources = sources_of(name)
    files = {path.relative_to(bench.REPOSITORY).as_posix() for path in bench.source_files(sources)}
    expected, unwanted = SCRIPTS[name]
    host = ["cuda_check.h", "device_limits.cpp", "launch.h"]
    common = ["common/kernel_trace.cpp", "torch_ops/cuda_context.cpp", "torch_ops/checks.cpp"]
    common += [f"kernels/host/{file}" for file in host]
    assert {f"src/{file}" for file in (*expected, *common)} <= files
    assert f"bench/{name.partition('/')[0]}.py" in files
    assert not [file for file in files for part in (*unwanted, "src/cpu/") if part in file]
    missing = missing_includes(sources)
    never_timed = ("src/cpu/", "src/torch_ops/composite", "src/torch_ops/attention_cpu.h")
    never_timed += ("src/torch_ops/packed_weight.h",) if name == "bench_linear" else ()
    assert not [file for file in missing if not file.startswith(never_timed)]


def test_every_gpu_benchmark_is_among_them() -> None:
    folder = bench.REPOSITORY / "bench"
    # Of PyTorch's part, lce_choices times nothing.
    scripts = {p.stem for p in folder.glob("*.py") if "bench_cuda" in p.read_text()}
    scripts.remove("bench_lce_choices")
    assert scripts == {name.partition("/")[0] for name in SCRIPTS}


def test_a_header_that_no_source_names_is_missed() -> None:
    sources = sources_of("bench_lce")
    sources.remove("src/kernels/device/ptx_wgmma.cuh")
    assert "src/kernels/device/ptx_wgmma.cuh" in missing_includes(sources)


def test_sources_are_followed_through_includes(repository: Path) -> None:
    for file, text in {
        "src/kernels/op/op.cu": '#include <vector>\n#include "kernels/op/op.cuh"\n',
        "src/kernels/op/op.cuh": '#include "kernels/device/a.cuh"\n  #include "ikbo/limits.h"\n',
        "src/kernels/device/a.cuh": '#include "kernels/device/b.cuh"\n',
        "src/kernels/device/b.cuh": "",
        "src/kernels/device/unused.cuh": "",
        "src/kernels/host/limits.cpp": '#include "kernels/host/check.h"\n',
        "src/kernels/host/check.h": "",
        "include/ikbo/limits.h": "",
        "src/torch_ops/op.cpp": '#include "torch_ops/args.h"\n#include "cpu/op.h"\n',
        "src/torch_ops/args.h": "",
        "src/torch_ops/args.cpp": '#include "torch_ops/left_out.h"\n',
        "src/torch_ops/left_out.h": "",
        "src/cpu/op.h": "",
        "python/ikbo/_op.py": "",
    }.items():
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).write_text(text)
    assert bench_sources.cuda_sources("op", without=["src/torch_ops/left"]) == [
        "include/ikbo/limits.h",
        "python/ikbo/_op.py",
        "src/kernels/device/a.cuh",
        "src/kernels/device/b.cuh",
        "src/kernels/host/check.h",
        "src/kernels/host/limits.cpp",
        "src/kernels/op/**/*",
        "src/torch_ops/args.cpp",
        "src/torch_ops/args.h",
        "src/torch_ops/op.cpp",
    ]
    (repository / "src/kernels/device/b.cuh").unlink()
    with pytest.raises(FileNotFoundError, match=r'a.cuh: #include "kernels/device/b.cuh" must'):
        bench_sources.cuda_sources("op")


@pytest.fixture
def result_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bench_results.ResultFile]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def make(*, keep: bool = False) -> bench_results.ResultFile:
        return bench_results.ResultFile("lce", ["src/*.cpp"], repository / "results", keep=keep)

    return make


def cases_in(path: Path) -> list[int]:
    return [row["case"]["B"] for row in json.loads(path.read_text())["rows"]]


def row_of(b: int, ours: float = 1.0) -> dict[str, Any]:
    return {"case": {"B": b}, "unit": "ms", "ours": ours, "peers": {}}


def test_a_result_file_has_every_row_so_far(
    result_file: Callable[..., bench_results.ResultFile],
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
    repository: Path, result_file: Callable[..., bench_results.ResultFile]
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


class Event:
    """In place of one of CUDA's: counts those that were recorded."""

    recorded = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def elapsed_time(self, end: "Event") -> float:
        return float(end.at - self.at)


class Graph:
    """In place of one of CUDA's, and of its capture."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass

    def replay(self) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the timers need of a GPU, without one."""
    buffer = torch.ones(1)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: buffer)
    for name in ("synchronize", "empty_cache", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: Graph())


@pytest.mark.usefixtures("no_gpu")
def test_what_is_timed_runs_in_inference_mode() -> None:
    modes: list[bool] = []

    def call() -> torch.Tensor:
        modes.append(torch.is_inference_mode_enabled())
        return torch.ones(3)

    contestants = bench_cuda.checked({"ours": call}, torch.ones(3))
    assert len(modes) == 1
    assert bench_cuda.timed(contestants, rounds=3) == {"ours": 1.0}
    assert len(modes) == 1 + 5 + 3
    bench_cuda.replayed(contestants)
    assert len(modes) == 1 + 5 + 3 + 2
    assert all(modes)


@pytest.mark.usefixtures("no_gpu")
def test_a_call_that_cannot_be_captured_says_why() -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    replays = bench_cuda.replayed({"a": lambda: torch.ones(3), "b": fails, "c": "not installed"})
    assert callable(replays["a"])
    assert replays["b"] == "RuntimeError: operation not permitted when stream is capturing"
    assert replays["c"] == "not installed"


def test_cases_are_chosen_by_number() -> None:
    args = bench_cuda.parser_of("Times.", 5).parse_args(["--first", "1", "--count", "2", "--keep"])
    assert bench_cuda.chosen(args, "abcde") == [(1, "b"), (2, "c")]
    assert args.keep
    args = bench_cuda.parser_of("Times.", 5).parse_args([])
    assert [case for _, case in bench_cuda.chosen(args, "abcde")] == list("abcde")
    assert not hasattr(bench_cuda.parser_of("Times.").parse_args([]), "first")


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
