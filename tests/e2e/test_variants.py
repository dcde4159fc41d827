# SPDX-License-Identifier: Apache-2.0
"""One package with both forms of a model: the sizes of a run choose, weights are held once."""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo import _inductor_products
from ikbo._archive import read_manifest
from ikbo.transform import TransformedModule
from ikbo.transform.variants import Variant, variants_of
from tests.e2e.replay import replay, run

ROWS, TABLE = 20_000, 32
# From 1 user on the split pays from 3 candidates on, from 4 users on from 9.
PAYS_FROM = ((1, 3), (4, 9))


class Ranker(nn.Module):
    """A large table that both forms read, a layer whose weight one of them slices.

    A layer that runs at U in one form and at B in the other. Layers of one width, so that a branch
    uses a buffer again some steps after it was free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, TABLE)
        self.layers = nn.ModuleList(nn.Linear(width, 16) for width in (TABLE + 6, 16, 16))
        self.of_user, self.last = nn.Linear(TABLE, TABLE), nn.Linear(16, 1)

    def forward(self, user_id: Tensor, item: Tensor) -> Tensor:
        user = self.of_user(self.table(user_id))
        x = torch.cat([torch.erf(user), torch.sin(item)], 1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x).squeeze(1)


@pytest.fixture(scope="module")
def ranker() -> tuple[nn.Module, TransformedModule]:
    torch.manual_seed(0)
    model = Ranker().eval()
    inputs = {"user_id": torch.arange(24) * 800, "item": torch.randn(24, 6)}
    fast = ikbo.transform(model, inputs, ["user_id"], max_users=8, max_candidates=64)
    fast.spec = replace(fast.spec, pays_from={"package": PAYS_FROM})
    return model, fast


@pytest.fixture(scope="module")
def package(
    ranker: tuple[nn.Module, TransformedModule], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("variants") / "both.pt2"
    with mock.patch.object(_inductor_products, "_SMALL", 0):
        ikbo.package(ranker[1], path, both_forms=True)
    return path


def test_parts_are_disjoint_and_cover_the_range() -> None:
    for table, limits in (
        (PAYS_FROM, (8, 64)),
        (((1, 1),), (3, 5)),
        (((1, 99),), (3, 5)),
        (((1, 2), (2, 6), (9, 1)), (7, 5)),
    ):
        parts = variants_of(table, limits)
        for users in range(1, limits[0] + 1):
            first = [b for u, b in table if u <= users][-1]
            for candidates in range(1, limits[1] + 1):
                (part,) = [p for p in parts if p.holds(users, candidates)]
                assert part.form == ("transformed" if candidates >= first else "replicated")


def test_table_must_begin_with_one_user() -> None:
    with pytest.raises(ValueError, match="must begin with 1 user; got"):
        variants_of(((2, 4),), (8, 64))


def test_manifest_has_the_variants(package: Path) -> None:
    variants = read_manifest(package).spec["variants"]
    assert variants[0] == {"form": "replicated", "users": [1, 3], "candidates": [1, 2]}
    assert [v["form"] for v in variants] == ["replicated", "transformed"] * 2


@torch.no_grad()
def test_every_part_computes_the_model(
    ranker: tuple[nn.Module, TransformedModule], package: Path
) -> None:
    for users, candidates in ((1, 1), (1, 2), (1, 3), (3, 2), (3, 3), (4, 8), (4, 9), (8, 64)):
        index = torch.arange(candidates, dtype=torch.int32) * 3 % users
        user_id, item = torch.randint(ROWS, (users,)), torch.randn(candidates, 6)
        (got,) = run(package, [user_id, item, index])
        torch.testing.assert_close(got, ranker[0](user_id[index.long()], item))


def test_replays_in_cpp_with_a_case_for_each_part(package: Path) -> None:
    cases = read_manifest(package).replay
    assert {f"variant_{i}" for i in range(4)} <= {case.id for case in cases}
    done = replay(package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(cases)} passed, 0 failed" in done.stdout


def test_weights_are_held_once(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        size = sum(info.file_size for info in archive.infolist() if "aotinductor" in info.filename)
    assert 4 * ROWS * TABLE < size < 1.5 * 4 * ROWS * TABLE


def code_of(package: Path) -> str:
    with zipfile.ZipFile(package) as archive:
        return "".join(archive.read(n).decode() for n in archive.namelist() if n.endswith(".cpp"))


def test_both_forms_are_in_the_code(package: Path) -> None:
    """The user's `erf` of the table: at U in one branch, for every candidate in the other."""
    code = code_of(package)
    assert code.count("// subgraph: true_graph_0") == 1
    assert code.count("// subgraph: false_graph_0") == 1


def test_branches_are_frozen(package: Path) -> None:
    """Each branch's layers are packed for oneDNN, as they are in a program without branches."""
    _, split, whole = re.split("// subgraph: (?:true|false)_graph_0", code_of(package))
    products = re.compile(r"aoti_torch_cpu_(\w*(?:mm|linear)\w*)\(")
    assert products.findall(split) == ["_linear_pointwise"] * 6
    assert products.findall(whole) == ["_linear_pointwise"] * 5


def test_packed_weights_are_held_once(package: Path) -> None:
    """Those of the layers behind the first, which both branches pack; the first is taken apart.

    The user's layer runs at U rows in one branch and at B rows in the other, packed alike.
    """
    shapes = re.findall(r"constants_info_\[\d+\]\.shape = \{(\d+, \d+)\}", code_of(package))
    first = [f"16, {TABLE + 6}", f"16, {TABLE}", "16, 6"]
    others = [f"{ROWS}, {TABLE}", f"{TABLE}, {TABLE}", "16, 16", "16, 16", "1, 16"]
    assert sorted(shapes) == sorted([*first, *others])


def test_one_variant_has_no_branch(transformed: TransformedModule) -> None:
    assert transformed.spec.variants == (Variant("transformed", (1, 16), (1, 2048)),)
