# SPDX-License-Identifier: Apache-2.0
"""What `bench/bench_end_to_end.py` makes of a spec and of measured times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import bench_end_to_end as script
from examples.nets import NETS
from ikbo.transform import Spec
from ikbo.transform.cost import ZERO, Formula
from ikbo.transform.spec import Row

ROW: dict[str, Any] = {
    "case": {"net": "wukong", "ratio": 10, "U": 2, "B": 20, "dtype": "float32"},
    "unit": "ms",
    "ours": 2.0,
    "ours_adopted": 2.5,
    "peers": {"replicated_aoti": 9.0, "replicated_compile": 8.0, "net_split_aoti": 3.0},
    "floor": 1.0,
    "predicted": 5.0,
    "share": 0.8,
}


def row(name: str, flops: tuple[Formula, Formula], moved: tuple[Formula, Formula]) -> Row:
    return Row(name, name, "", "B", (), (), *flops, *moved, (), ())


def spec() -> Spec:
    per_user, per_candidate = Formula({(1, 0): 600.0}), Formula({(0, 1): 600.0})
    rows = (
        row("bound by FLOPs", (per_candidate, per_user), (ZERO, ZERO)),
        row("bound by bytes", (Formula({(0, 1): 1.0}),) * 2, (Formula({(0, 1): 20.0}),) * 2),
        row("no product", (ZERO, ZERO), (per_candidate, per_candidate)),
    )
    return Spec(64, 64, 2, 20, rows)


def test_the_floor_is_the_larger_of_both_times_for_each_product() -> None:
    device = script.Device("cpu", torch.float32, flops_per_ms=100.0, bytes_per_ms=10.0)
    assert device.floor(spec(), "before", 2, 20) == 20 * 6 + 20 * 2
    assert device.floor(spec(), "after", 2, 20) == 2 * 6 + 20 * 2


def test_a_product_takes_no_less_than_its_launch() -> None:
    device = script.Device("cuda", torch.float16, 100.0, 10.0, launch_ms=15.0)
    assert device.floor(spec(), "after", 2, 20) == 15 + 20 * 2


def test_lines_and_tables_show_what_ran() -> None:
    line = script.line_of(ROW)
    assert "net_split_aoti 3 ms (1.50x)" in line
    assert line.endswith("floor 1 ms, predicted 5.00x reached 80 % of it")
    failed = ROW | {"peers": ROW["peers"] | {"net_split_aoti": "OutOfMemoryError: no"}}
    assert "net_split_aoti OutOfMemoryError: no" in script.line_of(failed)
    head, _, first, second = script.table_of([ROW, failed]).splitlines()
    assert head.startswith("| net, ratio (U, B) | ours |")
    assert first == (
        "| wukong, 10 (2, 20) | 2 | 2.5 | 9 | 8 | 3 | - | 4.00x | 1.50x | 5.00x | 80% |"
    )
    assert second.split(" | ")[5:9] == ["-", "-", "-", "-"]


def test_other_nets_and_ratios_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.arguments_of([]).nets == list(NETS)
    assert script.arguments_of(["--ratios", "10,500"]).ratios == (10, 500)
    for argv in (["--nets", "resnet"], ["--ratios", "11"]):
        with pytest.raises(SystemExit):
            script.arguments_of(argv)
    assert "--ratios must be of 10, 70, 500; got [11]" in capsys.readouterr().err


def test_a_package_of_another_state_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    device = script.device_of("cpu")
    before = [script.path_of(device, "wukong", name) for name in ("ours", "net_split_aoti")]
    monkeypatch.setattr(script, "_PASS", [])
    after = [script.path_of(device, "wukong", name) for name in ("ours", "net_split_aoti")]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
