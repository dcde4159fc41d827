# SPDX-License-Identifier: Apache-2.0
"""Which splits pay: the decision with fixed constants, and which form a call runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo import _cli_costs, calibrate, cli
from ikbo.transform import TransformedModule, cost, estimate
from ikbo.transform.choose import Forms, Range, best_of, range_of, regrets
from ikbo.transform.cost import Formula
from ikbo.transform.device_costs import FREE, SHIPPED, DeviceCosts, device_costs
from ikbo.transform.estimate import Piece

# A CPU whose constants are round numbers.
COSTS = DeviceCosts(
    device="cpu",
    name="a round CPU",
    threads=1,
    torch="any",
    flops_per_s={"float32": 50e9, "bfloat16": 1e9},
    own_flops_per_s={"float32": 50e9},
    bytes_per_s=50e9,
    gather_bytes_per_s=25e9,
    op_us=2.0,
    product_us=4.0,
    own_op_us=30.0,
    view_us=1.0,
    package_product_us=10.0,
    package_kernel_us=1.0,
    vector_bytes=32,
    measured="never",
)


class Net(nn.Module):
    """A layer over user and candidate features."""

    def __init__(self, k_user: int, k_cand: int, m: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(k_user + k_cand, m), nn.ReLU(), nn.Linear(m, 8))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.layers(torch.cat([user, item], dim=1))


@cache
def made(k_user: int, ratio: Any) -> TransformedModule:
    torch.manual_seed(0)
    net = Net(k_user, 256, 256).eval()
    inputs = (torch.randn(16, k_user), torch.randn(16, 256))
    return ikbo.transform(
        net, inputs, ["user"], max_users=8, max_candidates=4096, ratio=ratio, device_costs=COSTS
    )


def is_split(module: TransformedModule) -> bool:
    targets = {str(node.target) for node in module.exported_program.graph.nodes}
    return "ikbo.linear.default" in targets


def kept(module: TransformedModule) -> list[str]:
    return [why for row in module.spec.rows for why in row.blocked if why.startswith("kept at B")]


@pytest.mark.parametrize("ratio", [70, None])
def test_splits_a_wide_user_at_usual_ratios(ratio: Any) -> None:
    assert is_split(made(512, ratio))
    assert kept(made(512, ratio)) == []


def test_declines_at_ratio_1() -> None:
    assert not is_split(made(512, 1))
    assert len(kept(made(512, 1))) == 1
    assert "the split would cost more" in kept(made(512, 1))[0]
    assert made(512, 1).spec.rows == made(512, 1).spec.from_json(made(512, 1).spec.to_json()).rows


def test_declines_for_a_tiny_k_user() -> None:
    assert not is_split(made(2, 70))
    assert len(kept(made(2, 70))) == 1


def test_what_nothing_costs_is_always_split() -> None:
    net, inputs = Net(2, 8, 4).eval(), (torch.randn(16, 2), torch.randn(16, 8))
    module = ikbo.transform(net, inputs, ["user"], ratio=1, device_costs=FREE)
    assert is_split(module)
    assert module.spec.pays_from == {"eager": ((1, 1),), "package": ((1, 1),)}


class Deep(nn.Module):
    """Layers over the user alone, then `Net`."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.tower = nn.Sequential(*layers)
        self.net = Net(width, width, width)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.net(self.tower(user), item)


@pytest.mark.parametrize(("depth", "splits"), [(0, False), (12, True)])
def test_what_a_split_loses_counts_beside_the_whole_model(depth: int, splits: bool) -> None:
    """The split costs a product more, a large part of a shallow model on ten candidates."""
    torch.manual_seed(0)
    net, inputs = Deep(depth, 64).eval(), (torch.randn(16, 64), torch.randn(16, 64))
    given = {"max_users": 1, "max_candidates": 128, "device_costs": COSTS}
    assert is_split(ikbo.transform(net, inputs, ["user"], **given)) == splits


