# SPDX-License-Identifier: Apache-2.0
"""User-only arithmetic runs at U: generated code has none of it in a loop over candidates."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikbo._manifest import read_manifest
from tests.e2e.generated_code import read_cpu_code

USER_MARKERS = ("tanh(", "erf(", "rsqrt(")
CANDIDATE_MARKER = "sin("


@pytest.mark.parametrize(
    "package", ["transformed_package", "hand_written_package", "opaque_package"]
)
def test_user_arithmetic_stays_at_user_batch(package: str, request: pytest.FixtureRequest) -> None:
    code = read_cpu_code(request.getfixturevalue(package))
    for marker in USER_MARKERS:
        assert marker in code.user
        assert marker not in code.candidate
    assert CANDIDATE_MARKER in code.candidate
    assert CANDIDATE_MARKER not in code.user


def test_detector_sees_recomputation(index_select_package: Path) -> None:
    """A plain index_select lets Inductor recompute the user's arithmetic for every candidate."""
    assert any(marker in read_cpu_code(index_select_package).candidate for marker in USER_MARKERS)


def test_expand_writes_nothing_at_candidate_batch(hand_written_package: Path) -> None:
    """The gather is part of the loop that uses it: no call, no buffer of its own."""
    assert "ikbo::expand" not in {op.name for op in read_manifest(hand_written_package).ops}


def test_opaque_identity_takes_the_lowering_s_place(opaque_package: Path) -> None:
    ops = {op.name for op in read_manifest(opaque_package).ops}
    assert "ikbo::_realise" in ops
    assert "ikbo::expand" not in ops
