# SPDX-License-Identifier: Apache-2.0
"""User-only arithmetic runs at U: generated code has none of it in a loop over candidates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import ikbo
from ikbo._archive import read_manifest
from tests.e2e.generated_code import read_code
from tests.e2e.models import Recipe, hand_written

USER_MARKERS = ("tanh(", "erf(", "sqrt(")
CANDIDATE_MARKER = "sin("


def assert_user_arithmetic_at_user_batch(package: Path) -> None:
    code = read_code(package)
    for marker in USER_MARKERS:
        assert marker in code.user
        assert marker not in code.candidate
    assert CANDIDATE_MARKER in code.candidate
    assert CANDIDATE_MARKER not in code.user


@pytest.mark.parametrize(
    "package", ["transformed_package", "hand_written_package", "opaque_package"]
)
def test_user_arithmetic_stays_at_user_batch(package: str, request: pytest.FixtureRequest) -> None:
    assert_user_arithmetic_at_user_batch(request.getfixturevalue(package))


def test_detector_sees_recomputation(index_select_package: Path) -> None:
    """A plain index_select lets Inductor recompute the user's arithmetic for every candidate."""
    code = read_code(index_select_package)
    assert "tanh(" in code.candidate
    assert "erf(" in code.candidate


def test_expand_writes_nothing_at_candidate_batch(hand_written_package: Path) -> None:
    """The gather is part of the loop that uses it: no call, no buffer of its own."""
    assert "ikbo::expand" not in {op.name for op in read_manifest(hand_written_package).ops}


def test_opaque_identity_takes_the_lowering_s_place(opaque_package: Path) -> None:
    ops = {op.name for op in read_manifest(opaque_package).ops}
    assert "ikbo::_realise" in ops
    assert "ikbo::expand" not in ops


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="Triton generates code for the GPU that it finds, and this machine has none",
)


def write_cuda_package(recipe: Recipe, path: Path) -> Path:
    def to_gpu(x: object) -> object:
        return x.cuda() if isinstance(x, torch.Tensor) else x

    module = recipe.module.cuda()
    # A packed weight is for one device: it is packed anew, not moved.
    packed = ikbo.prepack(module.get_buffer("exact")[:, :6], [6])
    module.register_buffer("exact_packed", packed)
    ikbo.package(
        module,
        path,
        example_inputs=pytree.tree_map(to_gpu, recipe.inputs),
        roles=recipe.roles,
        max_users=recipe.max_users,
        max_candidates=recipe.max_candidates,
    )
    return path


@needs_gpu
def test_user_arithmetic_stays_at_user_batch_on_the_gpu(tmp_path: Path) -> None:
    """Packaging runs the replay cases on the GPU and compares, too."""
    package = write_cuda_package(hand_written(ikbo.expand), tmp_path / "cuda.pt2")
    assert read_manifest(package).device == "cuda"
    assert_user_arithmetic_at_user_batch(package)


@needs_gpu
def test_detector_sees_recomputation_on_the_gpu(tmp_path: Path) -> None:
    recipe = hand_written(lambda x_user, cand_to_user: x_user.index_select(0, cand_to_user))
    code = read_code(write_cuda_package(recipe, tmp_path / "cuda.pt2"))
    assert "tanh(" in code.candidate
    assert "erf(" in code.candidate
