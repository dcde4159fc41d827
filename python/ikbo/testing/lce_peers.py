# SPDX-License-Identifier: Apache-2.0
"""What ``ikbo::lce`` is measured against on a GPU: PyTorch's forms and the public fused kernels.

The public kernels (``triton``, ``tlx``) are those of package ``fbgemm_ikbo``, where it is
installed. They tune themselves: the first call of a shape times tens of configurations, which
takes seconds once all are compiled and a minute on one core before. ``--warm`` compiles them on
all cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ikbo.testing.bench_cuda import Call, Contestant, padded, reason_of, sorted_index
from ikbo.testing.cost import Cost, cost_of

PUBLIC = ("triton", "tlx")


@dataclass(frozen=True)
class LceCase:
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

    @property
    def cost(self) -> Cost:
        sizes = {**dataclasses.asdict(self), "U": self.num_users}
        return cost_of("lce", sizes, getattr(torch, self.dtype))

    def needed_bytes(self) -> dict[str, int]:
        """What PyTorch's forms allocate besides their inputs."""
        column_bytes = self.B * self.N * getattr(torch, self.dtype).itemsize
        out = column_bytes * self.M
        split = 3 * out + out // self.B * self.num_users
        return {
            "baseline": column_bytes * (2 * self.K_user + self.K_cand) + out,
            "decomposed": split,
            "padded": split,
            "cand_gemm_padded": out,
        }


@dataclass(frozen=True)
class LceTensors:
    e_user: torch.Tensor
    e_cand: torch.Tensor
    w_user: torch.Tensor
    w_cand: torch.Tensor
    index: torch.Tensor

    def padded(self) -> LceTensors:
        """The same with both K padded to multiples of 8."""
        return LceTensors(
            padded(self.e_user, 1),
            padded(self.e_cand, 1),
            padded(self.w_user, 1),
            padded(self.w_cand, 1),
            self.index,
        )

    def reference(self, rows: torch.Tensor) -> torch.Tensor:
        """In fp32, of some candidates."""
        users = self.index[rows]
        return (
            self.w_user.float() @ self.e_user[users].float()
            + self.w_cand.float() @ self.e_cand[rows].float()
        )


def make_tensors(case: LceCase, *, k_inner: bool = False) -> LceTensors:
    """Random tensors of the case; with ``k_inner``, K is the inner dimension of both E."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=getattr(torch, case.dtype))

    def embeddings(batch: int, k: int) -> torch.Tensor:
        return randn(batch, case.N, k).mT if k_inner else randn(batch, k, case.N)

    torch.manual_seed(0)
    return LceTensors(
        embeddings(case.num_users, case.K_user),
        embeddings(case.B, case.K_cand),
        randn(case.M, case.K_user),
        randn(case.M, case.K_cand),
        sorted_index(case.B, case.ratio),
    )


def checked_rows(case: LceCase) -> torch.Tensor:
    """The first and the last 32 candidates."""
    rows = torch.arange(case.B, device="cuda")
    return rows if case.B <= 64 else torch.cat((rows[:32], rows[-32:]))


def decomposed(t: LceTensors) -> torch.Tensor:
    return (t.w_cand @ t.e_cand) + (t.w_user @ t.e_user).index_select(0, t.index)


def torch_peers(t: LceTensors) -> dict[str, Call]:
    """As users write it: one GEMM over gathered and concatenated rows; two GEMMs."""
    w_both = torch.cat((t.w_user, t.w_cand), 1)
    return {
        "baseline": lambda: w_both @ torch.cat((t.e_user.index_select(0, t.index), t.e_cand), 1),
        "decomposed": lambda: decomposed(t),
    }


def padded_peers(p: LceTensors) -> dict[str, Call]:
    """Of padded tensors: two GEMMs; the candidate's alone, which is less than the operator."""
    return {"padded": lambda: decomposed(p), "cand_gemm_padded": lambda: p.w_cand @ p.e_cand}