class _Counted(nn.Module):
    """Counts the calls of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(user, item)


def test_small_batches_run_the_unmodified_model() -> None:
    torch.manual_seed(0)
    net = _Counted(Net(512, 256, 256)).eval()
    inputs = (torch.randn(16, 512), torch.randn(16, 256))
    module = ikbo.transform(net, inputs, ["user"], max_candidates=4096, device_costs=COSTS)
    table = module.spec.pays_from["eager"]
    (users, least), *_ = table
    assert users == 1 and 1 < least < 100
    before = net.calls
    for candidates, calls in ((least - 1, 1), (least, 0)):
        index = torch.zeros(candidates, dtype=torch.int32)
        user, item = torch.randn(1, 512), torch.randn(candidates, 256)
        got = module(user, item, cand_to_user=index)
        assert net.calls - before == calls
        torch.testing.assert_close(got, net.inner(user.expand(candidates, -1), item))
        before = net.calls
    with pytest.raises(ValueError, match="user must have sizes"):
        module(torch.randn(1, 511), item[:1], cand_to_user=index[:1])
    with pytest.raises(ValueError, match="at most B = 4096 rows"):
        many = torch.zeros(4097, dtype=torch.int32)
        module(user, torch.randn(4097, 256), cand_to_user=many)


def test_pays_from_is_where_the_estimates_cross() -> None:
    module = made(512, None)
    for how, table in module.spec.pays_from.items():
        assert [u for u, _ in table] == sorted({u for u, _ in table}), how
        forms = Forms(module.captured, module.exported_program, COSTS, in_package=how == "package")
        for users, least in table:
            before, after = (
                [form(users, b) for form in (forms.transformed, forms.unmodified)]
                for b in (least - 1, least)
            )
            assert before[0] > 0.85 * before[1]
            assert after[0] <= 0.85 * after[1]


def test_regret_is_how_many_times_slower_at_the_worst_corner() -> None:
    times = [lambda u, b: 1.0 * b, lambda u, b: 10.0 + 0.5 * b]
    assert regrets(times, [(1, 2), (1, 100)]) == [100 / 60, 11 / 2]
    assert best_of(times, [(1, 2), (1, 100)]) == 0
    assert best_of(times, [(1, 100)]) == 1
    assert best_of([times[0], times[0]], [(1, 2)]) == 0


def test_corners_of_a_range() -> None:
    assert Range((1, 500), 8, 2000).corners() == [(1, 1), (8, 8), (1, 500), (4, 2000)]
    assert Range((10, 8192), 64, 8192).corners() == [(1, 10), (64, 640), (1, 8192)]
    assert range_of(None, (64, 8192)).ratio == (10, 8192)
    assert range_of(None, (64, 4)).ratio == (4, 4)


@pytest.mark.parametrize(
    ("ratio", "error"),
    [
        ("70", TypeError), ((1, 2, 3), TypeError), (True, TypeError), (0, ValueError),
        ((5, 2), ValueError), (9000, ValueError),
    ],
)  # fmt: skip
def test_refused_ratios(ratio: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="ikbo.transform: ratio must be .*; got"):
        range_of(ratio, (64, 8192))


def test_a_piece_costs_the_longer_of_arithmetic_and_traffic() -> None:
    piece = Piece(Formula({(0, 1): 100.0}), 1e9, Formula({(1, 0): 8.0}), 1e8, 1e-6)
    assert piece.seconds(1, 10) == pytest.approx(1e-6 + 1e-6)
    assert piece.seconds(100, 1) == pytest.approx(8e-6 + 1e-6)


def test_estimates_count_what_each_form_computes() -> None:
    """By hand, per candidate: the difference of two batches leaves the fixed costs out."""
    module = made(512, None)
    nodes = [
        n for n in module.exported_program.graph.nodes if n.target is torch.ops.ikbo.linear.default
    ]
    users, candidates = (nodes[0].args[i].meta["val"].shape[0].node.expr for i in (0, 1))
    pieces = estimate.pieces_of(nodes[0], {users: "U", candidates: "B"}, COSTS, in_package=True)
    per_candidate = (estimate.total(pieces, 1, 2000) - estimate.total(pieces, 1, 1000)) / 1000
    assert per_candidate == pytest.approx(2 * 256 * 256 / 50e9 + 3 * 4 * 256 / 50e9)
    slow = replace(COSTS, own_flops_per_s={"float32": 1e9})
    eager, lowered = (
        estimate.pieces_of(nodes[0], {users: "U", candidates: "B"}, slow, in_package=in_package)
        for in_package in (False, True)
    )
    assert [p[0].flops_per_s for p in (eager, lowered)] == [1e9, 50e9]


def test_calibrate_writes_what_transform_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", "--seconds", "0.001", "-o", str(path)]) == 0
    assert "measuring products in float32" in capsys.readouterr().err
    document = json.loads(path.read_text())
    assert set(document) == set(DeviceCosts.__dataclass_fields__)
    read = device_costs(path, "cpu")
    assert read.to_json() == path.read_text().rstrip("\n")
    assert read.device == "cpu" and read.threads == torch.get_num_threads()
    for rates in (read.flops_per_s, read.own_flops_per_s):
        assert set(rates) == {"float32", "bfloat16", "float16", "float64"}
        assert 1e8 < rates["float32"] < 1e14
    assert read.view_us > 0.05 and 0.05 < read.op_us < read.own_op_us


def test_shipped_costs_are_read() -> None:
    for path in (Path(estimate.__file__).parent / "devices").iterdir():
        costs = DeviceCosts.parse(path.read_text(), str(path))
        assert path.stem == costs.device
    assert device_costs(None, "cpu") is FREE, "tests run without them"
    assert SHIPPED.name == "devices"


def test_refused_costs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device_costs must be of the model's device, cuda; got"):
        device_costs(COSTS, "cuda")
    with pytest.raises(TypeError, match="device_costs must be DeviceCosts, the path of a file"):
        device_costs(3, "cpu")  # type: ignore[arg-type]
    path = tmp_path / "costs.json"
    for text, message in (
        ("{", "must be JSON"),
        ("[]", "must have the fields"),
        (replace(COSTS, op_us=-1.0).to_json(), "op_us of .* must be a positive number; got -1"),
        (replace(COSTS, flops_per_s={}).to_json(), "flops_per_s of .* must have float32"),
        (COSTS.to_json().replace('"a round CPU"', "3"), "name of .* must be a text; got 3"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            device_costs(path, "cpu")
    with pytest.raises(ValueError, match="device 'xpu' cannot be measured"):
        calibrate.calibrate("xpu")


def test_ratio_on_the_command_line() -> None:
    assert [_cli_costs.ratio_of(text) for text in (None, "70", "1:500")] == [
        None,
        70.0,
        (1.0, 500.0),
    ]
    with pytest.raises(ValueError, match="--ratio must be a number or two, as 10:500; got"):
        _cli_costs.ratio_of("many")


def test_small_batches_of_packed_inputs() -> None:
    net = nn.Linear(8, 4).eval()
    module = ikbo.transform(net, (torch.randn(16, 8),), ["input[:, 1:3]"], device_costs=COSTS)
    assert all(least > 5 for _, least in module.spec.pays_from["eager"])
    user, cand, index = torch.randn(2, 2), torch.randn(5, 6), torch.tensor([1, 0, 1, 1, 0]).int()
    whole = torch.cat([cand[:, :1], user[index], cand[:, 1:]], dim=1)
    parts = {"user": user, "cand": cand}
    torch.testing.assert_close(module(parts, cand_to_user=index), net(whole))
    with pytest.raises(ValueError, match="must have dtype"):
        module({"user": user, "cand": cand.double()}, cand_to_user=index)
    for wrong in ({"user": user}, {**parts, "more": user}, [user, cand], user):
        with pytest.raises(TypeError, match="must have the structure"):
            module(wrong, cand_to_user=index)


class _Before(nn.Module):
    """A matrix before columns, as in a cross network."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(24, 32))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return torch.matmul(self.matrix, item) + user


@pytest.mark.parametrize(("width", "counted"), [(1, 1), (3, 3), (7, 7), (9, 16)])
def test_a_matrix_before_few_columns_is_one_product(width: int, counted: int) -> None:
    inputs = torch.randn(16, 24, width), torch.randn(16, 32, width)
    program = ikbo.transform(_Before().eval(), inputs, ["user"]).captured.program
    (node,) = [n for n in program.graph.nodes if n.target is torch.ops.aten.matmul.default]
    symbols = {node.meta["val"].shape[0].node.expr: "B"}
    assert cost.flops(node, symbols, 8) == Formula({(0, 1): 2.0 * 24 * 32 * counted})
