# SPDX-License-Identifier: Apache-2.0
"""Running packages in tests: `ikbo-replay`, the C++ process, and torch's loader in this process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ikbo._archive import read_manifest, read_replay
from ikbo._load import ops_library_path

REPOSITORY = Path(__file__).resolve().parents[2]


def replay_path() -> Path:
    """Where the binary under test should be: IKBO_REPLAY, else that of the `cpu` preset."""
    return Path(os.environ.get("IKBO_REPLAY", REPOSITORY / "build/cpu/bin/ikbo-replay"))


def may_lack_replay() -> bool:
    """No binary is there, and none was named: one that IKBO_REPLAY names must exist."""
    return "IKBO_REPLAY" not in os.environ and not replay_path().is_file()


def replay_binary() -> Path:
    path = replay_path()
    assert path.is_file(), f"{path} must exist; build it with `make build` or set IKBO_REPLAY"
    return path


def replay(package: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a package's replay cases in a process without Python."""
    return subprocess.run(
        [replay_binary(), package, "--ops-library", ops_library_path(), *options],
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(package: Path, inputs: Sequence[Tensor]) -> list[Tensor]:
    """A package's outputs, through torch's own C++ loader."""
    return list(torch._inductor.aoti_load_package(str(package))(*inputs))


def assert_replays_here(package: Path) -> None:
    """The stored cases, read back from the archive and run in this process."""
    manifest = read_manifest(package)
    compiled = torch._inductor.aoti_load_package(str(package))
    for case in manifest.replay:
        inputs, expected = read_replay(package, manifest, case)
        for actual, stored in zip(compiled(*inputs), expected, strict=True):
            torch.testing.assert_close(actual, stored, rtol=case.rtol, atol=case.atol)
