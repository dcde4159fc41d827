# SPDX-License-Identifier: Apache-2.0
"""Times every operator on the CPU against its peers; writes bench/results/ops-cpu.json.

usage: bench/bench_ops_cpu.py [--threads N]

Each row is checked against the reference first, then timed: all contestants of a row take turns in
one process, figures are medians. Peers by operator:
- linear, lce: `two_gemms`, the two plain products alone (nothing gathered, nothing added); rows
  with `inside: package` run in an AOTInductor package, beside `two_gemms_aoti`, a package of
  product, `index_select` and add as PyTorch operators; 16-bit rows have `fp32`, ours in fp32.
- target_attention: `packed_sdpa`, PyTorch's attention over one long query per user, which needs
  sorted candidates in equal numbers; `gather_sdpa`, keys and values replicated first; shuffled rows
  have `sorted`, ours; ragged ones `share`, ours over whole histories times the kept share of keys;
  rows with one candidate per user `plain_sdpa`, which gathers nothing.
- expand: `index_select`. bmm: `gather_bmm`, the user's matrices replicated first.
`floor`, where the keys are far larger than the caches, is the time that reading them takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import ikbo
from ikbo import reference
from ikbo.testing.bench import REPOSITORY, interleaved, source_hash, write_results
from ikbo.testing.cost import cost_of
from ikbo.testing.inputs import DTYPES

SOURCES = [
    "bench/bench_ops_cpu.py",
    "include/ikbo/*.h",
    "python/ikbo/*.py",
    *(f"python/ikbo/testing/{name}.py" for name in ("bench", "cost", "inputs")),
    *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops")),
]
PACKAGES = REPOSITORY / "build" / "bench"

LINEAR = {"U": 16, "B": 1024, "K_user": 1178, "K_cand": 866, "M": 512}
LCE = {"U": 4, "B": 256, "K_user": 1178, "K_cand": 866, "M": 433, "N": 64}
ATTENTION = {"U": 16, "B": 1024, "Q": 1, "S": 512, "H": 2, "H_kv": 2, "D": 64}
BMM = {"U": 16, "B": 1024, "P": 64, "R": 64, "N": 16}
EXPAND = {"U": 16, "B": 1024, "K_user": 1178}

Call = Callable[[], Any]


@dataclass
class Row:
    """What one row measures; `derived` turns its times into further peers.

    `slow_peers` take no turns with the others: they would leave them cold caches.
    """

    case: dict[str, Any]
    ours: Call
    peers: dict[str, Call] = field(default_factory=dict)
    slow_peers: dict[str, Call] = field(default_factory=dict)
    derived: Callable[[dict[str, float]], dict[str, float]] = lambda times: {}
    floor: float | None = None
    truth: Call | None = None


def case_of(op: str, dtype: str, order: str, sizes: dict[str, int], **more: Any) -> dict[str, Any]:
    ratio = sizes["B"] // sizes["U"]
    return {"op": op, "ratio": ratio, "dtype": dtype, "order": order, **sizes, **more}


def index_of(sizes: dict[str, int], order: str = "sorted") -> Tensor:
    """The same number of candidates for each user."""
    index = torch.arange(sizes["B"], dtype=torch.int32) // (sizes["B"] // sizes["U"])
    return index[torch.randperm(sizes["B"])] if order == "shuffled" else index


def randn(dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(DTYPES[dtype])


def gemm_arguments(op: str, dtype: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Arguments of linear or lce, the same at each call: packages that hold them are kept."""
    torch.manual_seed(0)
    tail = (sizes["N"],) if op == "lce" else ()
    name = "e" if op == "lce" else "x"
    k_user, k_cand, m = sizes["K_user"], sizes["K_cand"], sizes["M"]
    return {
        f"{name}_user": randn(dtype, sizes["U"], k_user, *tail),
        f"{name}_cand": randn(dtype, sizes["B"], k_cand, *tail),
        "w_user": randn(dtype, m, k_user) / k_user**0.5,
        "w_cand": randn(dtype, m, k_cand) / k_cand**0.5,
        "bias": randn(dtype, m),
        "cand_to_user": index_of(sizes),
    }


