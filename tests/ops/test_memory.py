# SPDX-License-Identifier: Apache-2.0
"""Peak memory: no operator builds its user operand at candidate size, forward or backward, and a
list of candidate embeddings is never joined.

The operators run in a process whose malloc returns what is freed; Linux' high-water mark of
resident memory is reset before each call. That sees every allocation that is touched, PyTorch's and
the kernels' own. The replicated form of each operator is measured the same way and must be caught.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

U, B = 4, 4096
REPLICATED_MIB = 128  # of each case's user operand at B in fp32
MIB = 2**20


@dataclass(frozen=True)
class Operator:
    """Arguments by shape; `replicated` names what must not exist at candidate size. `indices` are
    further arguments, each counting up to so many in equal steps."""

    user: dict[str, tuple[int, ...]]
    other: dict[str, tuple[int, ...]]
    replicated: str
    indices: dict[str, int] = field(default_factory=dict)


OPERATORS = {
    "expand": Operator({"x_user": (U, 8192)}, {}, "nothing beside the output"),
    "linear": Operator(
        {"x_user": (U, 8192)},
        {"x_cand": (B, 16), "w_user": (8, 8192), "w_cand": (8, 16), "bias": (8,)},
        "B x K_user",
    ),
    "lce": Operator(
        {"e_user": (U, 512, 16)},
        {"e_cand": (B, 8, 16), "w_user": (8, 512), "w_cand": (8, 8), "bias": (8,)},
        "B x K_user x N",
    ),
    "bmm": Operator({"a_user": (U, 64, 128)}, {"b_cand": (B, 128, 1)}, "B x P x R"),
    "target_attention": Operator(
        {"k": (U, 256, 1, 32), "v": (U, 256, 1, 32)}, {"q": (B, 1, 1, 32)}, "B x S x D"
    ),
    "target_attention.packed": Operator(
        {"k": (U * 256, 1, 32), "v": (U * 256, 1, 32)},
        {"q": (B, 1, 1, 32)},
        "B x S x D",
        {"user_offsets": U * 256},
    ),
    "self_target_attention": Operator(
        {"q_user": (U, 256, 1, 32), "k": (U, 256, 1, 32), "v": (U, 256, 1, 32)},
        {"q_cand": (B, 1, 1, 32)},
        "B x S x D",
    ),
}
DTYPES = ("float32", "bfloat16")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes by which the call raises resident memory at its highest, its result included."""
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return _status("VmHWM") - before


def _with_gradients(operator: Callable[..., Any], inputs: dict[str, Any]) -> None:
    out = operator(**inputs)
    outs = out[: len(out) // 2] if isinstance(out, tuple) else (out,)  # no log-sum-exp
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])


def _expand_through_a_copy(x_user: Tensor, cand_to_user: Tensor) -> Tensor:
    return x_user[cand_to_user.long()].clone()


def _measure() -> dict[str, int]:
    """Peaks by "<operator> <dtype> <ours or replicated> <forward or backward>"."""
    import ikbo
    from ikbo import reference

    peaks = {}
    for name, shapes in OPERATORS.items():
        for dtype in DTYPES:
            inputs: dict[str, Tensor] = {
                argument: torch.randn(shape).to(getattr(torch, dtype)).requires_grad_()
                for argument, shape in (shapes.user | shapes.other).items()
            }
            index = torch.arange(B, dtype=torch.int32) % U
            for kind, module in (("ours", ikbo), ("replicated", reference)):
                operator = getattr(module, name.partition(".")[0])
                if (name, kind) == ("expand", "replicated"):
                    operator = _expand_through_a_copy
                arguments = {**inputs, "cand_to_user": index}
                for argument, last in shapes.indices.items():
                    arguments[argument] = torch.arange(U + 1, dtype=torch.int32) * (last // U)
                small = {n: t[:8] if t.size(0) == B else t for n, t in arguments.items()}
                _with_gradients(operator, small)  # starts the threads and their pools

                def forward(operator: Any = operator, arguments: Any = arguments) -> Any:
                    with torch.no_grad():
                        return operator(**arguments)

                peaks[f"{name} {dtype} {kind} forward"] = peak_of(forward)
                peaks[f"{name} {dtype} {kind} backward"] = peak_of(
                    lambda op=operator, a=arguments: _with_gradients(op, a)
                )
            if name == "lce":
                peaks |= _peaks_of_lists(inputs | {"cand_to_user": index}, dtype)
    return peaks


def _peaks_of_lists(inputs: dict[str, Tensor], dtype: str) -> dict[str, int]:
    """Peaks of lce on parts with other rows between them, REPLICATED_MIB together in fp32."""
    import ikbo

    table = torch.randn(B, 540, 16).to(getattr(torch, dtype))
    parts = [table[:, :170], table[:, 180:351], table[:, 360:531]]
    w_cand = torch.randn(8, 512).to(table.dtype)

    def call(e_cand: Any, w: Tensor = w_cand) -> Any:
        return ikbo.lce(**{**inputs, "e_cand": e_cand, "w_cand": w})

    with torch.no_grad():
        packed = ikbo.prepack(w_cand, [170, 171, 171])
        call(parts)  # starts the threads and their pools
        return {
            f"lce {dtype} list": peak_of(lambda: call(parts)),
            f"lce {dtype} packed": peak_of(lambda: call(parts, packed)),
            f"lce {dtype} joined": peak_of(lambda: call(torch.cat(parts, dim=1))),
        }


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        # Large blocks are mapped and unmapped, each by itself.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def allowed(name: str, dtype: str) -> int:
    """A quarter of the replicated operand, which expand returns."""
    operand = REPLICATED_MIB * MIB * getattr(torch, dtype).itemsize // 4
    return operand // 4 + (operand if name == "expand" else 0)


CASES = [
    (name, dtype, phase)
    for name in OPERATORS
    for dtype in DTYPES
    for phase in ("forward", "backward")
    # The gradient that expand's backward takes is of candidate size already.
    if (name, phase) != ("expand", "backward")
]
EVERY_CASE = pytest.mark.parametrize(("name", "dtype", "phase"), CASES)


@EVERY_CASE
def test_peak_memory(peaks: dict[str, int], name: str, dtype: str, phase: str) -> None:
    peak, limit = peaks[f"{name} {dtype} ours {phase}"], allowed(name, dtype)
    assert peak < limit, (
        f"{name} {dtype} {phase}: peak {peak / MIB:.0f} MiB, allowed {limit / MIB:.0f}; "
        f"is {OPERATORS[name].replicated} built?"
    )


@EVERY_CASE
def test_replication_is_caught(peaks: dict[str, int], name: str, dtype: str, phase: str) -> None:
    assert peaks[f"{name} {dtype} replicated {phase}"] > allowed(name, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["list", "packed"])
def test_a_list_is_never_joined(peaks: dict[str, int], dtype: str, kind: str) -> None:
    limit = allowed("lce", dtype)
    assert peaks[f"lce {dtype} {kind}"] < limit
    assert peaks[f"lce {dtype} joined"] > limit


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(_measure()))
