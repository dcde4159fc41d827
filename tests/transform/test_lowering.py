# SPDX-License-Identifier: Apache-2.0
"""Our kernel, or two products, gather and add: a package has what was measured to be faster."""

import json
from typing import Any

import pytest
import torch

import ikbo
from ikbo import _inductor
from ikbo.testing.bench import RESULTS

PARTS = ("decomposed", "padded")


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
        times = [t for t in map(row["peers"].get, PARTS) if isinstance(t, float)]
        if not times or case.get("N", 8) % 8:
            continue
        like = _Like(getattr(torch, case["dtype"]), torch.device("cuda"))
        operator = getattr(torch.ops.ikbo, case["op"]).default
        assert _inductor.is_lowered(operator, like) == (min(times) < row["ours"]), case
        compared += 1
    assert compared


class _Like:
    """A tensor's type and device, on a machine that has no such device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device


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
