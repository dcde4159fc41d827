# SPDX-License-Identifier: Apache-2.0
"""Our kernel, or two products, gather and add: a package has what was measured to be faster."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ikbo
from ikbo import _inductor
from ikbo.testing.bench import RESULTS

PARTS = ("decomposed", "padded")  # in 16 bits these round more than once


def _rows(name: str) -> list[Any]:
    rows = json.loads((RESULTS / f"{name}-h200.json").read_text())["rows"]
    contiguous = [row for row in rows if not row["case"].get("k_inner")]
    return [row for row in contiguous if row["case"]["op"] in ("linear", "lce")]


@pytest.mark.parametrize("name", ["linear", "lce", "generic"])
def test_the_faster_one_was_measured_on_the_h200(name: str) -> None:
    """Not for an N that no kernel of ours for 16 bits takes: parts would round twice there."""
    compared = 0
    for row in _rows(name):
        case = row["case"]
        names = ("parts",) if "parts" in row["peers"] else PARTS
        times = [t for t in map(row["peers"].get, names) if isinstance(t, float)]
        if not times or case.get("N", 8) % 8:
            continue
        weight = _Weight(
            getattr(torch, case["dtype"]), torch.device("cuda"), (case["M"], case["K_cand"])
        )
        operator = getattr(torch.ops.ikbo, case["op"]).default
        assert _inductor.is_lowered(operator, weight) == (min(times) < row["ours"]), case
        compared += 1
    assert compared


@dataclass
class _Weight:
    """A tensor's type, device and shape, on a machine that has no such device."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, int]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_in_parts_sums_in_fp32_on_a_gpu(has_bias: bool, dtype: torch.dtype) -> None:
    m, k_cand = _inductor._WIDE, _inductor._LONG
    sizes = [(3, 64), (9, k_cand), (m, 64), (m, k_cand), (m,), (9,)]
    with FakeTensorMode():
        x_user, x_cand, w_user, w_cand, bias, index = (
            torch.empty(size, device="cuda", dtype=torch.int32 if size == (9,) else dtype)
            for size in sizes
        )
        given = x_user, x_cand, w_user, w_cand, bias if has_bias else None, index
        with Dtypes() as seen:
            out = _inductor._linear(*given, "relu")
        assert _inductor._linear(x_user, x_cand[:, :64], w_user, w_cand[:, :64], None, index) is (
            NotImplemented
        )
    assert (out.dtype, out.shape) == (dtype, (9, m))
    assert seen.of(torch.ops.aten.mm.dtype) == [torch.float32, torch.float32]
    assert seen.of(torch.ops.ikbo.expand.default) == [torch.float32]


class Dtypes(TorchDispatchMode):
    """The types of the results of each operator's calls."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[Any, torch.dtype]] = []

    def of(self, target: Any) -> list[torch.dtype]:
        return [dtype for called, dtype in self._seen if called is target]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._seen.append((func, out.dtype))
        return out


@pytest.mark.parametrize("has_bias", [True, False])
def test_lce_in_parts(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inductor, "_IN_PARTS", {("lce", "cpu"): (torch.float64,)})
    sizes = [(3, 5, 4), (7, 6, 4), (8, 5), (8, 6), (8,)]
    tensors: list[Any] = [torch.randn(size, dtype=torch.float64) for size in sizes]
    if not has_bias:
        tensors[4] = None
    index = torch.tensor([0, 2, 2, 0, 1, 2, 0], dtype=torch.int32)
    torch.testing.assert_close(_inductor._lce(*tensors, index), ikbo.lce(*tensors, index))
    narrow = [None if x is None else x.float() for x in tensors]
    assert _inductor._lce(*narrow, index) is NotImplemented