def products(op: str, user: Tensor, cand: Tensor, w_user: Tensor, w_cand: Tensor) -> list[Tensor]:
    if op == "lce":
        return [w_user @ user, w_cand @ cand]
    return [user @ w_user.T, cand @ w_cand.T]


class Fused(nn.Module):
    """The operator over weights of its own, as a model holds them."""

    def __init__(self, op: str, arguments: dict[str, Tensor]) -> None:
        super().__init__()
        self.op = op
        for name in ("w_user", "w_cand", "bias"):
            self.register_buffer(name, arguments[name])

    def forward(self, user: Tensor, cand: Tensor, cand_to_user: Tensor) -> Tensor:
        operator = ikbo.lce if self.op == "lce" else ikbo.linear
        return operator(user, cand, self.w_user, self.w_cand, self.bias, cand_to_user)


class Plain(Fused):
    """The same as PyTorch operators: product, `index_select`, add."""

    def forward(self, user: Tensor, cand: Tensor, cand_to_user: Tensor) -> Tensor:
        y_user, y_cand = products(self.op, user, cand, self.w_user, self.w_cand)
        bias = self.bias[:, None] if self.op == "lce" else self.bias
        return y_cand + (y_user + bias).index_select(0, cand_to_user)


def packaged(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Call:
    """A call of the module inside a package, which is built once for each state of the sources."""
    path = PACKAGES / f"{name}-{source_hash(SOURCES)[:12]}.pt2"
    if not path.exists():
        PACKAGES.mkdir(parents=True, exist_ok=True)
        names = ("user", "cand", "cand_to_user")
        ikbo.package(
            module.eval(),
            path,
            example_inputs=dict(zip(names, inputs, strict=True)),
            roles={"user": "user", "cand": "candidate", "cand_to_user": "index"},
            max_users=64,
            max_candidates=8192,
        )
    run = torch._inductor.aoti_load_package(str(path))
    return lambda: run(*inputs)


def gemm_rows(op: str, sizes: dict[str, int]) -> Iterator[Row]:
    operator, definition = getattr(ikbo, op), getattr(reference, op)
    arguments = {dtype: gemm_arguments(op, dtype, sizes) for dtype in ("fp32", "bf16", "fp16")}
    fp32 = partial(operator, **arguments["fp32"])
    for dtype, args in arguments.items():
        user, cand, w_user, w_cand, _, index = args.values()
        truth = partial(definition, **args)
        peers: dict[str, Call] = {"two_gemms": partial(products, op, user, cand, w_user, w_cand)}
        if dtype != "fp32":
            peers["fp32"] = fp32
        yield Row(
            case_of(op, dtype, "sorted", sizes), partial(operator, **args), peers, truth=truth
        )
        if dtype == "fp32":
            inputs = (user, cand, index)
            yield Row(
                case_of(op, dtype, "sorted", sizes, inside="package"),
                packaged(op, Fused(op, args), inputs),
                {**peers, "two_gemms_aoti": packaged(f"{op}-plain", Plain(op, args), inputs)},
                truth=truth,
            )


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def attention_row(dtype: str, order: str, sizes: dict[str, int], read_speed: float) -> Row:
    q = randn(dtype, sizes["B"], sizes["Q"], sizes["H"], sizes["D"])
    k, v = (randn(dtype, sizes["U"], sizes["S"], sizes["H_kv"], sizes["D"]) for _ in range(2))
    in_order = index_of(sizes)
    index = index_of(sizes, order)
    lengths = None
    if order == "ragged":
        lengths = torch.linspace(0, sizes["S"], sizes["U"]).to(torch.int32)

    def ours() -> Any:
        return ikbo.target_attention(q, k, v, index, lengths)

    def in_order_whole() -> Any:
        return ikbo.target_attention(q, k, v, in_order)

    def packed_sdpa() -> Tensor:
        rows = sizes["B"] // sizes["U"] * sizes["Q"]
        packed = q.view(sizes["U"], rows, sizes["H"], sizes["D"])
        return sdpa(heads_first(packed), heads_first(k), heads_first(v))

    def gather_sdpa() -> Tensor:
        return sdpa(heads_first(q), heads_first(k[index]), heads_first(v[index]))

    def plain_sdpa() -> Tensor:
        return sdpa(heads_first(q), heads_first(k), heads_first(v))

    row = Row(
        case_of("target_attention", dtype, order, sizes),
        ours,
        truth=lambda: reference.target_attention(q, k, v, index, lengths)[0],
    )
    if sizes["B"] == sizes["U"]:
        row.peers = {"plain_sdpa": plain_sdpa}
        row.floor = cost_of("target_attention", sizes, DTYPES[dtype]).unique_bytes / read_speed
    elif order == "sorted":
        row.peers, row.slow_peers = {"packed_sdpa": packed_sdpa}, {"gather_sdpa": gather_sdpa}
    elif order == "shuffled":
        row.peers, row.slow_peers = {"sorted": in_order_whole}, {"gather_sdpa": gather_sdpa}
    else:
        share = lengths.double().mean().item() / sizes["S"]
        row.peers = {"sorted": in_order_whole}
        row.derived = lambda times: {"share": times["sorted"] * share}
    return row


def rows_of(read_speed: float) -> Iterator[Row]:
    yield from gemm_rows("linear", LINEAR)
    yield from gemm_rows("lce", LCE)
    for dtype in ("fp32", "bf16", "fp16"):
        for num_queries in (1, 4) if dtype == "fp32" else (1,):
            sizes = {**ATTENTION, "Q": num_queries}
            for order in ("sorted", "shuffled", "ragged") if dtype == "fp32" else ("sorted",):
                yield attention_row(dtype, order, sizes, read_speed)
    yield attention_row("fp32", "sorted", {**ATTENTION, "U": 1024}, read_speed)
    for order in ("sorted", "shuffled"):
        x_user, index = randn("fp32", EXPAND["U"], EXPAND["K_user"]), index_of(EXPAND, order)
        yield Row(
            case_of("expand", "fp32", order, EXPAND),
            partial(ikbo.expand, x_user, index),
            {"index_select": partial(x_user.index_select, 0, index)},
            truth=partial(reference.expand, x_user, index),
        )
        a = randn("fp32", BMM["U"], BMM["P"], BMM["R"])
        b = randn("fp32", BMM["B"], BMM["R"], BMM["N"])
        index = index_of(BMM, order)
        yield Row(
            case_of("bmm", "fp32", order, BMM),
            partial(ikbo.bmm, a, b, index),
            {"gather_bmm": lambda a=a, b=b, i=index: a[i] @ b},
            truth=partial(reference.bmm, a, b, index),
        )


def measured_read_speed() -> float:
    """Bytes per millisecond, over an array far larger than the caches."""
    source = torch.ones(2**27)
    times = interleaved({"sum": source.sum}, rounds=7)
    return source.nbytes / times["sum"]


def check(row: Row) -> None:
    """Raises AssertionError unless ours is what the reference says, but for rounding."""
    assert row.truth is not None
    result = row.ours()
    while isinstance(result, (tuple, list)):
        result = result[0]
    tolerance = 64 * torch.finfo(result.dtype).eps
    torch.testing.assert_close(
        result, row.truth(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{row.case}: {m}"
    )


def measured(row: Row) -> dict[str, Any]:
    check(row)
    times = interleaved({"ours": row.ours, **row.peers}, rounds=101, seconds=3.0)
    times |= interleaved(row.slow_peers, rounds=5)
    ours = times.pop("ours")
    peers = times | row.derived(times)
    figures = {"case": row.case, "unit": "ms", "ours": ours, "peers": peers}
    return figures if row.floor is None else figures | {"floor": row.floor}


def line_of(figures: dict[str, Any]) -> str:
    case, ours = figures["case"], figures["ours"]
    name = f"{case['op']} {case['dtype']} {case['order']} ratio {case['ratio']}"
    name += "".join(f" {key}={case[key]}" for key in ("Q", "inside") if key in case)
    others = dict(figures["peers"])
    if "floor" in figures:
        others["floor"] = figures["floor"]
    peers = ", ".join(f"{ours / ms:.2f}x {peer} ({ms:.3f})" for peer, ms in others.items())
    return f"{name:50} {ours:8.3f} ms = {peers}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch (2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for row in rows_of(measured_read_speed()):
            rows.append(measured(row))
            print(line_of(rows[-1]), flush=True)
    path: Path = write_results("ops", rows, sources=SOURCES)
    print(path.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
