# SPDX-License-Identifier: Apache-2.0
"""What bounds the kernels of an operator on an H200, by NVIDIA's Nsight Compute (`ncu`).

One call of the operator is profiled after half a second of the same calls, so that clock and power
are those of sustained work (`ncu` does not lock clocks here). `ncu` runs the kernels of a call one
after the other and several times over: durations do not overlap as they do in a call.

A row per kernel and metric; `ours` is the value, `launch` the kernel's place in the call, whose
stages may be one kernel. Shares are of what the unit could do at the clock of the run.
`stall_<reason>` is the mean number of warps of a scheduler's that wait for that reason.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import ikbo
from ikbo.testing.bench_cuda import parser_of, sorted_index
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import cuda_sources

SOURCES = {
    "lce": cuda_sources("lce", "src/torch_ops/prepack.cpp", "bench/profile_cuda.py"),
    "linear": cuda_sources(
        "linear", "bench/profile_cuda.py", without=["src/torch_ops/packed_weight"]
    ),
    "target_attention": cuda_sources("target_attention", "bench/profile_cuda.py"),
}
CASES: dict[str, list[dict[str, Any]]] = {
    "lce": [
        {"B": 1024, "ratio": 70, "M": 433, "N": 256, "K_user": 1178, "K_cand": 866},
        {"B": 2048, "ratio": 64, "M": 128, "N": 128, "K_user": 512, "K_cand": 512},
    ],
    "linear": [
        {"B": 1024, "ratio": 70, "M": 433, "K_user": 1178, "K_cand": 866},
        {"B": 16384, "ratio": 64, "M": 1024, "K_user": 1024, "K_cand": 1024},
    ],
    "target_attention": [
        {"B": 2048, "ratio": 64, "H": 2, "Q": 64, "D": 128, "S": s} for s in (512, 2048)
    ],
}
# Label and unit to the metrics that it may have in a version of ncu; the largest match counts.
METRICS = {
    ("duration", "us"): r"gpu__time_duration\.sum",
    ("sm_clock", "GHz"): r"sm__cycles_elapsed\.avg\.per_second",
    ("tensor_pipe", "%"): r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_\w+",
    ("special_function_unit", "%"): r"sm__inst_executed_pipe_xu\.avg\.pct_of_peak_sustained_\w+",
    ("issue_slots", "%"): r"sm__inst_issued\.avg\.pct_of_peak_sustained_\w+",
    ("shared_memory", "%"): r"l1tex__data_pipe_lsu_wavefronts\.avg\.pct\w+",
    ("l2", "%"): r"lts__t_sectors\.avg\.pct_of_peak_sustained_elapsed",
    ("registers", "per thread"): r"launch__registers_per_thread",
}
STALL = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"
LEAST_STALL = 0.2
UNITS_OF_NCU = {"second": 1e6, "msecond": 1e3, "usecond": 1.0, "nsecond": 1e-3}  # to us
UNITS_OF_NCU |= {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
RATES_OF_NCU = {"hz": 1e-9, "khz": 1e-6, "mhz": 1e-3, "ghz": 1.0}  # to GHz
RATES_OF_NCU |= {f"cycle/{unit}": 1e-3 / scale for unit, scale in UNITS_OF_NCU.items()}


def call_of(op: str, case: dict[str, Any]) -> Callable[[], Any]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    index = sorted_index(case["B"], case["ratio"])
    users = -(-case["B"] // case["ratio"])
    if op == "lce":
        k_user, k_cand, n = case["K_user"], case["K_cand"], case["N"]
        e_user, e_cand = randn(users, k_user, n), randn(case["B"], k_cand, n)
        w_user, w_cand = randn(case["M"], k_user), randn(case["M"], k_cand)
        packed = ikbo.prepack(w_cand, [k_cand])
        return lambda: ikbo.lce(e_user, e_cand, w_user, packed, None, index)
    if op == "linear":
        x_user, x_cand = randn(users, case["K_user"]), randn(case["B"], case["K_cand"])
        w_user, w_cand = randn(case["M"], case["K_user"]), randn(case["M"], case["K_cand"])
        return lambda: ikbo.linear(x_user, x_cand, w_user, w_cand, None, index, "relu")
    q = randn(case["B"], case["Q"], case["H"], case["D"])
    k, v = (randn(users, case["S"], case["H"], case["D"]) for _ in range(2))
    return lambda: ikbo.target_attention(q, k, v, index)


@torch.inference_mode()
def work(op: str, case: dict[str, Any]) -> None:
    """What ncu watches: the call between the start and the stop of the profiler."""
    call = call_of(op, case)
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile(op: str, number: int) -> list[dict[str, str]]:
    """Of each kernel: metric to value, and ``metric unit`` to its unit."""
    ncu = ["ncu", "--set", "full", "--page", "raw", "--csv", "--clock-control", "none"]
    ncu += ["--profile-from-start", "off", "--target-processes", "all"]
    ncu += [sys.executable, __file__, op, "--work", str(number)]
    result = subprocess.run(ncu, capture_output=True, text=True, check=False)
    begin = result.stdout.find('"ID"')
    if result.returncode != 0 or begin < 0:
        raise SystemExit(f"profile_cuda: ncu failed:\n{result.stdout}\n{result.stderr}")
    names, units, *values = csv.reader(io.StringIO(result.stdout[begin:]))
    return [
        {
            **dict(zip(names, row, strict=True)),
            **{f"{n} unit": u for n, u in zip(names, units, strict=True)},
        }
        for row in values
    ]


def value_of(metrics: dict[str, str], name: str) -> float:
    value = float(metrics[name].replace(",", ""))
    unit = metrics[f"{name} unit"].lower()
    return value * {**UNITS_OF_NCU, **RATES_OF_NCU}.get(unit, 1.0)


def rows_of(
    op: str, case: dict[str, Any], launch: int, metrics: dict[str, str]
) -> list[dict[str, Any]]:
    kernel = re.sub(r"<.*|\(.*", "", metrics["Kernel Name"]).split("::")[-1].split()[-1]
    found: dict[tuple[str, str], float] = {}
    for key, pattern in METRICS.items():
        matches = [value_of(metrics, n) for n in metrics if re.fullmatch(pattern, n) and metrics[n]]
        if matches:
            found[key] = max(matches)
        else:
            print(f"profile_cuda: no metric like {pattern} among {list(metrics)}", file=sys.stderr)
    for name in metrics:
        stall = re.fullmatch(STALL, name)
        if stall and metrics[name] and value_of(metrics, name) >= LEAST_STALL:
            found["stall_" + stall[1], "warps"] = value_of(metrics, name)
    facts = {"op": op, "dtype": "float16", **case, "launch": launch, "kernel": kernel}
    return [
        {"case": {**facts, "metric": metric}, "unit": unit, "ours": value, "peers": {}}
        for (metric, unit), value in found.items()
    ]


def options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("op", choices=sorted(SOURCES))
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.work is not None:
        work(args.op, CASES[args.op][args.work])
        return
    results = ResultFile(f"{args.op}-profile", SOURCES[args.op], args.output)
    for number, case in enumerate(CASES[args.op]):
        for launch, metrics in enumerate(profile(args.op, number)):
            for row in rows_of(args.op, case, launch, metrics):
                results.add(row)
                facts = row["case"]
                kernel = f"{launch} {facts['kernel']}"
                print(f"{case} {kernel} {facts['metric']} {row['ours']:.4g} {row['unit']}")
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
