# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, what it says, and that errors come without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ikbo
from ikbo import cli
from ikbo.transform import Spec, TransformedModule
from tests.e2e.models import history_ranker

MODEL = "tests.e2e.models:build"
USERS = "user_id,history,history_length"
REPOSITORY = Path(__file__).resolve().parents[2]


def ikbo_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ikbo", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=300,
    )


@pytest.mark.parametrize("command", ["transform", "explain", "package"])
def test_help_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    options = [
        "--request-only",
        "--columns",
        "--row-count",
        "--max-users",
        "--max-candidates",
        "--output",
        "MODEL",
    ]
    own = {
        "transform": [],
        "explain": ["--json", "--html"],
        "package": ["--role", "--name", "--version"],
    }
    for option in options + own[command]:
        assert option in text
    assert "returns\n(model, example_inputs)" in text


def test_explain_prints_the_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["explain", MODEL, "--request-only", USERS, "--max-users", "16"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr()
    assert "scaled_dot_product_attention" in shown.out
    assert "transforming and verifying" in shown.err
    report = tmp_path / "spec.json"
    assert cli.main([*arguments, "--json", "-o", str(report)]) == 0
    spec = json.loads(report.read_text())
    assert (spec["max_users"], spec["max_candidates"]) == (16, 8192)
    page = tmp_path / "spec.html"
    assert cli.main(["report", str(report), "-o", str(page)]) == 0
    assert page.read_text() == Spec.from_json(report.read_text()).to_html()


def test_report_of_a_package(
    transformed: TransformedModule, transformed_package: Path, tmp_path: Path
) -> None:
    page = tmp_path / "spec.html"
    assert cli.main(["report", str(transformed_package), "-o", str(page)]) == 0
    assert page.read_text() == transformed.spec.to_html()


def test_report_of_a_package_without_spec(
    hand_written_package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(hand_written_package), "-o", str(tmp_path / "x.html")]) == 1
    assert "has no spec: its model was not made by ikbo.transform" in capsys.readouterr().err


def test_transform_saves_a_program(tmp_path: Path) -> None:
    """In a process of its own, as a user calls it; the saved program runs with two batches."""
    path = tmp_path / "program.pt2"
    done = ikbo_command("transform", MODEL, "--request-only", USERS, "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}" in done.stderr
    model, example = history_ranker()
    users = {name: example[name][:2] for name in USERS.split(",")}
    items = {name: example[name][:5] for name in ("item_id", "price")}
    index = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    program = torch.export.load(path).module()
    with torch.no_grad():
        actual = program(**users, **items, cand_to_user=index)
        expected = model(**{name: x[index] for name, x in users.items()}, **items)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


PACKED = {
    "columns": ["--request-only", "x[:, [0, 1:5]]"],
    "names": ["--request-only", "x.user,x.history", "--columns", "x=user,history:4,price,item"],
}


@pytest.mark.parametrize("name", PACKED)
def test_columns_of_a_packed_input(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "tests.e2e.models:build_packed", "--json", *PACKED[name]]) == 0
    spec = json.loads(capsys.readouterr().out)
    assert spec["columns"] == {"x.user": [0, 1, 2, 3, 4], "x.cand": [5, 6]}


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Calls of `ikbo.package`, which writes nothing but a file of that name."""
    calls: list[dict] = []

    def record(module: torch.nn.Module, path: str, **options: object) -> object:
        calls.append({"module": module, "path": path, **options})
        Path(path).write_bytes(b"package")
        return type("Manifest", (), {"max_users": 1, "max_candidates": 2, "replay": ()})()

    monkeypatch.setattr(ikbo, "package", record)
    return calls


def test_package_of_an_unmodified_model(packaged: list[dict], tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt2")
    options = ["--request-only", USERS, "--name", "rank", "--version", "2", "--max-users", "4"]
    assert cli.main(["package", MODEL, *options, "-o", path]) == 0
    [call] = packaged
    assert call["module"].spec.max_users == 4
    assert (call["path"], call["name"], call["version"]) == (path, "rank", "2")


def test_package_of_a_model_with_roles(packaged: list[dict], tmp_path: Path) -> None:
    _, example = history_ranker()
    roles = [option for name in example for option in ("--role", f"{name}=candidate")]
    options = [*roles, "--max-candidates", "99", "-o", str(tmp_path / "model.pt2")]
    assert cli.main(["package", MODEL, *options]) == 0
    [call] = packaged
    assert call["roles"] == dict.fromkeys(example, "candidate")
    assert (call["max_users"], call["max_candidates"]) == (None, 99)


ERRORS = {
    "no function": (["explain", "tests.e2e.models"], "must be MODULE:FUNCTION"),
    "no module": (["explain", "absent:build"], "No module named 'absent'"),
    "no such function": (["explain", "tests.e2e.models:absent"], "'absent' is none"),
    "factory fails": (["explain", "tests.e2e.models:broken"], "LookupError: no such table"),
    "no pair": (["explain", "tests.e2e.models:not_a_pair"], "must return (model, example_inputs)"),
    "unknown input": (["explain", MODEL], "'ghost', which is no input of the model"),
    "suffix": (["transform", MODEL, "-o", "x.bin"], "--output must end with .pt2"),
    "package suffix": (["package", MODEL, "-o", "x.bin"], "existing folder; got 'x.bin'"),
    "folder": (["package", MODEL, "-o", "absent/x.pt2"], "existing folder; got 'absent/x.pt2'"),
    "columns": (["explain", MODEL, "--columns", "x=a:0"], "NAME=COLUMN[:WIDTH],... with each"),
    "row count": (["explain", MODEL, "--row-count", "price=x"], "--row-count must be NAME=N; got"),
    "rows": (["explain", MODEL, "--row-count", "price=7"], "a divisor of its 24 rows; got 7"),
    "both": (["package", MODEL, "-o", "x.pt2", "--role", "a=user"], "either --request-only or"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_has_no_traceback(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = ERRORS[case]
    assert cli.main([*arguments, "--request-only", "ghost"]) == 1
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert text in shown.err


def test_role_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["package", MODEL, "-o", "x.pt2", "--role", "user"]) == 1
    assert "--role must be NAME=ROLE; got 'user'" in capsys.readouterr().err
