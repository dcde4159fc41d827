# SPDX-License-Identifier: Apache-2.0
"""Times ``ikbo::self_target_attention`` on an H200 against the same in two calls.

TFLOP/s on useful FLOPs (4 x rows x keys that count x D of both parts), from medians with a cold L2.
Peers, each of which computes the histories' own part and then the candidates':

two_calls        ``ikbo.target_attention`` twice. The histories' rows are one candidate a user, of S
                 queries; causal ones are candidates of one query each with ``cand_lengths``
broadcast_cudnn  cuDNN for both, keys and values gathered per candidate, as users write it
packed_cudnn     cuDNN for both, the candidates as one long query per user: only with as many
                 candidates for each user, side by side, and full histories
packed_flash     FlashAttention-2 likewise

In ``ragged`` cases candidates are shuffled and lengths of histories are spread evenly over 1 to S.
``ours_replayed`` is the call as a CUDA graph. All run in inference mode. ``floor`` is the larger of
the compulsory bytes' and the FLOPs' time, as TFLOP/s.
"""

from __future__ import annotations

import dataclasses
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
from ikbo.testing.cost import cost_of

SOURCES = cuda_sources(
    "target_attention",
    "bench/bench_self_target_attention.py",
    "python/ikbo/_self_target_attention.py",
    "src/torch_ops/self_attention_cuda.cpp",
    *TIMING,
)

# (out_user, out_cand)
Pair = tuple[Tensor, Tensor]
Contestant = Callable[[], Pair]


