# SPDX-License-Identifier: Apache-2.0
"""The benchmark of public models, on small models of ours: statuses, figures, page, stand-ins."""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import bench_models
from bench.public_models import measure, on_gpu, page
from bench.public_models.case import Case, Cure
from bench.public_models.stand_ins import stand_ins
from ikbo import _measured

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


def test_what_the_pass_finds_wrong_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.TransformedModule.run_nested

    def off(self: measure.TransformedModule, *args: Any, **kwargs: Any) -> Any:
        return right(self, *args, **kwargs) + 1

    monkeypatch.setattr(measure.TransformedModule, "run_nested", off)
    assert measure.measured(GOOD, [], cured=False, package=False)["status"] == "wrong"


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


@pytest.fixture(scope="module")
def prepared() -> on_gpu.Prepared:
    return on_gpu.Prepared.of(GOOD, "cpu")


@pytest.fixture(scope="module")
def gpu_rows(
    prepared: on_gpu.Prepared, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What `--device cuda` writes, of a small model on the CPU: packages and all."""
    folder, rows = tmp_path_factory.mktemp("packages"), []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(_measured, "_SECONDS", 1.0)
    monkeypatch.setattr(on_gpu, "Builds", lambda jobs, _: _Built(jobs))
    monkeypatch.setattr(
        on_gpu,
        "build",
        lambda name, form, device, path: on_gpu.write_package(
            {GOOD.name: prepared}[name], form, path
        ),
    )
    try:
        jobs = {(GOOD.name, form): folder / f"{form}.pt2" for form in on_gpu.FORMS}
        sizes = {1: (6, 6), 4: (2, 8)}
        failed = on_gpu.run([GOOD], jobs, "cpu", sizes, workers=1, add=rows.append)
    finally:
        monkeypatch.undo()
    assert failed == []
    assert {path.name for path in folder.iterdir()} == {"ours.pt2", "replicated.pt2"}
    return rows


class _Built:
    """Jobs done in this process."""

    def __init__(self, jobs: dict[Any, Callable[[], None]]) -> None:
        for job in jobs.values():
            job()

    def reasons(self) -> dict[Any, str]:
        return {}


def test_gpu_rows(gpu_rows: list[dict[str, Any]]) -> None:
    facts = [(row["case"]["ratio"], row["case"]["U"], row["case"]["B"]) for row in gpu_rows]
    assert facts == [(1, 6, 6), (4, 2, 8)]
    for row in gpu_rows:
        assert row["case"]["model"] == "good"
        assert 0 < row["max_error"] < 1e-5
        eager, package = row["peers"]["replicated"] / row["ours"], row["package"]
        speedup = {"eager": eager, "package": package["replicated"] / package["ours"]}
        assert row["speedup"] == pytest.approx(speedup)
        assert on_gpu.line_of(row).startswith(f"ours.good ratio {row['case']['ratio']}: eager ")


def test_what_is_wrong_or_fails_on_the_gpu_has_no_speed(prepared: on_gpu.Prepared) -> None:
    def off(*_: Tensor) -> list[Tensor]:
        return [torch.full((8, 1), 3.0)]

    packages: dict[str, on_gpu.Package] = {"ours": off, "replicated": "no compiler"}
    row = on_gpu.row_of(GOOD, prepared, packages, (2, 8), 4)
    assert row["package"]["ours"].startswith("wrong result: error ")
    assert row["package"]["replicated"] == "no compiler"
    assert set(row["speedup"]) == {"eager"}
    assert on_gpu.failures([row]) == [f"ours.good at ratio 4, package: {row['package']['ours']}"]

    def fails(*_: Tensor) -> list[Tensor]:
        raise RuntimeError("no memory")

    row = on_gpu.row_of(GOOD, prepared, packages | {"ours": fails}, (2, 8), 4)
    assert row["package"]["ours"] == "RuntimeError: no memory"


def test_what_is_not_transformed_on_the_gpu_fails_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(on_gpu, "Builds", lambda _jobs, _workers: _Built({}))
    jobs = {(REFUSED.name, form): tmp_path / f"{form}.pt2" for form in on_gpu.FORMS}
    rows: list[dict[str, Any]] = []
    failed = on_gpu.run([REFUSED], jobs, "cpu", {4: (2, 8)}, workers=1, add=rows.append)
    assert rows == []
    assert len(failed) == 1
    assert failed[0].startswith("ours.refused: TransformError: ")


def test_a_package_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {
        ("a", "ours"): functools.partial(Path.touch, tmp_path / "a"),
        ("b", "ours"): functools.partial(Path.read_text, tmp_path / "b"),
    }
    reasons = on_gpu.Builds(jobs, workers=1).reasons()
    assert (tmp_path / "a").exists()
    assert set(reasons) == {("b", "ours")}
    assert reasons["b", "ours"] == "its process ended with exit code 1"
    assert "('a', 'ours'): built after " in capsys.readouterr().out


def test_page_of_a_gpu(rows: list[dict[str, Any]], gpu_rows: list[dict[str, Any]]) -> None:
    facts = {"device": "a CPU", "threads": 2, "torch": "2", "date": "today"}
    cpu = {"environment": facts, "rows": [rows[1]]}
    first, second = gpu_rows
    first = first | {"speedup": {"eager": 1.5, "package": 2.25, "replayed": 3.0}}
    second = second | {"speedup": {"eager": 4.0}, "replayed": {"ours": "no graph"}}
    second |= {"case": second["case"] | {"ratio": 64}}
    gpu = {"environment": facts | {"device": "a GPU"}, "rows": [first, second]}
    text = page.text(cpu, gpu)
    assert "Measured on a GPU, PyTorch 2, today." in text
    assert "| ours good | eager | 1.50 | - | 4.00 | - |" in text
    assert "| ours good | package | 2.25 | - | - | - |" in text
    assert "| ours good | package as a CUDA graph | 3.00 | - | - | - |" in text
    assert "- ours good at 64, package as a CUDA graph, transformed: no graph" in text
    without = page.text(cpu)
    assert "GPU" not in without
    assert text.startswith(without)


@pytest.mark.parametrize("option", ["--packages", "--page"])
def test_the_gpu_is_measured_alone(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_models, "cases", lambda: [GOOD])
    monkeypatch.setattr(sys, "argv", ["bench_models", "--device", "cuda", option])
    with pytest.raises(SystemExit):
        bench_models.arguments_of()
    assert "--device cuda must come without --only" in capsys.readouterr().err


def test_the_page_takes_the_gpu_file_where_it_is_there(
    rows: list[dict[str, Any]],
    gpu_rows: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"device": "a CPU", "threads": 2, "torch": "2", "date": "today"}
    for name in ("RESULT", "ON_GPU", "PAGE"):
        monkeypatch.setattr(bench_models, name, tmp_path / name)
    bench_models.RESULT.write_text(json.dumps({"environment": facts, "rows": [rows[1]]}))
    bench_models.write_page()
    assert "## On a GPU" not in bench_models.PAGE.read_text()
    bench_models.ON_GPU.write_text(json.dumps({"environment": facts, "rows": gpu_rows}))
    bench_models.write_page()
    assert "## On a GPU" in bench_models.PAGE.read_text()


def test_stand_ins_cannot_be_used() -> None:
    with stand_ins(("an_absent_package", "an_absent_package.part", "json")):
        package = importlib.import_module("an_absent_package")
        importlib.import_module("an_absent_package.part")
        assert json is importlib.import_module("json")
    assert "an_absent_package" not in sys.modules
    with pytest.raises(ImportError, match="an_absent_package.name was called"):
        package.name()
