# SPDX-License-Identifier: Apache-2.0
"""The benchmark of public models, on small models of ours: statuses, figures, page, stand-ins."""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import bench_models
from bench.public_models import measure, page
from bench.public_models.case import Case, Cure
from bench.public_models.stand_ins import stand_ins

K_USER, K_CAND, M = 12, 4, 8


class Net(nn.Module):
    """A layer over both sides; `step` does what is measured before it."""

    def __init__(self, step: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.step = step
        self.first, self.second = nn.Linear(K_USER + K_CAND, M), nn.Linear(M, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = torch.cat([self.step(user), item], dim=1)
        return self.second(torch.relu(self.first(x)))


def _rows(count: int, generator: torch.Generator) -> Any:
    shapes = (count, K_USER), (count, K_CAND)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def _branch(x: Tensor) -> Tensor:
    return x if float(x.sum()) > 0 else x + 0.0


def _dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5, training=True)


def _case(name: str, step: Callable[[Tensor], Tensor], cure: Cure | None = None) -> Case:
    return Case("ours", name, lambda: Net(step), _rows, ("user",), cure)


def _cure(model: nn.Module) -> None:
    model.step = torch.positive


GOOD = _case("good", torch.tanh)
REFUSED = _case("refused", _dropped)
CURED = _case("branch", _branch, Cure("no branch.", _cure))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(bench_models, "SIZES", {1: measure.SIZES[1], 500: measure.SIZES[500]})
    try:
        return [row for c in (GOOD, REFUSED, CURED) for row in bench_models.run(c, packages=False)]
    finally:
        monkeypatch.undo()


def test_statuses(rows: list[dict[str, Any]]) -> None:
    found = [(row["case"]["model"], row["case"]["cured"], row["status"]) for row in rows]
    assert found == [
        ("good", False, "transformed"),
        ("refused", False, "refused"),
        ("branch", False, "not_exportable"),
        ("branch", True, "transformed"),
    ]
    assert "random" in rows[1]["reason"]
    assert rows[2]["cure"] == "no branch."
    assert rows[3]["cure_error"] == 0


def test_figures(rows: list[dict[str, Any]]) -> None:
    for row in (rows[0], rows[3]):
        user, cand = 2 * K_USER * M, 2 * K_CAND * M + 2 * M
        assert row["flops"] == pytest.approx(user + cand)
        assert row["user_flops"] == pytest.approx(user)
        assert row["flops_left"] == cand
        assert row["moved_share"] == pytest.approx(1)
        assert row["left_over_minimum"] == pytest.approx(1)
        assert 0 < row["max_error"] < 1e-5
        assert set(row["speedup"]) == {"1", "500"}
        assert row["rules"] == ["A1", "A22"]


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = GOOD.make(), GOOD.rows(64)
    captured = measure.capture(model, inputs, ["user"])

    class Off(nn.Module):
        def forward(self, user: Tensor, item: Tensor, cand_to_user: Tensor) -> Tensor:
            return model(user[cand_to_user.long()], item) + 1e-4

    largest, is_close = measure.errors(captured, model, Off())
    assert not is_close
    assert largest == pytest.approx(1e-4, rel=0.05)


def test_what_fails_the_benchmark(rows: list[dict[str, Any]]) -> None:
    assert bench_models.failures(rows) == ["1 of 2 models that torch.export takes are transformed"]
    assert bench_models.failures([rows[0], rows[3] | {"status": "wrong"}]) == ["branch is wrong"]
    assert bench_models.failures([rows[0], rows[2]]) == []


def test_page(rows: list[dict[str, Any]]) -> None:
    speedup = {"1": 0.5, "10": 2.0, "64": 3.25, "500": 4.0}
    rows = [row | {"speedup": speedup} if "speedup" in row else row for row in rows]
    facts = {"device": "a CPU", "threads": 2, "torch": "2", "date": "today"}
    text = page.text(
        {"environment": facts, "rows": [rows[0] | {"package_speedup": speedup}, *rows]}
    )
    assert "Of 4 models torch.export takes 3 as they are. Of those\n2 are transformed" in text
    assert "| good | transformed | 272 | 71% | 1.000 | 1.000 |" in text
    assert "| branch | not exportable | - |" in text
    assert "It is exported with this change: no branch." in text
    assert "what is not moved" not in text
    assert "| ours good | 0.50 | 2.00 | 3.25 | 4.00 |" in text


def test_page_says_what_is_not_moved(rows: list[dict[str, Any]]) -> None:
    speedup = {"1": 1.0, "10": 1.0, "64": 1.0, "500": 1.0}
    row = rows[0] | {"speedup": speedup, "moved_share": 0.5, "blocked": ["aten.x mixes"]}
    facts = {"device": "a CPU", "threads": 2, "torch": "2", "date": "today"}
    text = page.text({"environment": facts, "rows": [row]})
    assert "- ours good: what is not moved: aten.x mixes" in text


def test_stand_ins_cannot_be_used() -> None:
    with stand_ins(("an_absent_package", "an_absent_package.part", "json")):
        package = importlib.import_module("an_absent_package")
        importlib.import_module("an_absent_package.part")
        assert json is importlib.import_module("json")
    assert "an_absent_package" not in sys.modules
    with pytest.raises(ImportError, match="an_absent_package.name was called"):
        package.name()
