# SPDX-License-Identifier: Apache-2.0
"""`tools/setup.sh` says what to do where it cannot go on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "cut", "df", "dirname", "env", "grep", "sha256sum", "tail", "tr")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH on which nothing of the distribution is, and a copy of the set-up without a .venv."""
    for folder in ("bin", "repo/tools"):
        (tmp_path / folder).mkdir(parents=True)
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "")
    shutil.copy(REPO / "tools" / "setup.sh", tmp_path / "repo" / "tools")
    shutil.copytree(REPO / "requirements", tmp_path / "repo" / "requirements")
    return tmp_path


def setup(machine: Path, *steps: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [machine / "repo" / "tools" / "setup.sh", *steps],
        env={"PATH": str(machine / "bin"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_root_and_sudo_it_prints_the_command_and_stops(machine: Path) -> None:
    script(machine / "bin" / "apt-get", "echo called >&2; exit 1")
    script(machine / "bin" / "dpkg-query", 'test "$3" = g++ && echo "install ok installed"')
    script(machine / "bin" / "id", "echo 1000")
    done = setup(machine, "system")
    assert done.returncode == 1
    command = done.stderr.strip().splitlines()[-1].strip()
    assert command.startswith("apt-get update && apt-get install -y --no-install-recommends cmake")
    assert "called" not in done.stderr


def test_with_all_packages_there_it_does_nothing(machine: Path) -> None:
    script(machine / "bin" / "apt-get", "exit 1")
    script(machine / "bin" / "dpkg-query", 'echo "install ok installed"')
    done = setup(machine, "system")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_installs_what_is_missing(machine: Path) -> None:
    script(machine / "bin" / "apt-get", 'echo "apt-get $*"')
    script(machine / "bin" / "dpkg-query", 'test "$3" != ninja-build && echo "ok installed"')
    script(machine / "bin" / "id", "echo 0")
    done = setup(machine, "system")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "apt-get update -q",
        "apt-get install -y -q --no-install-recommends ninja-build",
    ]


def test_another_distribution_is_named(machine: Path) -> None:
    done = setup(machine, "system")
    assert done.returncode == 1
    assert "Debian 12 and Ubuntu 24.04" in done.stderr


def test_an_old_python_is_refused(machine: Path) -> None:
    script(
        machine / "bin" / "python3.9",
        'case "$1" in -V) echo "Python 3.9.2";; *) exit 1;; esac',
    )
    done = setup(machine, "venv", PYTHON="python3.9")
    assert done.returncode == 1
    assert "Python 3.10 or newer is needed; python3.9 is Python 3.9.2" in done.stderr
    assert "PYTHON=" in done.stderr


def test_a_disk_without_room_is_named(machine: Path) -> None:
    script(machine / "bin" / "python3", "exit 0")
    (machine / "bin" / "df").unlink()
    script(machine / "bin" / "df", "echo Avail; echo 3G")
    done = setup(machine, "venv")
    assert done.returncode == 1
    assert "has 3 GiB free; .venv needs" in done.stderr


def test_unknown_step_is_named(machine: Path) -> None:
    done = setup(machine, "buld")
    assert done.returncode == 1
    assert "unknown step 'buld'\n" in done.stderr
    assert "steps: system venv cpu cuda sanitize sanitize-thread sanitize-replay\n" in done.stderr


def test_scripts_are_executable() -> None:
    for path in (".ci/run", "tools/setup.sh", "tools/lint.sh", "tools/test_torch.sh"):
        assert os.access(REPO / path, os.X_OK), path
