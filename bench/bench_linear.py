# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::linear`` on an H200 against what users run today.

Every contestant takes the same raw tensors (K as it is, no padding) and is charged what it needs to
run on them. Each is captured into a CUDA graph and replayed: most of these shapes take the GPU less
time than the host needs to launch them, and then a timing tells nothing about kernels. ``eager``
holds the times of plain calls, launches by the host included. Peers:

baseline          gather, concat, one GEMM with bias, activation, as users write it
decomposed        two GEMMs, gather, add, activation
padded            the same with K padded to a multiple of 8 by the caller, padding not charged
parts             two GEMMs that write fp32, the rest compiled: what a package has (long K, 16 bits)
cand_gemm_padded  its candidate GEMM alone: less work than the operator

Each row is checked against an fp32 reference before it is timed; a contestant that fails says why.
``floor`` is the larger of the compulsory bytes at the measured copy bandwidth and the FLOPs at the
rate of a large GEMM, both measured in the same run. The result file is rewritten after each case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import ikbo
from ikbo.testing.bench_cuda import (
    Contestant,
    Limits,
    checked,
    chosen,
    measured_limits,
    padded,
    parser_of,
    replayed,
    sorted_index,
    timed,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.cost import cost_of

# Weights are plain at each call.
SOURCES = cuda_sources(
    "linear", "bench/bench_linear.py", *TIMING, without=["src/torch_ops/packed_weight"]
)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


LONG = 1024  # K_cand from which `parts` runs


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
        Case(1050, 70, 3072, 512, 8128),
        Case(2000, 70, 1024, 512, 16384),
        Case(32, 32, 64, 64, 64, "bfloat16", "none"),
        Case(65536, 512, 64, 130, 66, "bfloat16", "relu"),
        Case(100_000, 100, 16, 512, 866, "float16", "sigmoid"),
        Case(16384, 1, 1024, 512, 512, "float16", "relu"),
        Case(1024, 70, dtype="bfloat16"),
        Case(1024, 70, dtype="float32"),
        Case(16384, 70, 256, 512, 256, "float32", "relu"),
    ]
    return list(dict.fromkeys(grid))


def parts_of(
    x_user: torch.Tensor,
    x_cand: torch.Tensor,
    w_user: torch.Tensor,
    w_cand: torch.Tensor,
    bias: torch.Tensor,
    index: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> Contestant:
    @torch.compile(dynamic=False)
    def joined(user: torch.Tensor, cand: torch.Tensor) -> torch.Tensor:
        return act((user + bias).index_select(0, index) + cand).to(x_cand.dtype)

    def run() -> torch.Tensor:
        products = [(x_user, w_user), (x_cand, w_cand)]
        return joined(*(torch.mm(x, w.T, out_dtype=torch.float32) for x, w in products))

    return run


def measure(case: Case, limits: Limits, rounds: int) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype) * scale

    x_user, x_cand = randn(case.num_users, case.K_user), randn(case.B, case.K_cand)
    w_user = randn(case.M, case.K_user, scale=case.K_user**-0.5)
    w_cand = randn(case.M, case.K_cand, scale=case.K_cand**-0.5)
    bias = randn(case.M)
    index = sorted_index(case.B, case.ratio)
    w_both = torch.cat((w_user, w_cand), 1)
    w = padded(w_user, 1), padded(w_cand, 1)
    x = padded(x_user, 1), padded(x_cand, 1)
    act = ACTIVATIONS[case.activation]

    def split(
        x: tuple[torch.Tensor, torch.Tensor], w: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return act(x[1] @ w[1].T + torch.addmm(bias, x[0], w[0].T).index_select(0, index))

    contestants: dict[str, Contestant] = {
        "ours": lambda: ikbo.linear(x_user, x_cand, w_user, w_cand, bias, index, case.activation),
        "baseline": lambda: act(
            torch.addmm(bias, torch.cat((x_user.index_select(0, index), x_cand), 1), w_both.T)
        ),
        "decomposed": lambda: split((x_user, x_cand), (w_user, w_cand)),
        "padded": lambda: split(x, w),
        "cand_gemm_padded": lambda: x[1] @ w[1].T,
    }
    if case.K_cand >= LONG and dtype != torch.float32:
        contestants["parts"] = parts_of(x_user, x_cand, w_user, w_cand, bias, index, act)
    user_part = torch.addmm(bias.float(), x_user.float(), w_user.float().T)
    reference = act(x_cand.float() @ w_cand.float().T + user_part.index_select(0, index))
    contestants = checked(contestants, reference, unchecked=["cand_gemm_padded"])
    del reference, user_part
    eager = timed(contestants, rounds=rounds // 2)
    times: dict[str, Any] = timed(replayed(contestants), rounds=rounds)
    cost = cost_of("linear", {**dataclasses.asdict(case), "U": case.num_users}, dtype)
    return {
        "case": case_of_row(case),
        "unit": "ms",
        "ours": times.pop("ours"),
        "peers": times,
        "floor": limits.floor(cost, tensor_cores=case.dtype != "float32"),
        "eager": eager,
    }


def case_of_row(case: Case) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "op": "linear", "order": "sorted"}


def summary(row: dict[str, Any]) -> str:
    """One line: whether ours is the fastest, and the times in microseconds."""
    peers = {name: time * 1e3 for name, time in row["peers"].items() if not isinstance(time, str)}
    if isinstance(row["ours"], str):
        return f"FAILED {row['ours']} {row['case']}"
    best = min(peers.values(), default=float("inf"))
    return (
        f"{'LOST' if best < row['ours'] * 1e3 else 'won '} {row['ours'] * 1e3:.1f} us, best peer "
        f"{best:.1f}, floor {row['floor'] * 1e3:.1f}, eager {row['eager']['ours'] * 1e3:.1f} "
        f"{row['case']} { {name: round(time, 1) for name, time in peers.items()} }"
    )


def main() -> None:
    parser = parser_of(__doc__, len(cases()))
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds per case")
    args = parser.parse_args()
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    results = ResultFile("linear", SOURCES, args.output, keep=args.keep)
    failed = 0
    for number, case in chosen(args, cases()):
        torch.cuda.empty_cache()
        row = measure(case, limits, args.rounds)
        results.add(row, map(case_of_row, cases()))
        failed += isinstance(row["ours"], str)
        print(f"{number} {summary(row)}", flush=True)
    print(results.path, file=sys.stderr)
    if failed:
        raise SystemExit(f"bench_linear: ours failed in {failed} cases; the rows say why")


if __name__ == "__main__":
    main()