@dataclass(frozen=True)
class Case:
    S: int
    is_causal: bool = False
    B: int = 2048
    ratio: int = 64
    H: int = 2
    Q: int = 64
    D: int = 128
    dtype: str = "float16"
    order: str = "sorted"  # or ragged: see above

    @property
    def num_users(self) -> int:
        return -(-self.B // self.ratio)

    @property
    def is_even(self) -> bool:
        """Whether one long query per user says the same."""
        return self.order == "sorted" and self.B % self.ratio == 0


def cases() -> list[Case]:
    lengths = (512, 1024, 2048, 4096)
    grid = [Case(s, causal) for causal in (False, True) for s in lengths]
    grid += [Case(s, causal, order="ragged") for causal in (False, True) for s in (512, 2048)]
    grid += [Case(1024, True, D=d) for d in (32, 64, 256)]
    grid += [Case(s, True, 4096, 512, 2, 1) for s in (256, 2048)]
    grid += [Case(1024, True, 2000, 2000, 4, 8), Case(1024, True, dtype="bfloat16")]
    return grid


@dataclass(frozen=True)
class Tensors:
    q_user: Tensor
    q_cand: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    lengths: Tensor | None

    @property
    def length_of_each(self) -> Tensor:
        if self.lengths is not None:
            return self.lengths
        return self.index.new_full(self.k.shape[:1], self.k.size(1))


def make_tensors(case: Case) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    index = sorted_index(case.B, case.ratio)
    lengths = None
    if case.order == "ragged":
        index = index[torch.randperm(case.B, device="cuda", generator=generator)]
        steps = torch.arange(1, case.num_users + 1, device="cuda")
        lengths = (steps * case.S // case.num_users).clamp(1).int()
    history = (case.num_users, case.S, case.H, case.D)
    cand = randn(case.B, case.Q, case.H, case.D)
    return Tensors(randn(*history), cand, randn(*history), randn(*history), index, lengths)


def useful_flops(case: Case, t: Tensors) -> float:
    lengths = t.length_of_each.double()
    own = lengths * (lengths + 1) / 2 if case.is_causal else lengths * lengths
    pairs = own.sum().item() + lengths[t.index.long()].sum().item() * case.Q
    return 4.0 * pairs * case.H * case.D


def two_calls(case: Case, t: Tensors) -> Contestant:
    users = torch.arange(case.num_users, device="cuda", dtype=torch.int32)
    q, seen = t.q_user, t.lengths
    if case.is_causal:
        q = q.reshape(-1, 1, case.H, case.D)
        row = torch.arange(1, case.S + 1, device="cuda", dtype=torch.int32)
        counts = row <= t.length_of_each[:, None]
        seen = torch.where(counts, row, 0).flatten()
        users = users.repeat_interleave(case.S)

    def run() -> Pair:
        own, _ = ikbo.target_attention(q, t.k, t.v, users, t.lengths, seen)
        cand, _ = ikbo.target_attention(t.q_cand, t.k, t.v, t.index, t.lengths)
        return own.view(t.q_user.shape), cand

    return run


def with_backend(backend: SDPBackend, call: Contestant) -> Contestant:
    def run() -> Pair:
        with sdpa_kernel(backend):
            return call()

    return run


def torch_peers(case: Case, t: Tensors) -> dict[str, Contestant]:
    """PyTorch's own forms; a mask is built beforehand, rows past a user's length are any."""
    q, k, v = (x.transpose(1, 2) for x in (t.q_user, t.k, t.v))
    users = t.index.long()
    counts = None
    if t.lengths is not None:
        counts = (torch.arange(case.S, device="cuda") < t.lengths[:, None])[:, None, None]
    own_mask = counts
    if counts is not None and case.is_causal:
        own_mask = counts & torch.ones(case.S, case.S, device="cuda", dtype=torch.bool).tril()

    def own() -> Tensor:
        is_causal = case.is_causal and own_mask is None
        return sdpa(q, k, v, attn_mask=own_mask, is_causal=is_causal).transpose(1, 2)

    def broadcast() -> Pair:
        keys, values = (x.index_select(0, t.index).transpose(1, 2) for x in (t.k, t.v))
        mask = None if counts is None else counts[users]
        return own(), sdpa(t.q_cand.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)

    peers = {"broadcast_cudnn": with_backend(SDPBackend.CUDNN_ATTENTION, broadcast)}
    if not case.is_even:
        return peers
    long_q = t.q_cand.view(case.num_users, case.ratio * case.Q, case.H, case.D).transpose(1, 2)

    def packed() -> Pair:
        return own(), sdpa(long_q, k, v).transpose(1, 2).reshape(t.q_cand.shape)

    peers["packed_cudnn"] = with_backend(SDPBackend.CUDNN_ATTENTION, packed)
    peers["packed_flash"] = with_backend(SDPBackend.FLASH_ATTENTION, packed)
    return peers


def some_rows(case: Case, t: Tensors, pair: Pair) -> Tensor:
    """The first user's own rows, and those of a few candidates, flat."""
    own, cand = pair
    few = cand[: min(case.B, 8)]
    return torch.cat((own[0, : int(t.length_of_each[0])].flatten(), few.flatten()))


def reference(case: Case, t: Tensors) -> Tensor:
    """What ``some_rows`` picks, in fp32."""

    def attention(q: Tensor, users: Tensor, *, is_causal: bool) -> Tensor:
        scores = torch.einsum("bqhd,bshd->bhqs", q.float(), t.k[users].float())
        scores /= case.D**0.5
        keys = torch.arange(case.S, device="cuda")
        hidden = keys >= t.length_of_each[users][:, None, None, None]
        if is_causal:
            hidden = hidden | (keys > keys[:, None])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhqs,bshd->bqhd", weights, t.v[users].float())

    first = torch.zeros(1, dtype=torch.long, device="cuda")
    own = attention(t.q_user[:1], first, is_causal=case.is_causal)
    few = slice(0, min(case.B, 8))
    return some_rows(case, t, (own, attention(t.q_cand[few], t.index[few].long(), is_causal=False)))


def measure(case: Case, limits: Limits) -> dict[str, Any]:
    t = make_tensors(case)

    def ours() -> Pair:
        return ikbo.self_target_attention(
            t.q_user, t.q_cand, t.k, t.v, t.index, t.lengths, is_causal=case.is_causal
        )[:2]

    contestants: dict[str, Any] = {
        "ours": ours,
        "two_calls": two_calls(case, t),
        **torch_peers(case, t),
    }
    gathered = 2 * case.B * t.k[0].numel() * t.k.element_size()
    contestants = checked(
        without_oversized(contestants, {"broadcast_cudnn": gathered}),
        reference(case, t),
        lambda pair: some_rows(case, t, pair),
    )
    ours_replayed = replayed({"ours": contestants["ours"]})["ours"]
    flops = useful_flops(case, t)
    rates: dict[str, Any] = {
        name: time if isinstance(time, str) else flops / time * 1e-9
        for name, time in timed(contestants | {"ours_replayed": ours_replayed}).items()
    }
    sizes = {**dataclasses.asdict(case), "U": case.num_users, "H_kv": case.H}
    cost = cost_of("self_target_attention", sizes, t.k.dtype)
    floor = limits.floor(dataclasses.replace(cost, flops=int(flops)))
    return {
        "case": case_of_row(case),
        "unit": "TFLOP/s",
        "ours": rates.pop("ours"),
        "ours_replayed": rates.pop("ours_replayed"),
        "peers": rates,
        "floor": flops / floor * 1e-9,
    }


def case_of_row(case: Case) -> dict[str, Any]:
    return {**dataclasses.asdict(case), "op": "self_target_attention"}


def main() -> None:
    args = parser_of(__doc__, len(cases())).parse_args()
    limits = measured_limits()
    print(json.dumps(dataclasses.asdict(limits)), flush=True)
    results = ResultFile("self_target_attention", SOURCES, args.output, keep=args.keep)
    begin = time.perf_counter()
    for number, case in chosen(args, cases()):
        torch.cuda.empty_cache()
        row = measure(case, limits)
        results.add(row, map(case_of_row, cases()))
        spent = time.perf_counter() - begin
        print(f"{number + 1} {spent:.0f} s {case} ours {row['ours']} {row['peers']}", flush=True)
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
