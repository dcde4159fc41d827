# SPDX-License-Identifier: Apache-2.0
"""Times the CUDA kernels that run on any architecture: ``expand``, and ``lce`` where Hopper's copy
engine does not reach (N not a multiple of 8, E with K innermost, fp32).

Peers, all in PyTorch:

index_select  of expand
decomposed    of lce: two GEMMs, gather, add
baseline      of lce: gather, concat, one GEMM, as users write it

Each row is checked before it is timed; a contestant that fails says why. ``floor``: the compulsory
bytes at the bandwidth of a large copy, measured in the same run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import ikbo
from ikbo.testing.bench_cuda import (
    Contestant,
    Limits,
    checked,
    measured_limits,
    parser_of,
    sorted_index,
    timed,
    without_oversized,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.cost import Cost, cost_of
from ikbo.testing.lce_peers import LceCase, checked_rows, make_tensors, torch_peers

SOURCES = sorted(
    {
        *cuda_sources("expand", "bench/bench_generic.py", *TIMING),
        *cuda_sources(
            "lce",
            "python/ikbo/testing/lce_peers.py",
            kernels=["lce.cu", "lce_config.cpp", "lce_generic*"],
        ),
    }
)

EXPAND = [
    # B, ratio, elements of a row
    (b, ratio, row)
    for b, ratio in ((1024, 70), (4096, 64), (100000, 1000))
    for row in (1, 64, 433, 1024, 16384)
    if b * row < 2**30
]
LCE = [
    # sizes, K innermost
    (LceCase(1024, 70, N=250), False),
    (LceCase(1024, 70, N=255), False),
    (LceCase(1024, 70), True),
    (LceCase(4096, 64, 64, 12, 256, 256, "bfloat16"), False),
    (LceCase(64, 64, N=250), False),
    (LceCase(1024, 70, dtype="float32"), False),
]


def measured(
    case: dict[str, Any], contestants: dict[str, Contestant], cost: Cost, limits: Limits
) -> dict[str, Any]:
    times: dict[str, Any] = timed(contestants, rounds=30)
    ours = times.pop("ours")
    floor = limits.floor(cost, tensor_cores=False)
    return {"case": case, "unit": "ms", "ours": ours, "peers": times, "floor": floor}


def measure_expand(b: int, ratio: int, row: int, limits: Limits) -> dict[str, Any]:
    index = sorted_index(b, ratio)
    x_user = torch.randn(-(-b // ratio), row, device="cuda", dtype=torch.float16)
    contestants: dict[str, Contestant] = {
        "ours": lambda: ikbo.expand(x_user, index),
        "index_select": lambda: x_user.index_select(0, index),
    }
    contestants = checked(contestants, x_user[index].float(), tolerance=1e-30)
    case = {"op": "expand", "B": b, "ratio": ratio, "row": row, "dtype": "float16"}
    cost = cost_of("expand", {"U": x_user.size(0), "B": b, "K_user": row}, x_user.dtype)
    return measured(case, contestants, cost, limits)


def measure_lce(sizes: LceCase, k_inner: bool, limits: Limits) -> dict[str, Any]:
    t = make_tensors(sizes, k_inner=k_inner)
    contestants: dict[str, Contestant] = {
        "ours": lambda: ikbo.lce(t.e_user, t.e_cand, t.w_user, t.w_cand, None, t.index),
        **torch_peers(t),
    }
    rows = checked_rows(sizes)
    contestants = checked(
        without_oversized(contestants, sizes.needed_bytes()),
        t.reference(rows),
        lambda out: out[rows],
        tolerance=1e-5 if sizes.dtype == "float32" else 1e-2,
    )
    case = {"op": "lce", **vars(sizes), "k_inner": k_inner}
    return measured(case, contestants, sizes.cost, limits)


def main() -> None:
    args = parser_of(__doc__).parse_args()
    torch.manual_seed(0)
    limits = measured_limits()
    results = ResultFile("generic", SOURCES, args.output)
    for b, ratio, row in EXPAND:
        results.add(measure_expand(b, ratio, row, limits))
    for sizes, k_inner in LCE:
        torch.cuda.empty_cache()
        results.add(measure_lce(sizes, k_inner, limits))
    for row_of_file in results.rows.values():
        print(row_of_file)
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
