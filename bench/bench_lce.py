# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::lce`` on an H200 against what users run today and the public kernels.

Every contestant takes the same raw tensors (K as it is, no padding) and is charged what it needs to
run on them. Peers:

baseline          gather, concat, one GEMM, as users write it
decomposed        two GEMMs, gather, add
padded            the same with K padded to a multiple of 8 by the caller, padding not charged
cand_gemm_padded  its candidate GEMM alone: less work than the operator
triton, tlx       the public fused kernels (package ``fbgemm_ikbo`` where it is installed), K padded
                  by the caller, padding not charged; tlx with its flags reset each call, in the
                  first cases only: it compiles a minute per shape

``ours`` packs both weights at each call, ``ours_prepacked`` the user's alone.

These are plain calls: launches by the host count, which is late where the GPU has little to do.
``replayed`` holds the times of all contestants as replayed CUDA graphs: the GPU's part alone.

Each row is checked against an fp32 reference before it is timed: its first and last 32 candidates.
A contestant that cannot run says why. ``floor`` is the larger of the compulsory bytes at the
measured copy bandwidth and the FLOPs at the rate of a large GEMM, both measured in the same run.
The result file is rewritten after each case.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch

import ikbo
from ikbo.testing.bench_cuda import (
    Contestant,
    Limits,
    checked,
    chosen,
    measured_limits,
    parser_of,
    replayed,
    timed,
    without_oversized,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.lce_peers import (
    PUBLIC,
    LceCase,
    WarmTask,
    add_warm_options,
    checked_rows,
    make_tensors,
    padded_peers,
    public_kernels,
    torch_peers,
    warm_task,
    warmed,
)

SOURCES = cuda_sources(
    "lce",
    "src/torch_ops/prepack.cpp",
    "bench/bench_lce.py",
    "python/ikbo/testing/lce_peers.py",
    *TIMING,
)


def cases() -> list[LceCase]:
    """The cells of tlx first (see --tlx-cases), the most telling one at their head."""
    grid = [LceCase(b, 70) for b in (1024, 512, 2048, 3072)]
    grid += [LceCase(1024, ratio) for ratio in (2, 10, 1000, 1)]
    grid += [LceCase(2048, 64, 128, 128, 512, 512), LceCase(4096, 64, 64, 64, 256, 256)]
    grid += [LceCase(1024, 70, 256, 256, 1024, 512), LceCase(512, 70, 1024, 128, 2048, 1024)]
    grid += [LceCase(1024, 70, dtype="bfloat16")]
    grid += [LceCase(b, ratio) for b in (512, 1024, 2048, 3072) for ratio in (1, 2, 10, 70, 1000)]
    grid += [LceCase(b, b) for b in (1, 8, 32)] + [LceCase(b, 1) for b in (8, 32)]
    for m, n in (
        *((16, 64), (16, 512), (32, 128), (64, 32), (64, 64), (64, 256), (128, 128)),
        *((128, 512), (200, 96), (256, 64), (256, 256), (512, 128), (1000, 32), (1024, 256)),
    ):
        grid += [LceCase(1024, 64, m, n, *k) for k in ((64, 64), (500, 300), (1000, 866))]
    grid += [LceCase(256, 64, 433, 512, 4096, 4096), LceCase(512, 32, 1024, 64, 2048, 4096)]
    grid += [LceCase(512, 50, 96, 384, 777, 1333), LceCase(8192, 500, 16, 32, 130, 66)]
    # E and the output with more than 2^31 elements, in which the gathered rows of the baseline do
    # not fit; E alone.
    grid += [LceCase(100_000, 10_000, 128, 256, 2048, 100), LceCase(10_000, 10_000)]
    return list(dict.fromkeys(grid))


def measure(case: LceCase, peers: list[str], limits: Limits) -> dict[str, Any]:
    t = make_tensors(case)
    p = t.padded()
    packed = ikbo.prepack(t.w_cand, [case.K_cand])
    contestants: dict[str, Contestant] = {
        "ours": lambda: ikbo.lce(t.e_user, t.e_cand, t.w_user, t.w_cand, None, t.index),
        "ours_prepacked": lambda: ikbo.lce(t.e_user, t.e_cand, t.w_user, packed, None, t.index),
        **torch_peers(t),
        **padded_peers(p),
        **public_kernels(p, peers),
    }
    rows = checked_rows(case)
    contestants = checked(
        without_oversized(contestants, case.needed_bytes()),
        t.reference(rows),
        lambda out: out[rows],
        unchecked=["cand_gemm_padded"],
    )
    times: dict[str, Any] = timed(contestants)
    replays = timed(replayed(contestants))
    return {
        "case": case_of_row(case),
        "unit": "ms",
        "ours": times.pop("ours"),
        "ours_prepacked": times.pop("ours_prepacked"),
        "peers": times,
        "floor": limits.floor(case.cost),
        "replayed": replays,
    }


def case_of_row(case: LceCase) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "op": "lce", "order": "sorted"}


def warm_tasks(selected: list[tuple[LceCase, list[str]]]) -> list[WarmTask]:
    """Each once; those of tlx, which take longest, first."""
    tasks = [warm_task(peer, case) for case, peers in selected for peer in peers]
    return sorted(dict.fromkeys(tasks), key=lambda task: task.name != "tlx")


def options() -> argparse.Namespace:
    parser = parser_of(__doc__, len(cases()))
    parser.add_argument("--peers", default=",".join(PUBLIC), help="public kernels to run")
    parser.add_argument("--tlx-cases", type=int, default=12, help="first cases that tlx runs in")
    add_warm_options(parser)
    args = parser.parse_args()
    args.peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := set(args.peers) - set(PUBLIC):
        parser.error(f"--peers takes {', '.join(PUBLIC)}; got {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = options()
    selected = [
        (case, [peer for peer in args.peers if peer != "tlx" or number < args.tlx_cases])
        for number, case in chosen(args, cases())
    ]
    if warmed(args, warm_tasks(selected)):
        return
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    results = ResultFile("lce", SOURCES, args.output, keep=args.keep)
    begin = time.perf_counter()
    for number, (case, peers) in enumerate(selected):
        torch.cuda.empty_cache()
        row = measure(case, peers, limits)
        results.add(row, map(case_of_row, cases()))
        print(
            f"{number + 1}/{len(selected)} {time.perf_counter() - begin:.0f} s {case} "
            f"ours {row['ours']} prepacked {row['ours_prepacked']} floor {row['floor']:.4g} "
            f"{row['peers']} replayed {row['replayed']}",
            flush=True,
        )
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
