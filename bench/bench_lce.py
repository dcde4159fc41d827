# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::lce`` on an H200 against what users run today and the public kernels.

Every contestant takes the same raw tensors (K as it is, no padding) and is charged what it needs to
run on them. Peers:

baseline          gather, concat, one GEMM, as users write it
decomposed        two GEMMs, gather, add
padded            the same with K padded to a multiple of 8 by the caller, padding not charged
cand_gemm_padded  its candidate GEMM alone: less work than the operator
triton, tlx       the public fused kernels (package ``fbgemm_ikbo`` where it is installed), K padded
                  by the caller, padding not charged; tlx with its flags reset each call

``ours`` packs both weights at each call, ``ours_prepacked`` the user's alone.

Each row is checked against an fp32 reference before it is timed. ``floor`` is the larger of the
compulsory bytes at the measured copy bandwidth and the FLOPs at the rate of a large GEMM, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ikbo
from ikbo.testing.bench import RESULTS, source_hash, write_results
from ikbo.testing.bench_cuda import interleaved_cuda

SOURCES = [
    "src/kernels/lce/**/*",
    "src/kernels/device/ptx_mbarrier.cuh",
    "src/kernels/device/ptx_mma.cuh",
    "src/kernels/device/ptx_tma.cuh",
    "src/kernels/device/ptx_wgmma.cuh",
    "src/kernels/host/launch.h",
    "src/kernels/host/tensor_map.cpp",
    "src/torch_ops/lce*",
    "include/ikbo/lce.h",
    "bench/bench_lce.py",
    "python/ikbo/testing/bench_cuda.py",
]


@dataclass(frozen=True)
class Case:
    B: int
    ratio: int
    M: int = 433
    N: int = 256
    K_user: int = 1178
    K_cand: int = 866
    dtype: str = "float16"

    @property
    def num_users(self) -> int:
        return -(-self.B // self.ratio)


def cases() -> list[Case]:
    grid = [Case(1024, 70), Case(512, 70), Case(1024, 70, dtype="bfloat16")]
    grid += [Case(b, r) for b in (512, 1024, 2048, 3072) for r in (70, 2, 10, 1000, 1)]
    for m, n in (
        *((16, 64), (16, 512), (32, 128), (64, 32), (64, 64), (64, 256), (128, 128)),
        *((128, 512), (200, 96), (256, 64), (256, 256), (512, 128), (1000, 32), (1024, 256)),
    ):
        grid += [Case(1024, 64, m, n, *k) for k in ((64, 64), (500, 300), (1000, 866))]
    grid += [Case(b, b, 433, 256) for b in (1, 8, 32)]
    grid += [Case(4096, 64, 64, 64, 256, 256), Case(2048, 64, 128, 128, 512, 512)]
    grid += [Case(1024, 70, 256, 256, 1024, 512), Case(256, 64, 433, 512, 4096, 4096)]
    grid += [Case(100_000, 10_000, 16, 64, 4096, 100), Case(20_000, 10_000)]
    return list(dict.fromkeys(grid))


def padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    extra = -tensor.size(dim) % 8
    shape = list(tensor.shape)
    shape[dim] = extra
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)


def public_kernels(
    case: Case,
    w: tuple[torch.Tensor, torch.Tensor],
    e: tuple[torch.Tensor, torch.Tensor],
    index: torch.Tensor,
    wanted: list[str],
) -> dict[str, Callable[[], torch.Tensor] | str]:
    calls: dict[str, Callable[[], torch.Tensor] | str] = {}
    for name in ("triton", "tlx"):
        if name not in wanted:
            continue
        try:
            module = importlib.import_module(f"fbgemm_ikbo.ops.{name}_ikbo_lce")
            if name == "triton":
                calls[name] = lambda kernel=module.triton_ikbo_lce: kernel(
                    w[1], w[0], e[1], e[0], index
                )
            else:
                flag = module.create_user_flag(w[0], e[0])

                def run(kernel: Any = module.tlx_ikbo_lce, flag: torch.Tensor = flag) -> Any:
                    flag.zero_()
                    return kernel(w[1], w[0], e[1], e[0], index, flag)

                calls[name] = run
        except ImportError as error:
            calls[name] = f"not installed: {error}"
    return calls


