# SPDX-License-Identifier: Apache-2.0
"""Packages that several tests share; each is compiled once per process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ikbo
from ikbo import _inductor
from ikbo.transform import TransformedModule, device_costs
from tests.e2e.models import Recipe, hand_written, history_ranker


@pytest.fixture(scope="session", autouse=True)
def every_split_is_made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The models of most tests are so small that no split would pay: for them none costs anything.

    Tests of the cost model pass the costs that they are about.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_costs, "SHIPPED", tmp_path_factory.mktemp("no_devices"))
        yield


def _write(recipe: Recipe, path: Path) -> Path:
    ikbo.package(
        recipe.module,
        path,
        example_inputs=recipe.inputs,
        roles=recipe.roles,
        max_users=recipe.max_users,
        max_candidates=recipe.max_candidates,
        name=path.stem,
        version="7",
    )
    return path


@pytest.fixture(scope="session")
def transformed() -> TransformedModule:
    """An unmodified model with user history and target attention, transformed."""
    model, inputs = history_ranker()
    request_only = ["user_id", "history", "history_length"]
    return ikbo.transform(model, inputs, request_only, max_users=16, max_candidates=2048)


@pytest.fixture(scope="session")
def transformed_package(
    transformed: TransformedModule, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The package of `transformed`; it calls `ikbo::target_attention`."""
    path = tmp_path_factory.mktemp("packages") / "transformed.pt2"
    ikbo.package(transformed, path, version="7")
    return path


@pytest.fixture(scope="session")
def staged_package(
    transformed: TransformedModule, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The package of `transformed` with a user stage."""
    path = tmp_path_factory.mktemp("packages") / "staged.pt2"
    ikbo.package(transformed, path, version="7", user_stage=True)
    return path


@pytest.fixture(scope="session")
def hand_written_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model written for two batches; users cross to candidates by `ikbo.expand`."""
    path = tmp_path_factory.mktemp("packages") / "hand_written.pt2"
    return _write(hand_written(ikbo.expand), path)


@pytest.fixture(scope="session")
def opaque_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hand_written_package` as it is made where torch's lowering registry is untested."""
    path = tmp_path_factory.mktemp("packages") / "opaque.pt2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_inductor, "register_expand_lowering", lambda: False)
        return _write(hand_written(ikbo.expand), path)


@pytest.fixture(scope="session")
def index_select_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same again, but users cross to candidates by a plain `index_select`."""
    path = tmp_path_factory.mktemp("packages") / "index_select.pt2"
    recipe = hand_written(lambda x_user, cand_to_user: x_user.index_select(0, cand_to_user))
    return _write(recipe, path)
