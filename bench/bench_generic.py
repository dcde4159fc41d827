# SPDX-License-Identifier: Apache-2.0
"""Times the CUDA kernels that run on any architecture: ``expand``, and ``lce`` and
``target_attention`` where Hopper's kernels do not reach (N or D not a multiple of 8, E with K
innermost, a mask, fp32).

Peers, all in PyTorch:

index_select  of expand
decomposed    of lce: two GEMMs, gather, add
baseline      of lce: gather, concat, one GEMM, as users write it
broadcast     of target_attention: keys and values gathered per candidate, then PyTorch's sdpa
composed      of target_attention: the same in blocks of U candidates, of matmuls and softmax in
              fp32, as the operator is composed where it has no kernel

Each row is checked before it is timed; a contestant that fails says why. ``floor``: the compulsory
bytes at the bandwidth of a large copy, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

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
        *cuda_sources(
            "target_attention",
            kernels=[
                "target_attention.cu",
                "target_attention_cuda_config.cpp",
                "target_attention_generic*",
                "instances/target_attention_generic*",
            ],
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


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    S: int
    B: int = 2048
    ratio: int = 64
    H: int = 2
    Q: int = 64
    D: int = 128
    dtype: str = "float16"
    masked: bool = False  # a quarter of the keys


ATTENTION = [
    AttentionCase(512, masked=True),
    AttentionCase(2048, masked=True),
    AttentionCase(512, D=100),
    AttentionCase(512, D=65),
    AttentionCase(512, D=250, dtype="bfloat16"),
    AttentionCase(512, dtype="float32"),
    AttentionCase(512, D=64, dtype="float32"),
    AttentionCase(256, 4096, 512, Q=1, D=64, dtype="float32"),
    AttentionCase(256, 4096, 512, Q=1, masked=True),
    AttentionCase(16384, 64, 64, 4, 1, dtype="float32"),
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


@dataclasses.dataclass(frozen=True)
class AttentionTensors:
    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    mask: Tensor | None

    def ours(self) -> Tensor:
        return ikbo.target_attention(self.q, self.k, self.v, self.index, user_mask=self.mask)[0]

    def gathered(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [.., H, S, D] of some candidates, and which keys count for them."""
        index = self.index[rows]
        k, v = (x.index_select(0, index).transpose(1, 2) for x in (self.k, self.v))
        return k, v, None if self.mask is None else self.mask.index_select(0, index)[:, None, None]

    def broadcast(self) -> Tensor:
        k, v, mask = self.gathered(slice(None))
        return sdpa(self.q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)

    def composed_rows(self, rows: slice) -> Tensor:
        k, v, mask = self.gathered(rows)
        q = self.q[rows].transpose(1, 2).float() * self.q.size(-1) ** -0.5
        scores = q @ k.float().transpose(2, 3)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v.float()).transpose(1, 2)

    def composed(self) -> Tensor:
        out = torch.empty_like(self.q)
        block = max(self.k.size(0), -(-self.q.size(0) // 64))
        for first in range(0, self.q.size(0), block):
            rows = slice(first, first + block)
            out[rows] = self.composed_rows(rows)
        return out


def measure_attention(sizes: AttentionCase, limits: Limits) -> dict[str, Any]:
    dtype = getattr(torch, sizes.dtype)
    num_users = -(-sizes.B // sizes.ratio)
    history = (num_users, sizes.S, sizes.H, sizes.D)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=dtype)
        for shape in ((sizes.B, sizes.Q, sizes.H, sizes.D), history, history)
    )
    mask = torch.rand(history[:2], device="cuda") > 0.25 if sizes.masked else None
    t = AttentionTensors(q, k, v, sorted_index(sizes.B, sizes.ratio), mask)
    contestants: dict[str, Contestant] = {
        "ours": t.ours,
        "broadcast": t.broadcast,
        "composed": t.composed,
    }
    gathered = 2 * sizes.B * k[0].numel() * k.element_size()
    rows = slice(0, 8)
    contestants = checked(
        without_oversized(contestants, {"broadcast": gathered}),
        t.composed_rows(rows),
        lambda out: out[rows],
        tolerance=1e-5 if dtype == torch.float32 else 1e-2,
    )
    case = {"op": "target_attention", **dataclasses.asdict(sizes)}
    letters = {**dataclasses.asdict(sizes), "U": num_users, "H_kv": sizes.H}
    return measured(case, contestants, cost_of("target_attention", letters, dtype), limits)


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
    for attention in ATTENTION:
        torch.cuda.empty_cache()
        results.add(measure_attention(attention, limits))
    for row_of_file in results.rows.values():
        print(row_of_file)
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
