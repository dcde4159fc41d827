# SPDX-License-Identifier: Apache-2.0
"""Packages in two stages: what is where, and that answers are those of one program."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo import _inductor
from ikbo._archive import Staged, read_manifest
from ikbo._manifest import CANDIDATE_STAGE, USER_STAGE
from ikbo._programs import export
from ikbo._served import from_module
from ikbo._stages import Stages, take_apart
from ikbo.transform import TransformedModule
from tests.e2e.conftest import AskPackage
from tests.e2e.models import history_ranker
from tests.e2e.replay import replay
from tests.e2e.test_batch_mates import make_requests, merge, ranker_rows

ROUNDING = 16 * torch.finfo(torch.float32).eps


def sources(package: Path, program: str) -> str:
    """The C++ loops of one program of a package."""
    with zipfile.ZipFile(package) as archive:
        names = [
            name
            for name in archive.namelist()
            if f"/{program}/" in name and name.endswith(".kernel.cpp")
        ]
        return "\n".join(archive.read(name).decode() for name in names)


def test_replays_in_cpp(staged_package: Path) -> None:
    done = replay(staged_package)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = len(read_manifest(staged_package).replay)
    assert done.stdout.endswith(f"\n{cases} passed, 0 failed\n")


def test_each_stage_has_its_own_work_alone(staged_package: Path) -> None:
    """`tanh`, `erf` and the norm's root are the user's arithmetic, `sin` the candidates'."""
    users = sources(staged_package, USER_STAGE)
    candidates = sources(staged_package, CANDIDATE_STAGE)
    for marker in ("tanh(", "erf(", "sqrt("):
        assert marker in users
        assert marker not in candidates
    assert "sin(" in candidates
    assert "sin(" not in users


def test_the_manifest_says_what_crosses(staged_package: Path, transformed_package: Path) -> None:
    manifest = read_manifest(staged_package)
    assert manifest.user_stage is not None
    assert all(spec.role == "user" for spec in manifest.user_stage.state)
    assert {"float32", "bool"} == {spec.dtype for spec in manifest.user_stage.state}
    assert set(manifest.program_inputs) == {USER_STAGE, CANDIDATE_STAGE}
    whole = read_manifest(transformed_package)
    assert [spec.name for spec in manifest.inputs] == [spec.name for spec in whole.inputs]
    assert manifest.inputs == whole.inputs, "ranges of ids and lengths are the whole model's"
    assert (manifest.outputs, manifest.ops) == (whole.outputs, whole.ops)


def test_a_package_of_one_program_is_as_it_was(transformed_package: Path) -> None:
    with zipfile.ZipFile(transformed_package) as archive:
        [entry] = [name for name in archive.namelist() if name.endswith("/manifest.json")]
        document = json.loads(archive.read(entry))
        programs = {n.split("/")[3] for n in archive.namelist() if "/aotinductor/" in n}
    assert document["format_version"] == 1
    assert "user_stage" not in document
    assert programs == {"model"}


@pytest.mark.parametrize("seed", range(3))
def test_alone_merged_and_kept_are_equal_but_for_rounding(
    staged_package: Path, transformed_package: Path, seed: int
) -> None:
    """One program, both stages, and candidates that read states made alone, or with others."""
    torch.manual_seed(seed)
    manifest = read_manifest(staged_package)
    names = [spec.name for spec in manifest.inputs]
    whole = torch._inductor.aoti_load_package(str(transformed_package))
    staged, alone = Staged(staged_package, manifest), Staged(staged_package, manifest, alone=True)
    for sizes in ([(1, 1), (1, 300)], [(4, 3), (1, 500), (2, 33)], [(1, 70)] * 8):
        requests = make_requests(ranker_rows, sizes)
        merged = merge(manifest, requests)
        expected = whole(*(merged[name] for name in names))
        for run in (staged, alone):
            actual = run(*(merged[name] for name in names))
            for got, want in zip(actual, expected, strict=True):
                assert (got - want).abs().max() <= ROUNDING
        states = staged.state(merged)
        first = 0
        for request in requests:
            count = len(request["user_id"])
            for mine, all_rows in zip(staged.state(request), states, strict=True):
                rows = all_rows[first : first + count]
                if mine.dtype == torch.bool:
                    assert torch.equal(mine, rows)
                else:
                    assert (mine - rows).abs().max() <= ROUNDING * mine.abs().max()
            first += count


