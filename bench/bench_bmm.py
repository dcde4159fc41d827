# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::bmm`` on an H200 against what users run today.

Each contestant is captured into a CUDA graph and replayed: launches by the host do not count;
``eager`` holds the times of plain calls. Peers:

gather    the users' matrices replicated by ``index_select``, then ``torch.bmm``, as users write it
grouped   sorted candidates, as many of one user as of the others: one batched cuBLAS GEMM per user,
          whose left operand is the user's matrix with stride 0
one_gemm  the same candidates with ``transpose_b``: the candidates' matrices of a user are one
          matrix, so that one batched GEMM takes them all; its result is [B, N, P] in memory
copy      a device-to-device copy that moves the operator's compulsory bytes

Each row is checked against an fp32 reference before it is timed; a contestant that fails says why.
``floor`` is the larger of the compulsory bytes at the measured copy bandwidth and the FLOPs at the
rate of a large GEMM, both measured in the same run. The result file is rewritten after each case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ikbo
from ikbo.testing.bench_cuda import (
    Contestant,
    Limits,
    checked,
    chosen,
    measured_limits,
    parser_of,
    replayed,
    sorted_index,
    timed,
    without_oversized,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.cost import Cost, cost_of

SOURCES = cuda_sources("bmm", "bench/bench_bmm.py", *TIMING)


@dataclass(frozen=True)
class Case:
    B: int = 4096
    ratio: int = 64
    P: int = 256
    R: int = 128
    N: int = 32
    dtype: str = "float16"
    transpose_a: bool = False
    transpose_b: bool = False
    order: str = "sorted"  # or shuffled

    @property
    def num_users(self) -> int:
        return -(-self.B // self.ratio)

    @property
    def is_even(self) -> bool:
        """Whether each user has as many candidates as the others, side by side."""
        return self.order == "sorted" and self.B % self.ratio == 0

    @property
    def cost(self) -> Cost:
        sizes = {**dataclasses.asdict(self), "U": self.num_users}
        return cost_of("bmm", sizes, getattr(torch, self.dtype))


def cases() -> list[Case]:
    forms = [(a, b) for a in (False, True) for b in (False, True)]
    grid = [Case(N=n, transpose_a=a, transpose_b=b) for n in (32, 64) for a, b in forms]
    grid += [Case(N=n, order="shuffled") for n in (32, 64)]
    grid += [Case(ratio=ratio) for ratio in (1, 10, 1000)]
    grid += [Case(B=b) for b in (64, 512, 1024, 16384, 65536)]
    grid += [Case(N=n) for n in (8, 16, 24, 128, 256)]
    grid += [Case(P=p, R=r, N=n) for p, r, n in ((64, 64, 16), (128, 64, 8), (40, 128, 24))]
    grid += [Case(P=1000, R=64, N=n) for n in (8, 64)]
    grid += [Case(P=512, R=r, N=64) for r in (256, 512, 1024)]
    grid += [Case(dtype="bfloat16"), Case(P=64, R=64, N=64, dtype="bfloat16")]
    grid += [Case(B=16384, ratio=512, P=200, R=64, N=1, transpose_b=True)]  # scores of a history
    grid += [Case(N=13), Case(R=130), Case(dtype="float32"), Case(N=13, dtype="float32")]
    return list(dict.fromkeys(grid))


@dataclass(frozen=True)
class Tensors:
    a_user: Tensor
    b_cand: Tensor
    index: Tensor


def make_tensors(case: Case) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    index = sorted_index(case.B, case.ratio)
    if case.order == "shuffled":
        index = index[torch.randperm(case.B, device="cuda", generator=generator)]
    a = (case.R, case.P) if case.transpose_a else (case.P, case.R)
    b = (case.N, case.R) if case.transpose_b else (case.R, case.N)
    return Tensors(randn(case.num_users, *a), randn(case.B, *b), index)


def contestants_of(case: Case, t: Tensors) -> dict[str, Contestant]:
    a = t.a_user.mT if case.transpose_a else t.a_user
    b = t.b_cand.mT if case.transpose_b else t.b_cand
    out = b.new_empty(case.B, case.P, case.N)

    def grouped() -> Tensor:
        for user in range(case.num_users):
            rows = slice(user * case.ratio, (user + 1) * case.ratio)
            left = a[user].expand(case.ratio, -1, -1)
            torch.bmm(left, b[rows], out=out[rows])
        return out

    def one_gemm() -> Tensor:
        columns = t.b_cand.view(case.num_users, case.ratio * case.N, case.R)
        return torch.bmm(columns, a.mT).view(case.B, case.N, case.P).mT

    # A copy reads what it writes.
    moved = torch.zeros(case.cost.unique_bytes // 2, device="cuda", dtype=torch.int8)
    target = torch.empty_like(moved)
    no_group = "needs as many candidates of one user as of the others, side by side"
    return {
        "ours": lambda: ikbo.bmm(t.a_user, t.b_cand, t.index, case.transpose_a, case.transpose_b),
        "gather": lambda: torch.bmm(a.index_select(0, t.index), b),
        "grouped": grouped if case.is_even else no_group,
        "one_gemm": one_gemm
        if case.is_even and case.transpose_b
        else f"{no_group}, and transpose_b",
        "copy": lambda: target.copy_(moved),
    }


def measure(case: Case, limits: Limits, rounds: int) -> dict[str, Any]:
    t = make_tensors(case)
    few = min(case.B, 64)
    a = t.a_user.float()[t.index[:few].long()]
    b = t.b_cand.float()[:few]
    reference = (a.mT if case.transpose_a else a) @ (b.mT if case.transpose_b else b)
    gathered = case.B * case.P * case.R * t.a_user.element_size()
    contestants = checked(
        without_oversized(contestants_of(case, t), {"gather": gathered}),
        reference,
        lambda out: out[:few],
        tolerance=1e-5 if case.dtype == "float32" else 1e-2,
        unchecked=["copy"],
    )
    eager = timed(contestants, rounds=rounds // 2)
    times: dict[str, Any] = timed(replayed(contestants), rounds=rounds)
    return {
        "case": case_of_row(case),
        "unit": "ms",
        "ours": times.pop("ours"),
        "peers": times,
        "floor": limits.floor(case.cost, tensor_cores=case.dtype != "float32"),
        "eager": eager,
    }


def case_of_row(case: Case) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "op": "bmm"}


def summary(row: dict[str, Any]) -> str:
    """One line: whether ours is the fastest but for the copy, and the times in microseconds."""
    times = {name: time * 1e3 for name, time in row["peers"].items() if not isinstance(time, str)}
    if isinstance(row["ours"], str):
        return f"FAILED {row['ours']} {row['case']}"
    best = min((time for name, time in times.items() if name != "copy"), default=float("inf"))
    ours = row["ours"] * 1e3
    return (
        f"{'LOST' if best < ours else 'won '} {ours:.1f} us, best peer {best:.1f}, floor "
        f"{row['floor'] * 1e3:.1f} ({row['floor'] * 1e3 / ours:.2f} of it), eager "
        f"{row['eager']['ours'] * 1e3:.1f} {row['case']} "
        f"{ {name: round(time, 1) for name, time in times.items()} }"
    )


def main() -> None:
    parser = parser_of(__doc__, len(cases()))
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds per case")
    args = parser.parse_args()
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    results = ResultFile("bmm", SOURCES, args.output, keep=args.keep)
    failed = 0
    for number, case in chosen(args, cases()):
        torch.cuda.empty_cache()
        row = measure(case, limits, args.rounds)
        results.add(row, map(case_of_row, cases()))
        failed += isinstance(row["ours"], str)
        print(f"{number} {summary(row)}", flush=True)
    print(results.path, file=sys.stderr)
    if failed:
        raise SystemExit(f"bench_bmm: ours failed in {failed} cases; the rows say why")


if __name__ == "__main__":
    main()