def measure(case: Case, peers: list[str], limits: dict[str, float]) -> dict[str, Any]:
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    e_user = randn(case.num_users, case.K_user, case.N)
    e_cand = randn(case.B, case.K_cand, case.N)
    w_user, w_cand = randn(case.M, case.K_user), randn(case.M, case.K_cand)
    index = (torch.arange(case.B, device="cuda") // case.ratio).int()
    w_both = torch.cat((w_user, w_cand), 1)
    w = padded(w_user, 1), padded(w_cand, 1)
    e = padded(e_user, 1), padded(e_cand, 1)
    packed = ikbo.prepack(w_cand, [case.K_cand])

    calls: dict[str, Callable[[], torch.Tensor] | str] = {
        "ours": lambda: ikbo.lce(e_user, e_cand, w_user, w_cand, None, index),
        "ours_prepacked": lambda: ikbo.lce(e_user, e_cand, w_user, packed, None, index),
        "baseline": lambda: w_both @ torch.cat((e_user.index_select(0, index), e_cand), 1),
        "decomposed": lambda: (w_cand @ e_cand) + (w_user @ e_user).index_select(0, index),
        "padded": lambda: (w[1] @ e[1]) + (w[0] @ e[0]).index_select(0, index),
        "cand_gemm_padded": lambda: w[1] @ e[1],
        **public_kernels(case, w, e, index, peers),
    }
    reference = (w_user.float() @ e_user.float()).index_select(0, index[:64])
    reference += w_cand.float() @ e_cand[:64].float()
    for name, call in calls.items():
        if callable(call) and name != "cand_gemm_padded":
            try:
                error = (call()[:64].float() - reference).norm() / reference.norm()
                if not error < 2e-2:
                    calls[name] = f"wrong result: relative error {error:.3g}"
            except Exception as problem:  # a peer that cannot run this shape says why
                calls[name] = f"{type(problem).__name__}: {str(problem)[:100]}"
    runnable = {name: call for name, call in calls.items() if callable(call)}
    times: dict[str, Any] = {**calls, **interleaved_cuda(runnable)}
    flops = 2 * case.M * case.N * (case.B * case.K_cand + case.num_users * case.K_user)
    moved = 2 * (e_user.numel() + e_cand.numel() + w_both.numel() + case.B * case.M * case.N)
    floor = max(moved / limits["bytes_per_ms"], flops / limits["flops_per_ms"])
    case_of_row = {**case.__dict__, "op": "lce", "order": "sorted"}
    ours = times.pop("ours")
    prepacked = times.pop("ours_prepacked")
    return {
        "case": case_of_row,
        "unit": "ms",
        "ours": ours,
        "ours_prepacked": prepacked,
        "peers": times,
        "floor": floor,
    }


def with_kept(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows and those of other cases in the file, if it measures the same sources."""
    content = json.loads(path.read_text())
    if content["environment"]["source_hash"] != source_hash(content["environment"]["sources"]):
        raise SystemExit(f"bench_lce: {path} is stale; measure all cases")
    new = [row["case"] for row in rows]
    return [row for row in content["rows"] if row["case"] not in new] + rows


def measured_limits() -> dict[str, float]:
    source = torch.randn(2**30, device="cuda", dtype=torch.float16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    times = interleaved_cuda({"copy": lambda: target.copy_(source), "gemm": lambda: a @ b})
    return {
        "bytes_per_ms": 2 * source.numel() * 2 / times["copy"],
        "flops_per_ms": 2 * 8192**3 / times["gemm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="triton,tlx", help="public kernels to run")
    parser.add_argument("--triton-cases", type=int, default=8, help="it tunes itself per shape")
    parser.add_argument("--tlx-cases", type=int, default=2, help="it compiles a minute per shape")
    parser.add_argument("--output", type=Path, help="folder of the result file")
    parser.add_argument("--first", type=int, default=0, help="number of the first case to run")
    parser.add_argument("--count", type=int, default=1000, help="cases to run")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other cases")
    args = parser.parse_args()
    limits = measured_limits()
    print(json.dumps(limits), flush=True)
    rows = []
    wanted = range(args.first, args.first + args.count)
    for number, case in enumerate(cases()):
        if number not in wanted:
            continue
        budget = {"triton": args.triton_cases, "tlx": args.tlx_cases}
        peers = [peer for peer in args.peers.split(",") if number < budget[peer]]
        row = measure(case, peers, limits)
        rows.append(row)
        best = min((v for k, v in row["peers"].items() if isinstance(v, float)), default=0.0)
        print(f"{case} ours {row['ours']:.4f} best peer {best:.4f}", row["peers"], flush=True)
        torch.cuda.empty_cache()
    folder = args.output or RESULTS
    if args.keep:
        rows = with_kept(rows, folder / "lce-h200.json")
    path = write_results("lce", rows, sources=SOURCES, device="h200", results=folder)
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
