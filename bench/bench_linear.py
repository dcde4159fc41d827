# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::linear`` on an H200 against what users run today.

Every contestant takes the same raw tensors (K as it is, no padding) and is charged what it needs to
run on them. Each is captured into a CUDA graph and replayed: most of these shapes take the GPU less
time than the host needs to launch them, and then a timing tells nothing about kernels. ``eager``
holds the times of plain calls, launches by the host included. Peers:

baseline          gather, concat, one GEMM with bias, activation, as users write it
decomposed        two GEMMs, gather, add, activation
padded            the same with K padded to a multiple of 8 by the caller, padding not charged
cand_gemm_padded  its candidate GEMM alone: less work than the operator

Each row is checked against an fp32 reference before it is timed. ``floor`` is the larger of the
compulsory bytes at the measured copy bandwidth and the FLOPs at the rate of a large GEMM, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import ikbo
from ikbo.testing.bench import write_results
from ikbo.testing.bench_cuda import interleaved_cuda

SOURCES = [
    "src/kernels/linear/**/*",
    "src/kernels/device/activation.cuh",
    "src/kernels/device/ptx_c*.cuh",
    "src/kernels/device/ptx_mbarrier.cuh",
    "src/kernels/device/ptx_tma.cuh",
    "src/kernels/device/ptx_wgmma.cuh",
    "src/kernels/host/launch.h",
    "src/kernels/host/tensor_map.cpp",
    "src/torch_ops/linear.cpp",
    "include/ikbo/linear.h",
    "bench/bench_linear.py",
    "python/ikbo/testing/bench_cuda.py",
]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Case:
    B: int
    ratio: int
    M: int = 433
    K_user: int = 1178
    K_cand: int = 866
    dtype: str = "float16"
    activation: str = "relu"

    @property
    def num_users(self) -> int:
        return -(-self.B // self.ratio)


def cases() -> list[Case]:
    grid = [Case(b, 70) for b in (32, 128, 512, 1024, 4096, 16384, 100_000)]
    grid += [Case(4096, ratio) for ratio in (1, 2, 10, 1000)]
    grid += [Case(100_000, ratio) for ratio in (1, 10, 1000)]
    grid += [Case(b, 70, 512, 1024, 768, "bfloat16", "gelu") for b in (512, 4096, 100_000)]
    grid += [
        Case(8192, 64, m, k, k, "float16", activation)
        for m, k, activation in (
            (16, 64, "none"),
            (64, 256, "silu"),
            (128, 500, "sigmoid"),
            (256, 1024, "none"),
            (1024, 1024, "relu"),
            (1000, 300, "gelu"),
        )
    ]
    grid += [
        Case(256, 64, 256, 4096, 4096, "bfloat16", "silu"),
        Case(1024, 64, 1024, 4096, 4096, "bfloat16", "relu"),
        Case(32, 32, 64, 64, 64, "bfloat16", "none"),
        Case(65536, 512, 64, 130, 66, "bfloat16", "relu"),
        Case(100_000, 100, 16, 512, 866, "float16", "sigmoid"),
        Case(16384, 1, 1024, 512, 512, "float16", "relu"),
        Case(1024, 70, dtype="bfloat16"),
        Case(1024, 70, dtype="float32"),
        Case(16384, 70, 256, 512, 256, "float32", "relu"),
    ]
    return list(dict.fromkeys(grid))


def replayed(call: Callable[[], object]) -> Callable[[], None]:
    """The call's kernels as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def padded(tensor: torch.Tensor) -> torch.Tensor:
    return functional.pad(tensor, (0, -tensor.size(1) % 8))


def measure(case: Case, limits: dict[str, float], rounds: int) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype) * scale

    x_user, x_cand = randn(case.num_users, case.K_user), randn(case.B, case.K_cand)
    w_user = randn(case.M, case.K_user, scale=case.K_user**-0.5)
    w_cand = randn(case.M, case.K_cand, scale=case.K_cand**-0.5)
    bias = randn(case.M)
    index = (torch.arange(case.B, device="cuda") // case.ratio).int()
    w_both = torch.cat((w_user, w_cand), 1)
    w = padded(w_user), padded(w_cand)
    x = padded(x_user), padded(x_cand)
    act = ACTIVATIONS[case.activation]

    def split(
        x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return act(x[1] @ w[1].T + torch.addmm(bias, x[0], w[0].T).index_select(0, index))

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: ikbo.linear(x_user, x_cand, w_user, w_cand, bias, index, case.activation),
        "baseline": lambda: act(
            torch.addmm(bias, torch.cat((x_user.index_select(0, index), x_cand), 1), w_both.T)
        ),
        "decomposed": lambda: split((x_user, x_cand), (w_user, w_cand)),
        "padded": lambda: split(x, w),
        "cand_gemm_padded": lambda: x[1] @ w[1].T,
    }
    user_part = torch.addmm(bias.float(), x_user.float(), w_user.float().T)
    reference = act(x_cand.float() @ w_cand.float().T + user_part.index_select(0, index))
    for name, call in calls.items():
        if name != "cand_gemm_padded":
            error = ((call().float() - reference).norm() / reference.norm()).item()
            if not error < 2e-2:
                raise RuntimeError(f"{case}: {name} is wrong: relative error {error:.3g}")
    del reference, user_part
    eager = interleaved_cuda(calls, rounds // 2)
    times = interleaved_cuda({name: replayed(call) for name, call in calls.items()}, rounds)
    flops = 2 * case.M * (case.B * case.K_cand + case.num_users * case.K_user)
    elements = x_user.numel() + x_cand.numel() + w_both.numel() + case.B * case.M
    floor = elements * x_cand.element_size() / limits["bytes_per_ms"]
    if case.dtype != "float32":
        floor = max(floor, flops / limits["flops_per_ms"])
    ours = times.pop("ours")
    case_of_row = {**case.__dict__, "op": "linear", "order": "sorted"}
    return {
        "case": case_of_row,
        "unit": "ms",
        "ours": ours,
        "peers": times,
        "floor": floor,
        "eager": eager,
    }


def measured_limits() -> dict[str, float]:
    source = torch.randn(2**30, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    times = interleaved_cuda({"copy": lambda: target.copy_(source), "gemm": lambda: a @ b}, 20)
    return {
        "bytes_per_ms": 2 * source.numel() * 2 / times["copy"],
        "flops_per_ms": 2 * 8192**3 / times["gemm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds per case")
    parser.add_argument("--output", type=Path, help="folder of the result file")
    args = parser.parse_args()
    limits = measured_limits()
    print(json.dumps(limits), flush=True)
    rows = []
    wrong = []
    for case in cases():
        try:
            row = measure(case, limits, args.rounds)
        except RuntimeError as error:  # the other cases are still worth measuring
            wrong.append(f"{case}: {error}")
            print("WRONG", wrong[-1], flush=True)
            continue
        rows.append(row)
        best = min(row["peers"].values())
        lost = [name for name, time in row["peers"].items() if time < row["ours"]]
        times = {name: round(time * 1e3, 1) for name, time in row["peers"].items()}
        print(
            f"{'LOST' if lost else 'won '} {row['ours'] * 1e3:.1f} us, best peer "
            f"{best * 1e3:.1f}, floor {row['floor'] * 1e3:.1f}, "
            f"eager {row['eager']['ours'] * 1e3:.1f} {case} {times}",
            flush=True,
        )
    if wrong:
        raise SystemExit(f"bench_linear: {len(wrong)} cases failed; no result file is written")
    folder = {"results": args.output} if args.output else {}
    print(write_results("linear", rows, sources=SOURCES, device="h200", **folder), file=sys.stderr)


if __name__ == "__main__":
    main()
