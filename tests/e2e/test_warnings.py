# SPDX-License-Identifier: Apache-2.0
"""Warnings of torch about torch stay inside of ikbo's calls; those about the model get out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import Tensor, nn

import ikbo
from tests.transform.models import rows


class Recurrent(nn.Module):
    """Its export makes torch warn of what torch's own GRU does."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        _, state = self.gru(user)
        return state[0] * item


class Keeps(nn.Module):
    """Warns, and keeps tensors in attributes, of which torch warns."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        warnings.warn("of the model's own", DeprecationWarning, stacklevel=1)
        self.first, self.last = user + item, user - item
        return self.first * self.last


def transform(model: nn.Module, user: Tensor) -> None:
    ikbo.transform(model.eval(), (user, rows(4)), ["user"], max_users=8, max_candidates=64)


def test_transform_is_quiet() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transform(Recurrent(), rows(3, 4))
    assert [str(warning.message) for warning in caught] == []


def test_warnings_about_the_model_get_out() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        transform(Keeps(), rows(4))
    texts = {str(warning.message) for warning in caught}
    assert "of the model's own" in texts
    # In any order.
    assert any("self.first" in text and "self.last" in text for text in texts)
    assert not any("LeafSpec" in text for text in texts)


def test_filters_are_as_before() -> None:
    before = list(warnings.filters)
    transform(Recurrent(), rows(3, 4))
    with pytest.raises(ValueError, match="request_only"):
        ikbo.transform(Recurrent(), (rows(3, 4), rows(4)), [])
    assert warnings.filters == before


PROGRAM = """
import ikbo
from tests.transform.models import MODELS
ranker = MODELS["mlp"]()
fast = ikbo.transform(ranker.model, ranker.inputs, list(ranker.users), max_candidates=64)
print(fast.report())
ikbo.package(fast, {path!r})
"""


def test_package_is_quiet(tmp_path: Path) -> None:
    """In a process of its own: torch warns where its modules are first imported."""
    program = PROGRAM.format(path=str(tmp_path / "model.pt2"))
    command = [sys.executable, "-W", "always", "-c", program]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
