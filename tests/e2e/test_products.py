# SPDX-License-Identifier: Apache-2.0
"""Products of a package for the CPU: which are packed for oneDNN, and for how many rows."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo import _inductor_products
from ikbo._inductor_products import _with_batch

WIDE, NARROW, EVENTS = 272, 32, 9


class Net(nn.Module):
    """A large layer that runs at U and at B, and small ones, one of them over several rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(WIDE, WIDE)
        self.small = nn.Linear(WIDE, NARROW)
        self.plain = nn.Linear(NARROW, NARROW, bias=False)
        self.event = nn.Linear(NARROW, WIDE)

    def forward(self, user: Tensor, history: Tensor, item: Tensor, index: Tensor) -> Tensor:
        events = self.event(history).relu().sum(1)
        user, item = self.large(user), self.large(item + events).relu()
        return self.plain(self.small(item + ikbo.expand(user, index)).relu())


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("products") / "net.pt2"
    rows = [torch.randn(24, *row) for row in ((WIDE,), (EVENTS, NARROW), (WIDE,))]
    inputs = (*rows, torch.zeros(24, dtype=torch.int32))
    roles = {"user": "user", "history": "candidate", "item": "candidate", "index": "index"}
    with mock.patch.object(_inductor_products, "_has_fast_mkl", lambda: True):
        ikbo.package(
            Net().eval(), path, example_inputs=inputs, roles=roles, max_users=8, max_candidates=1024
        )
    with zipfile.ZipFile(path) as archive:
        return "".join(archive.read(n).decode() for n in archive.namelist() if n.endswith(".cpp"))


def test_small_weights_are_not_packed_but_for_many_rows(code: str) -> None:
    products = re.findall(r"aoti_torch_cpu_(\w*(?:mm|linear)\w*)\(", code)
    assert products == ["_linear_pointwise"] * 3 + ["mm_out"] * 2


def test_a_layer_at_both_batches_is_packed_once(code: str) -> None:
    shapes = re.findall(r"constants_info_\[\d+\]\.shape = \{(\d+, \d+)\}", code)
    large = f"{WIDE}, {WIDE}"
    assert shapes.count(large) == 1


@pytest.mark.parametrize(
    ("vendor", "has_avx512", "is_fast"),
    [("GenuineIntel", True, True), ("AuthenticAMD", True, False), ("AuthenticAMD", False, True)],
)
def test_mkl_leaves_avx512_of_other_vendors_out(
    vendor: str, has_avx512: bool, is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(_inductor_products, "_CPU", path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    assert _inductor_products._has_fast_mkl() is is_fast


def test_rows_of_a_size_that_depends_on_batches() -> None:
    sizes: list[int] = []

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.extend(_with_batch(size, 1000) for size in (x.shape[0], 3 * x.shape[0], 7))
            return x + 1

    torch.export.export(
        Flat(), (torch.randn(5, 2),), dynamic_shapes=({0: torch.export.Dim("B", max=2000)},)
    )
    assert sizes == [1000, 3000, 7]