# Times a configuration for some 12 ms where Triton's default is 125 ms: there are 64 of them.
def _short_bench(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    do_bench = importlib.import_module("triton.testing").do_bench
    return do_bench(call, warmup=2, rep=10, quantiles=quantiles)


# Runs it once, which compiles it.
def _no_bench(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
    call()
    return [0.0 for _ in quantiles]


def public_module(name: str, bench: Callable[..., Any] = _short_bench) -> Any:
    """The module of a public kernel, which times its configurations by ``bench``.

    Errors:
        ImportError: it is not installed, or needs another Triton.
    """
    module = importlib.import_module(f"fbgemm_ikbo.ops.{name}_ikbo_lce")
    getattr(module, f"{name}_ikbo_lce_kernel").do_bench = bench
    return module


def _triton_reason(p: LceTensors) -> str | None:
    """Why the kernel would read or write elsewhere: it computes offsets in 32 bits."""
    out = p.e_cand.size(0) * p.w_cand.size(0) * p.e_cand.size(2)
    largest = max(p.e_cand.numel(), p.e_user.numel(), out)
    return f"32-bit offsets, and a tensor of {largest} elements" if largest >= 2**31 else None


def public_kernels(p: LceTensors, wanted: Sequence[str]) -> dict[str, Contestant]:
    """The public kernels on these tensors; ``tlx`` resets its flags each call.

    ``tlx`` wants K padded, rounds to fp16 whatever its inputs are, and returns a strided view.
    """
    calls: dict[str, Contestant] = {}
    for name in wanted:
        try:
            calls[name] = _public_kernel(p, name)
        except Exception as problem:  # of import, or of a kernel that refuses these tensors
            calls[name] = reason_of(problem)
    return calls


def _public_kernel(p: LceTensors, name: str) -> Contestant:
    module = public_module(name)
    arguments = (p.w_cand, p.w_user, p.e_cand, p.e_user, p.index)
    if name == "triton":
        return _triton_reason(p) or partial(module.triton_ikbo_lce, *arguments)
    flag = module.create_user_flag(p.w_user, p.e_user)

    def run() -> torch.Tensor:
        flag.zero_()
        out: torch.Tensor = module.tlx_ikbo_lce(*arguments, flag)
        return out

    return run


@dataclass(frozen=True)
class WarmTask:
    """A public kernel and the smallest case for which it compiles the same code."""

    name: str
    case: LceCase

    def run(self) -> None:
        p = make_tensors(self.case)
        module = public_module(self.name, _no_bench)
        arguments = (p.w_cand, p.w_user, p.e_cand, p.e_user, p.index)
        if self.name == "triton":
            module.triton_ikbo_lce(*arguments)
        else:
            module.tlx_ikbo_lce(*arguments, module.create_user_flag(p.w_user, p.e_user))
        torch.cuda.synchronize()


def warm_task(name: str, case: LceCase, *, pads: bool = True) -> WarmTask:
    """Triton compiles anew for each M, N, K and dtype, and for the number of users, which ``tlx``
    takes, anew where it is 1 or a multiple of 16. ``pads``: it gets K padded."""

    def k_of(k: int) -> int:
        return k + -k % 8 if pads else k

    users = case.num_users
    num_users = 1 if name == "triton" or users == 1 else 16 if users % 16 == 0 else 3
    small = dataclasses.replace(
        case,
        B=16 * num_users,
        ratio=16,
        K_user=64 if name == "triton" else k_of(case.K_user),
        K_cand=k_of(case.K_cand),
    )
    return WarmTask(name, small)


def add_warm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--warm",
        type=int,
        default=0,
        metavar="N",
        help="first compile the public kernels, in N processes",
    )
    parser.add_argument("--warm-share", help=argparse.SUPPRESS)


def warmed(args: argparse.Namespace, tasks: Sequence[WarmTask]) -> bool:
    """Compiles what ``--warm`` asks for. True: this process was started for a share of it."""
    if args.warm_share:
        _run_share(tasks, args.warm_share)
        return True
    if args.warm > 0:
        _run_shares(args.warm, len(tasks))
    return False


def _run_share(tasks: Sequence[WarmTask], share: str) -> None:
    """Compiles every ``count``-th task from number ``first``, one at a time; share: first/count."""
    first, count = map(int, share.split("/"))
    for task in tasks[first::count]:
        begin = time.perf_counter()
        try:
            task.run()
            verdict = "compiled"
        except Exception as problem:  # the measurement tells the same
            verdict = reason_of(problem)
        torch.cuda.empty_cache()
        print(f"warm {task} {verdict}, {time.perf_counter() - begin:.0f} s", flush=True)


def _run_shares(processes: int, tasks: int) -> None:
    """Runs this script once per share of the tasks, all at the same time, and waits for them.

    What they compile stays in Triton's cache on disk.
    """
    begin = time.perf_counter()
    count = max(1, min(processes, tasks))
    script = [sys.executable, *sys.argv, "--warm-share"]
    started = [subprocess.Popen([*script, f"{first}/{count}"]) for first in range(count)]
    codes = [process.wait() for process in started]
    print(
        f"warm: {tasks} tasks, {time.perf_counter() - begin:.0f} s, exit codes {codes}", flush=True
    )
