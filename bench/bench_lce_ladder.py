# SPDX-License-Identifier: Apache-2.0
"""Times the forms of ``ikbo::lce`` at one shape on an H200, from what users run to the kernel.

B=1024, 70 candidates a user, M=433, N=256, K_user=1178, K_cand=866, fp16:

baseline          gather, concat, one GEMM
decomposed        two GEMMs, gather, add
aligned           the same on K padded to a multiple of 8
fused_raw, fused  the public Triton kernel: on K as it is, and on padded K
warp_specialised  the public TLX kernel, on padded K
ours              packs both weights at each call
ours_prepacked    packs the user's alone

The file has two rows. In ``charged`` each contestant starts from the same raw tensors and pays at
each call for what it needs of them and for a contiguous result: the gather and the concat, the
padding of K of both E (weights are padded once, outside), tlx's flags set to zero and its strided
view made contiguous. In ``kernels only`` those steps happened before: the GEMM of the concatenated
rows, K padded, old flags, the view. All calls of both rows are interleaved, each with a cold L2.

Floors: ``hbm`` is the bytes that must be moved (each input, weight and output once) at
the bandwidth of a copy of 2 GiB. ``tensor`` is the FLOPs that the sums need (no padding) at the
rate of a fp16 GEMM of 8192^3 that has run for half a second: the tensor pipe under the power cap.
Both rates are measured in this run. A kernel that is timed after pauses runs at a higher clock than
the cap's and may come closer to that floor than the GEMM itself.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

import ikbo
from ikbo.testing.bench_cuda import (
    Call,
    Contestant,
    checked,
    measured_limits,
    padded,
    parser_of,
    reason_of,
    timed,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.lce_peers import (
    LceCase,
    LceTensors,
    add_warm_options,
    checked_rows,
    decomposed,
    make_tensors,
    public_module,
    torch_peers,
    warm_task,
    warmed,
)

SOURCES = cuda_sources(
    "lce",
    "src/torch_ops/prepack.cpp",
    "bench/bench_lce_ladder.py",
    "python/ikbo/testing/lce_peers.py",
    *TIMING,
)
CASE = LceCase(1024, 70)
CHARGED, KERNELS_ONLY = "charged", "kernels only"
ONLY = "/"  # after a contestant's name: its kernels only


def with_padded_e(t: LceTensors, p: LceTensors) -> LceTensors:
    """Raw E padded now, padded weights."""
    return dataclasses.replace(p, e_user=padded(t.e_user, 1), e_cand=padded(t.e_cand, 1))


def torch_calls(t: LceTensors, p: LceTensors) -> dict[str, Contestant]:
    w_both = torch.cat((t.w_user, t.w_cand), 1)
    e_both = torch.cat((t.e_user.index_select(0, t.index), t.e_cand), 1)
    return {
        **torch_peers(t),
        "baseline" + ONLY: lambda: w_both @ e_both,
        "aligned": lambda: decomposed(with_padded_e(t, p)),
        "aligned" + ONLY: lambda: decomposed(p),
    }


def triton_calls(t: LceTensors, p: LceTensors) -> dict[str, Call]:
    kernel = public_module("triton").triton_ikbo_lce

    def run(x: LceTensors) -> torch.Tensor:
        out: torch.Tensor = kernel(x.w_cand, x.w_user, x.e_cand, x.e_user, x.index)
        return out

    return {
        "fused_raw": lambda: run(t),
        "fused": lambda: run(with_padded_e(t, p)),
        "fused" + ONLY: lambda: run(p),
    }


def tlx_calls(t: LceTensors, p: LceTensors) -> dict[str, Call]:
    module = public_module("tlx")
    flag = module.create_user_flag(p.w_user, p.e_user)

    def run(x: LceTensors) -> torch.Tensor:
        out: torch.Tensor = module.tlx_ikbo_lce(
            x.w_cand, x.w_user, x.e_cand, x.e_user, x.index, flag
        )
        return out

    def charged() -> torch.Tensor:
        flag.zero_()
        return run(with_padded_e(t, p)).contiguous()

    name = "warp_specialised"
    return {name: charged, name + ONLY: lambda: run(p)}


def contestants(t: LceTensors) -> dict[str, Contestant]:
    """Of both rows; those that have nothing to charge are there once."""
    p = t.padded()
    packed = ikbo.prepack(t.w_cand, [CASE.K_cand])
    calls = torch_calls(t, p)
    for names, public in (
        (("fused_raw", "fused"), triton_calls),
        (("warp_specialised",), tlx_calls),
    ):
        try:
            calls.update(public(t, p))
        except Exception as problem:  # of import
            calls.update(dict.fromkeys(names, reason_of(problem)))
    calls["ours"] = lambda: ikbo.lce(t.e_user, t.e_cand, t.w_user, t.w_cand, None, t.index)
    calls["ours_prepacked"] = lambda: ikbo.lce(t.e_user, t.e_cand, t.w_user, packed, None, t.index)
    return calls


def row_of(charges: str, times: Mapping[str, Any], floors: dict[str, float]) -> dict[str, Any]:
    names = [name for name in times if not name.endswith(ONLY)]
    if charges == KERNELS_ONLY:
        times = {name: times.get(name + ONLY, times[name]) for name in names}
    own = ("ours", "ours_prepacked")
    return {
        "case": {**dataclasses.asdict(CASE), "op": "lce", "order": "sorted", "charges": charges},
        "unit": "ms",
        **{name: times[name] for name in own},
        "peers": {name: times[name] for name in names if name not in own},
        "floor": max(floors.values()),
        "floors": floors,
        "per_cent_of_floor": {
            name: {kind: 100 * floor / times[name] for kind, floor in floors.items()}
            for name in names
            if not isinstance(times[name], str)
        },
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/kernels/lce.md."""
    head = "| form | " + " | ".join(
        f"{row['case']['charges']}, ms | % of HBM | % of tensor pipe" for row in rows
    )
    lines = [head + " |", "|---" * (1 + 3 * len(rows)) + "|"]
    times = [
        {**row["peers"], "ours": row["ours"], "ours_prepacked": row["ours_prepacked"]}
        for row in rows
    ]
    for name in times[0]:
        cells = [f"**{name}**" if name.startswith("ours") else name]
        for row, column in zip(rows, times, strict=True):
            if isinstance(column[name], str):
                cells += [column[name], "", ""]
                continue
            shares = row["per_cent_of_floor"][name]
            cells += [f"{column[name]:.4g}", f"{shares['hbm']:.0f}", f"{shares['tensor']:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    floors = rows[0]["floors"]
    lines.append(f"\nFloors: HBM {floors['hbm']:.4g} ms, tensor pipe {floors['tensor']:.4g} ms.")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    add_warm_options(parser)
    args = parser.parse_args()
    tasks = [warm_task("tlx", CASE), warm_task("triton", CASE)]
    tasks.append(warm_task("triton", CASE, pads=False))
    if warmed(args, tasks):
        return
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    floors = {
        "hbm": CASE.cost.unique_bytes / limits.bytes_per_ms,
        "tensor": CASE.cost.flops / limits.sustained_flops_per_ms,
    }
    torch.cuda.empty_cache()
    tensors = make_tensors(CASE)
    sample = checked_rows(CASE)
    calls = checked(contestants(tensors), tensors.reference(sample), lambda out: out[sample])
    times = timed(calls, seconds=10.0)
    rows = [row_of(charges, times, floors) for charges in (CHARGED, KERNELS_ONLY)]
    results = ResultFile("lce-ladder", SOURCES, args.output)
    for row in rows:
        results.add(row)
    print(markdown(rows), flush=True)
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
