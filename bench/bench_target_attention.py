# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::target_attention`` on an H200 against what users run today and the public kernels.

TFLOP/s on useful FLOPs (4 x rows x keys that count x D), from medians with a cold L2. Peers:

broadcast_cudnn  keys and values gathered per candidate, then cuDNN, as users write it
packed_cudnn     cuDNN on one long query per user: only where each user has as many candidates as
                 the others, side by side, and a full history
packed_flash     FlashAttention-2 likewise
varlen_flash     PyTorch's varlen_attn over lengths of queries and histories: sorted candidates
triton, tlx      the public fused kernels (package ``fbgemm_ikbo`` where it is installed): a full
                 history; tlx takes sorted candidates in pairs; triton, which tunes itself over 320
                 configurations, is given the 18 of ``is_likely``, at Q=64, D=128, fp16
fa4, varlen_fa4  FlashAttention-4 (package ``flash_attn``), as packed_cudnn and as varlen_flash
copy             where each candidate has one query and few share a user: a copy that moves the
                 compulsory bytes, as TFLOP/s of the operator in the same time

In ``ragged`` cases candidates are shuffled, their counts follow Zipf's law, and lengths of
histories are log-normal with mean S, up to 4 S. ``ours_even`` of a row that is not sorted is ours
in the same run on the sorted case of the same sizes. ``ours_replayed`` is the call as a CUDA graph,
without the host's part. ``floor`` is the larger of the compulsory bytes' and the FLOPs' time, as
TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import ikbo
from ikbo.testing.bench_cuda import (
    Contestant,
    Limits,
    checked,
    chosen,
    measured_limits,
    parser_of,
    reason_of,
    replayed,
    sorted_index,
    timed,
    without_oversized,
)
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import TIMING, cuda_sources
from ikbo.testing.cost import cost_of

SOURCES = cuda_sources("target_attention", "bench/bench_target_attention.py", *TIMING)


