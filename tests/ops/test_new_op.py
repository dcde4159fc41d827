# SPDX-License-Identifier: Apache-2.0
"""tools/new_op.py: the slice that it creates is laid out, linted and sized as the project asks."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "new_op.py"
BIN = Path(sys.executable).parent
SLICE = {
    "src/cpu/pair_sum_config.h",
    "src/cpu/pair_sum_cpu.h",
    "src/cpu/pair_sum_cpu.cpp",
    "src/torch_ops/pair_sum.cpp",
    "python/ikbo/_pair_sum.py",
    "tests/ops/test_pair_sum.py",
    "docs/ops/pair_sum.md",
}


def run(*command: str | Path, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with the new slice alone, under git as the checkers want it."""
    root = tmp_path_factory.mktemp("slice")
    for name in (".clang-format", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, root)
    done = run(sys.executable, TOOL, "pair_sum", root)
    assert done.returncode == 0, done.stderr
    listed, by_hand = done.stdout.split("to add by hand:")
    assert {line.strip() for line in listed.splitlines()[1:]} == SLICE
    shared = re.findall(r"^  (\S+): \S", by_hand, flags=re.MULTILINE)
    assert len(shared) > 5
    assert [name for name in shared if not (REPOSITORY / name).is_file()] == []
    run("git", "init", "-q", cwd=root)
    run("git", "add", ".", cwd=root)
    return root


def test_creates_the_slice_and_nothing_else(created: Path) -> None:
    files = {str(path.relative_to(created)) for path in created.rglob("*.*") if path.is_file()}
    assert {name for name in files if not name.startswith(".")} - {"pyproject.toml"} == SLICE
    assert not any(re.search("@op@|@Op@", (created / name).read_text()) for name in SLICE)


@pytest.mark.parametrize("checker", ["check_layers.py", "check_sizes.py"])
def test_layers_and_sizes(created: Path, checker: str) -> None:
    done = run(sys.executable, REPOSITORY / "tools" / checker, created)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", [("check",), ("format", "--check")])
def test_python_is_clean(created: Path, command: tuple[str, ...]) -> None:
    done = run(BIN / "ruff", *command, ".", cwd=created)
    assert done.returncode == 0, done.stdout


def test_cpp_is_formatted(created: Path) -> None:
    files = [name for name in SLICE if name.endswith((".h", ".cpp"))]
    done = run(BIN / "clang-format", "--dry-run", "--Werror", *files, cwd=created)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["PairSum", "pair-sum", "1st", ""])
def test_refuses_names(name: str, tmp_path: Path) -> None:
    done = run(sys.executable, TOOL, name, tmp_path)
    assert done.returncode == 1
    assert "NAME must be in snake_case" in done.stderr


def test_refuses_to_overwrite() -> None:
    done = run(sys.executable, TOOL, "linear")
    assert done.returncode == 1
    assert "linear_config.h must not exist yet" in done.stderr
