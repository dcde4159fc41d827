# SPDX-License-Identifier: Apache-2.0
"""Times the CUDA kernels that run on any architecture: ``expand``, and ``lce`` where Hopper's copy
engine does not reach (N not a multiple of 8, E with K innermost, fp32).

Peers, all in PyTorch:

index_select  of expand
decomposed    of lce: two GEMMs, gather, add
baseline      of lce: gather, concat, one GEMM, as users write it

Each row is checked against its peer before it is timed. ``floor``: the compulsory bytes at the
bandwidth of a large copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ikbo
from ikbo.testing.bench import write_results
from ikbo.testing.bench_cuda import interleaved_cuda

SOURCES = [
    "bench/bench_generic.py",
    "include/ikbo/expand.h",
    "python/ikbo/testing/bench_cuda.py",
    "src/kernels/device/ptx_mma.cuh",
    "src/kernels/expand/*",
    "src/kernels/lce/lce_columns.cuh",
    "src/kernels/lce/lce_generic*",
    "src/kernels/lce/lce_mma.cuh",
    "src/kernels/lce/lce_simt.cuh",
    "src/torch_ops/expand.cpp",
]

Calls = dict[str, Callable[[], torch.Tensor]]

EXPAND = [
    # B, ratio, elements of a row
    (b, ratio, row)
    for b, ratio in ((1024, 70), (4096, 64), (100000, 1000))
    for row in (1, 64, 433, 1024, 16384)
    if b * row < 2**30
]
LCE = [
    # B, ratio, M, N, K_user, K_cand, dtype, K innermost
    (1024, 70, 433, 250, 1178, 866, "float16", False),
    (1024, 70, 433, 255, 1178, 866, "float16", False),
    (1024, 70, 433, 256, 1178, 866, "float16", True),
    (4096, 64, 64, 12, 256, 256, "bfloat16", False),
    (64, 64, 433, 250, 1178, 866, "float16", False),
    (1024, 70, 433, 256, 1178, 866, "float32", False),
]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def make_index(b: int, ratio: int) -> torch.Tensor:
    return (torch.arange(b, device="cuda") // ratio).int()


def expand_calls(b: int, ratio: int, row: int) -> tuple[Calls, int]:
    """The contestants, and the bytes that must be moved."""
    index = make_index(b, ratio)
    x_user = randn(-(-b // ratio), row, dtype=torch.float16)
    calls: Calls = {
        "ours": lambda: ikbo.expand(x_user, index),
        "index_select": lambda: x_user.index_select(0, index),
    }
    assert torch.equal(calls["ours"](), calls["index_select"]())
    return calls, 2 * (x_user.numel() + b * row) + 4 * b


def lce_calls(
    b: int, ratio: int, m: int, n: int, k_user: int, k_cand: int, dtype: str, k_inner: bool
) -> tuple[Calls, int]:
    kind = getattr(torch, dtype)
    index = make_index(b, ratio)
    users = -(-b // ratio)
    e_user, e_cand = (
        randn(batch, n, k, dtype=kind).mT if k_inner else randn(batch, k, n, dtype=kind)
        for batch, k in ((users, k_user), (b, k_cand))
    )
    w_user, w_cand = randn(m, k_user, dtype=kind), randn(m, k_cand, dtype=kind)
    w_both = torch.cat((w_user, w_cand), 1)
    calls: Calls = {
        "ours": lambda: ikbo.lce(e_user, e_cand, w_user, w_cand, None, index),
        "decomposed": lambda: (w_cand @ e_cand) + (w_user @ e_user).index_select(0, index),
        "baseline": lambda: w_both @ torch.cat((e_user.index_select(0, index), e_cand), 1),
    }
    expected = calls["decomposed"]().double()
    error = (calls["ours"]().double() - expected).norm() / expected.norm()
    assert error < (1e-5 if kind == torch.float32 else 1e-2), error
    elements = e_user.numel() + e_cand.numel() + w_both.numel() + b * m * n
    return calls, elements * e_cand.element_size() + 4 * b


def bytes_per_ms() -> float:
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / interleaved_cuda({"copy": lambda: target.copy_(source)})["copy"]


def measured(case: dict[str, Any], calls: Calls, moved: int, bandwidth: float) -> dict[str, Any]:
    times = interleaved_cuda(calls, rounds=30)
    row = {"case": case, "unit": "ms", "ours": times.pop("ours"), "peers": times}
    print(case, row["ours"], times, flush=True)
    return {**row, "floor": moved / bandwidth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the result file")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = bytes_per_ms()
    rows = []
    for b, ratio, row in EXPAND:
        case = {"op": "expand", "B": b, "ratio": ratio, "row": row, "dtype": "float16"}
        rows.append(measured(case, *expand_calls(b, ratio, row), bandwidth))
    names = ("B", "ratio", "M", "N", "K_user", "K_cand", "dtype", "k_inner")
    for sizes in LCE:
        case = {"op": "lce", **dict(zip(names, sizes, strict=True))}
        rows.append(measured(case, *lce_calls(*sizes), bandwidth))
        torch.cuda.empty_cache()
    folder = {"results": args.output} if args.output else {}
    print(write_results("generic", rows, sources=SOURCES, device="h200", **folder), file=sys.stderr)


if __name__ == "__main__":
    main()