@dataclass(frozen=True)
class Case:
    S: int
    B: int = 2048
    ratio: int = 64
    H: int = 2
    Q: int = 64
    D: int = 128
    dtype: str = "float16"
    order: str = "sorted"  # or shuffled, or ragged: see above

    @property
    def num_users(self) -> int:
        return -(-self.B // self.ratio)

    @property
    def is_even(self) -> bool:
        """Whether one long query per user says the same."""
        return self.order == "sorted" and self.B % self.ratio == 0


def cases() -> list[Case]:
    grid = [Case(s) for s in (512, 1024, 2048, 4096)]
    grid += [Case(s, order=o) for s in (512, 1024, 2048, 4096) for o in ("shuffled", "ragged")]
    grid += [Case(s, dtype="bfloat16") for s in (512, 2048)]
    grid += [Case(s, D=d) for d in (32, 64, 96, 192, 256) for s in (512, 2048)]
    grid += [
        Case(s, B, r, 2, q) for s in (256, 2048) for B, r, q in ((2048, 64, 8), (4096, 512, 1))
    ]
    grid += [Case(1024, 1024, 2), Case(1024, 2000, 2000, 4, 8), Case(64, 4096, 64, 2, 16)]
    grid += [Case(16384, b, b, 4, 1) for b in (1, 8, 64)]
    grid += [Case(2048, 64, 1, 8, 1), Case(2048, 512, 8, 4, 1), Case(1024, 2048, 16, 4, 1)]
    return grid


@dataclass(frozen=True)
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    lengths: Tensor | None


def make_tensors(case: Case) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    index = sorted_index(case.B, case.ratio)
    lengths = None
    num_keys = case.S
    if case.order == "ragged":
        index = zipf_index(case)
        spread = torch.randn(case.num_users, device="cuda", generator=generator) * 0.6
        lengths = (case.S * torch.exp(spread - 0.18)).round().clamp(1, 4 * case.S).int()
        num_keys = int(lengths.max())
    if case.order != "sorted":
        index = index[torch.randperm(case.B, device="cuda", generator=generator)]
    history = (case.num_users, num_keys, case.H, case.D)
    return Tensors(
        randn(case.B, case.Q, case.H, case.D), randn(*history), randn(*history), index, lengths
    )


def zipf_index(case: Case) -> Tensor:
    """The candidates of user u are as many as 1 / (u + 1) is of the sum, one at least."""
    shares = 1 / torch.arange(1, case.num_users + 1, dtype=torch.float64)
    counts = (shares * (case.B - case.num_users) / shares.sum()).floor().long() + 1
    counts[0] += case.B - counts.sum()
    return torch.arange(case.num_users).repeat_interleave(counts).int().cuda()


def useful_flops(case: Case, t: Tensors) -> float:
    keys = t.lengths[t.index.long()].sum().item() if t.lengths is not None else case.B * case.S
    return 4.0 * keys * case.Q * case.H * case.D


def with_backend(backend: SDPBackend, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def torch_peers(case: Case, t: Tensors) -> dict[str, Contestant]:
    """PyTorch's own forms, each to a result [B, Q, H, D] or a view of one."""

    def broadcast() -> Tensor:
        k, v = (x.index_select(0, t.index).transpose(1, 2) for x in (t.k, t.v))
        mask = None
        if t.lengths is not None:
            positions = torch.arange(t.k.size(1), device=t.k.device)
            counts = positions < t.lengths[t.index.long(), None]
            mask = counts[:, None, None]
        return sdpa(t.q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)

    peers: dict[str, Contestant] = {
        "broadcast_cudnn": with_backend(SDPBackend.CUDNN_ATTENTION, broadcast)
    }
    if not case.is_even:
        return peers
    long_q = t.q.view(case.num_users, case.ratio * case.Q, case.H, case.D).transpose(1, 2)
    k, v = t.k.transpose(1, 2), t.v.transpose(1, 2)

    def packed() -> Tensor:
        return sdpa(long_q, k, v).transpose(1, 2).reshape(t.q.shape)

    peers["packed_cudnn"] = with_backend(SDPBackend.CUDNN_ATTENTION, packed)
    peers["packed_flash"] = with_backend(SDPBackend.FLASH_ATTENTION, packed)
    peers["varlen_flash"] = varlen(case, t)
    return peers


def varlen(case: Case, t: Tensors) -> Contestant:
    try:
        attention = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError as problem:
        return reason_of(problem)
    rows = case.ratio * case.Q
    offsets = torch.arange(case.num_users + 1, device=t.q.device, dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (t.q, t.k, t.v))

    def run() -> Tensor:
        out: Tensor = attention(q, k, v, offsets * rows, offsets * case.S, rows, case.S)
        return out.view(t.q.shape)

    return run


def flash_4(case: Case, t: Tensors, name: str) -> Callable[[], Tensor]:
    cute = importlib.import_module("flash_attn.cute")
    rows = case.ratio * case.Q
    if name == "fa4":
        long_q = t.q.view(case.num_users, rows, case.H, case.D)
        call = functools.partial(cute.flash_attn_func, long_q, t.k, t.v)
    else:
        offsets = torch.arange(case.num_users + 1, device=t.q.device, dtype=torch.int32)
        call = functools.partial(
            cute.flash_attn_varlen_func,
            *(x.flatten(0, 1) for x in (t.q, t.k, t.v)),
            cu_seqlens_q=offsets * rows,
            cu_seqlens_k=offsets * case.S,
            max_seqlen_q=rows,
            max_seqlen_k=case.S,
        )

    def run() -> Tensor:
        result = call()
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out.reshape(t.q.shape)

    return run


def is_likely(config: Any) -> bool:
    """Of the public Triton kernel: tiles of all rows of a candidate, and no extreme."""
    return (
        config.kwargs["BLOCK_M"] == 64
        and config.kwargs["BLOCK_N"] > 16
        and config.num_warps <= 8
        and 2 <= config.num_stages <= 4
    )


def fused(case: Case, t: Tensors, name: str) -> Contestant:
    arguments = [*(x.flatten(0, 1) for x in (t.q, t.k, t.v)), t.index, case.Q, case.S]
    if name == "triton":
        if (case.Q, case.D, case.dtype) != (64, 128, "float16"):
            return "tuned at Q=64, D=128, fp16 only"
        module = importlib.import_module("fbgemm_ikbo.ops.triton_ikbo_fa")
        tuner = module._attn_fwd_tma
        tuner.configs = list(filter(is_likely, tuner.configs))
        kernel = module.triton_flash_attn_ikbo_tma
    else:
        module = importlib.import_module("fbgemm_ikbo.ops.tlx_ikbo_fa_ws")
        kernel = module.tlx_flash_attn_ikbo_tma_persistent
        arguments.append(torch.arange(0, case.B, 2, device=t.q.device, dtype=torch.int32))

    def run() -> Tensor:
        out: Tensor = kernel(*arguments)
        return out.view(t.q.shape)

    return run


def public_kernels(case: Case, t: Tensors, wanted: list[str]) -> dict[str, Contestant]:
    """The public kernels where they can run."""
    calls: dict[str, Contestant] = {}
    for name in wanted:
        if t.lengths is not None or (name != "triton" and not case.is_even):
            takes = "" if name == "triton" else "even, sorted candidates and "
            calls[name] = f"takes {takes}full histories only"
            continue
        try:
            calls[name] = flash_4(case, t, name) if "fa4" in name else fused(case, t, name)
        except Exception as problem:  # of import, or of a kernel that refuses these tensors
            calls[name] = reason_of(problem)
    return calls


def reference(t: Tensors, rows: slice) -> Tensor:
    """In fp32, of some candidates."""
    few = dataclasses.replace(t, q=t.q[rows], index=t.index[rows])
    users = few.index.long()
    scores = torch.einsum("bqhd,bshd->bhqs", few.q.float(), t.k[users].float())
    scores /= t.q.size(-1) ** 0.5
    if t.lengths is not None:
        counts = torch.arange(t.k.size(1), device=t.k.device) < t.lengths[users, None]
        scores = scores.masked_fill(~counts[:, None, None], -torch.inf)
    return torch.einsum("bhqs,bshd->bqhd", scores.softmax(-1), t.v[users].float())


def ours_of(t: Tensors) -> Callable[[], Tensor]:
    return lambda: ikbo.target_attention(t.q, t.k, t.v, t.index, t.lengths)[0]


def contestants_of(case: Case, t: Tensors, public: list[str]) -> dict[str, Contestant]:
    return {
        "ours": ours_of(t),
        **torch_peers(case, t),
        **public_kernels(case, t, public),
    }


def measure(case: Case, public: list[str], limits: Limits) -> dict[str, Any]:
    t = make_tensors(case)
    rows = slice(0, min(case.B, 8))
    gathered = 2 * case.B * t.k[0].numel() * t.q.element_size()
    contestants = checked(
        without_oversized(contestants_of(case, t, public), {"broadcast_cudnn": gathered}),
        reference(t, rows),
        lambda out: out[rows],
    )
    ours_replayed = replayed({"ours": contestants["ours"]})["ours"]
    sizes = {**dataclasses.asdict(case), "U": case.num_users, "H_kv": case.H}
    cost = cost_of("target_attention", sizes, t.q.dtype)
    if case.Q == 1 and case.ratio <= 64:
        moved = torch.zeros(cost.unique_bytes // 2, dtype=torch.int8, device="cuda")
        target = torch.empty_like(moved)
        contestants["copy"] = lambda: target.copy_(moved)
    contestants["ours_replayed"] = ours_replayed
    flops = useful_flops(case, t)
    even = dataclasses.replace(case, order="sorted")
    even_t = make_tensors(even)
    if case != even:
        contestants["ours_even"] = ours_of(even_t)
    times = timed(contestants)
    rates: dict[str, Any] = {
        name: time if isinstance(time, str) else flops / time * 1e-9 for name, time in times.items()
    }
    if "ours_even" in rates:
        rates["ours_even"] *= useful_flops(even, even_t) / flops
    floor = limits.floor(dataclasses.replace(cost, flops=int(flops)))
    return {
        "case": case_of_row(case),
        "unit": "TFLOP/s",
        "ours": rates.pop("ours"),
        **{name: rates.pop(name) for name in ("ours_replayed", "ours_even") if name in rates},
        "peers": rates,
        "floor": flops / floor * 1e-9,
    }


def case_of_row(case: Case) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "op": "target_attention"}


def main() -> None:
    parser = parser_of(__doc__, len(cases()))
    parser.add_argument(
        "--public", default="", help="public kernels to run, of triton, tlx, fa4, varlen_fa4"
    )
    args = parser.parse_args()
    public = [name for name in args.public.split(",") if name]
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    results = ResultFile("target_attention", SOURCES, args.output, keep=args.keep)
    begin = time.perf_counter()
    for number, case in chosen(args, cases()):
        torch.cuda.empty_cache()
        row = measure(case, public, limits)
        results.add(row, map(case_of_row, cases()))
        spent = time.perf_counter() - begin
        print(f"{number + 1} {spent:.0f} s {case} ours {row['ours']} {row['peers']}", flush=True)
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
