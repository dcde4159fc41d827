# SPDX-License-Identifier: Apache-2.0
"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import ikbo
from ikbo import cli

# Flags before the model, and after it, to the keyword arguments that `ikbo.package` is given.
AskPackage = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]


@pytest.fixture
def ask_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AskPackage:
    """Runs `ikbo package` for candidates and users, up to its call of `ikbo.package`."""
    given: dict[str, Any] = {}

    class AskedError(Exception):
        pass

    def package(*_: Any, **arguments: Any) -> None:
        given.update(arguments)
        raise AskedError

    monkeypatch.setattr(ikbo, "package", package)
    role = ("user_id", "user"), ("item_id", "candidate"), ("cand_to_user", "index")
    roles = [text for name, kind in role for text in ("--role", f"{name}={kind}")]
    rest = ["tests.e2e.models:build", *roles, "-o", str(tmp_path / "m.pt2")]

    def ask(before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
        given.clear()
        with pytest.raises(AskedError):
            cli.main(["package", *before, *rest, *after])
        return dict(given)

    return ask