class Awkward(nn.Module):
    """What crosses is, or comes from, no rows of users: the histories of all users as one matrix, a
    matrix with a column for each user, a size, an input seen in another way, a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.events, self.deep = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("bias", torch.randn(3))

    def forward(
        self, history: Tensor, length: Tensor, price: Tensor, cand_to_user: Tensor
    ) -> dict[str, Any]:
        num_users, events, width = history.shape
        rows = torch.tanh(self.events(history.reshape(num_users * events, width)))
        last = rows.index_select(0, cand_to_user * events + events - 1)
        pooled = torch.tanh(history.sum(1))
        columns = torch.exp(pooled.t())
        seen = columns.index_select(1, cand_to_user).t()
        first = ikbo.expand(history[:, 0], cand_to_user)
        largest, place = history.amax(2).max(1)
        return {
            "score": self.deep(last) * price + self.bias / num_users,
            "seen": [seen, first],
            "largest": ikbo.expand(largest * length, cand_to_user) + price[:, 0],
            "pooled": pooled,
            "place": place,
            "length": length,
        }


def awkward() -> Stages:
    served = from_module(Awkward().eval(), *awkward_inputs(), 8, 512)
    return take_apart(served, _inductor.lowered(export(served, served.module), served.device))


def awkward_inputs() -> tuple[dict[str, Tensor], Mapping[str, str]]:
    torch.manual_seed(4)
    inputs = {
        "history": torch.randn(9, 5, 4),
        "length": torch.rand(9),
        "price": torch.rand(40, 3),
        "cand_to_user": torch.randint(9, (40,), dtype=torch.int32),
    }
    roles = {"history": "user", "length": "user", "price": "candidate", "cand_to_user": "index"}
    return inputs, roles


def test_what_is_no_rows_of_users_is_not_kept() -> None:
    stages = awkward()
    shapes = [spec.shape for spec in stages.user_stage.state]
    assert all(shape[0] == -1 and min(shape[1:], default=1) > 0 for shape in shapes)
    assert sorted(shapes) == [(-1,), (-1,), (-1, 4)], "place, largest * length, pooled"
    assert {spec.dtype for spec in stages.user_stage.state} == {"float32", "int64"}
    assert stages.user_stage.passed == ("history", "length")


@pytest.mark.parametrize(("num_users", "num_candidates"), [(1, 1), (1, 30), (6, 40), (8, 3)])
def test_stages_compute_what_the_module_does(num_users: int, num_candidates: int) -> None:
    """Also with the state of each user made alone."""
    stages = awkward()
    users, candidates = (stages.programs[name].module() for name in (USER_STAGE, CANDIDATE_STAGE))
    inputs, _ = awkward_inputs()
    index = torch.randint(num_users, (num_candidates,), dtype=torch.int32)
    rows = {name: inputs[name][:num_users] for name in ("history", "length")}
    price = inputs["price"][:num_candidates]
    expected = torch.utils._pytree.tree_leaves(
        Awkward().eval()(**rows, price=price, cand_to_user=index)
    )
    each = [users(*(x[u : u + 1] for x in rows.values())) for u in range(num_users)]
    alone = [torch.cat(parts) for parts in zip(*each, strict=True)]
    for state in (users(*rows.values()), alone):
        actual = candidates(*rows.values(), price, index, *state)
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_weights_that_both_stages_read_are_counted() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, seen: Tensor, item: Tensor, cand_to_user: Tensor) -> Tensor:
            return (ikbo.expand(self.table(seen), cand_to_user) * self.table(item)).sum(1)

    inputs = {
        "seen": torch.arange(4),
        "item": torch.arange(9),
        "cand_to_user": torch.zeros(9, dtype=torch.int32),
    }
    roles = {"seen": "user", "item": "candidate", "cand_to_user": "index"}
    served = from_module(Shared().eval(), inputs, roles, 4, 64)
    program = _inductor.lowered(export(served, served.module), served.device)
    assert take_apart(served, program).shared_bytes == 50 * 8 * 4
    assert awkward().shared_bytes == 0, "the layer over all users' histories is in one of them"


def test_refuses_what_has_no_user_stage(
    transformed: TransformedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bilinear(nn.Module):
        def forward(self, x_user: Tensor, x_cand: Tensor, cand_to_user: Tensor) -> Tensor:
            return (ikbo.expand(x_user, cand_to_user) * x_cand).sum(1)

    inputs = {
        "x_user": torch.randn(3, 4),
        "x_cand": torch.randn(7, 4),
        "cand_to_user": torch.zeros(7, dtype=torch.int32),
    }
    path = tmp_path / "model.pt2"
    common: dict[str, Any] = {"max_candidates": 64, "user_stage": True}
    with pytest.raises(ValueError, match=r"nothing beyond the inputs \['x_user'\]"):
        ikbo.package(
            Bilinear().eval(),
            path,
            example_inputs=inputs,
            roles={"x_user": "user", "x_cand": "candidate", "cand_to_user": "index"},
            max_users=4,
            **common,
        )
    with pytest.raises(ValueError, match="user_stage must come with user inputs"):
        ikbo.package(
            nn.Linear(4, 1).eval(),
            path,
            example_inputs=(inputs["x_cand"],),
            roles={"input": "candidate"},
            **common,
        )
    model, example = history_ranker()
    small = ikbo.transform(model, example, ["user_id", "history", "history_length"])
    monkeypatch.setitem(small.spec.pays_from, "package", ((1, 4),))
    with pytest.raises(ValueError, match="user_stage and both_forms must not come together"):
        ikbo.package(small, path, both_forms=True, user_stage=True)
    assert not path.exists()


def test_the_command_line_asks_for_it(ask_package: AskPackage) -> None:
    for flags, wanted in (([], False), (["--user-stage"], True)):
        assert ask_package([], flags)["user_stage"] is wanted
