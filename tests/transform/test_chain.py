# SPDX-License-Identifier: Apache-2.0
"""More than two levels: a user sees vendors, each with items of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import ikbo
from ikbo.transform import ChainedModule, TransformError
from ikbo.transform.cost import COUNTER_FORMULAS
from ikbo.transform.levels import levels_of
from tests.transform.models import ROWS, S, padding, rows

USERS, VENDORS, ITEMS = 3, 7, 40
D = 16


class Marketplace(nn.Module):
    """A vendor's tower reads its user; items attend to the user's history and read both."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Linear(24, D)
        self.vendor = nn.Linear(D + 8, D)
        self.keys = nn.Linear(D, 2 * D)
        self.query = nn.Linear(6, D)
        self.fields = nn.Linear(3, 4)
        self.first = nn.Linear(3 * D + 6, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32 + 4 * D, 2)

    def forward(
        self, user: Tensor, history: Tensor, mask: Tensor, vendor: Tensor, item: Tensor
    ) -> dict[str, Tensor]:
        u = self.user(user).relu()
        v = functional.silu(self.vendor(torch.cat([u, vendor], 1)))
        k, value = self.keys(history).chunk(2, -1)
        q = self.query(item)
        attended = functional.scaled_dot_product_attention(
            q[:, None, None], k[:, None], value[:, None], mask[:, None, None]
        )[:, 0, 0]
        fields = self.fields(torch.stack([u, v, q], 2)).flatten(1)
        x = self.norm(self.first(torch.cat([u, v, item, attended], 1)).relu())
        out = self.last(torch.cat([x, fields], 1))
        return {"click": out[:, 0] + (u * v).sum(1), "order": out[:, 1]}


CHAIN = {"user": ["user", "history", "mask"], "vendor": ["vendor"]}


def inputs() -> dict[str, Tensor]:
    return {
        "user": rows(24),
        "history": rows(S, D),
        "mask": padding(),
        "vendor": rows(8),
        "item": rows(6),
    }


class Request:
    """Inputs at their batches, the indices, and all of it repeated to the items."""

    def __init__(self, example: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        # The last user has no vendor, and the last vendor no item.
        self.links = {
            "vendor_to_user": torch.randint(USERS - 1, (VENDORS,), generator=generator).int(),
            "cand_to_vendor": torch.randint(VENDORS - 1, (ITEMS,), generator=generator).int(),
        }
        to_vendor = self.links["cand_to_vendor"].long()
        to_user = self.links["vendor_to_user"].long()[to_vendor]
        self.inputs, self.repeated = {}, {}
        for name, x in example.items():
            size, index = (USERS, to_user) if name in CHAIN["user"] else (ITEMS, slice(None))
            if name == "vendor":
                size, index = VENDORS, to_vendor
            self.inputs[name] = x[torch.arange(size) % ROWS]
            self.repeated[name] = self.inputs[name][index]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Marketplace().eval()


@pytest.fixture(scope="module")
def example() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return inputs()


@pytest.fixture(scope="module")
def chained(model: nn.Module, example: dict[str, Tensor]) -> ChainedModule:
    return ikbo.transform(model, example, CHAIN, max_users=8, max_candidates=100)


@torch.no_grad()
def test_results(model: nn.Module, example: dict[str, Tensor], chained: ChainedModule) -> None:
    request = Request(example)
    got = chained(**request.inputs, **request.links)
    want = model(**request.repeated)
    assert set(got) == set(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


def test_levels_and_roles(chained: ChainedModule) -> None:
    assert chained.levels == ("user", "vendor", "candidate")
    assert chained.roles == {
        "user": "user",
        "history": "user",
        "mask": "user",
        "vendor": "vendor",
        "item": "candidate",
        "vendor_to_user": "index",
        "cand_to_vendor": "index",
    }
    assert list(chained.specs) == ["vendor", "candidate"]


def batches(chained: ChainedModule, op: str) -> list[tuple[int, ...]]:
    """The batches of an operator's operands in the program, as levels; weights are left out."""
    nodes = {n.name: n for n in chained.exported_program.graph.nodes}
    symbols = {}
    for name, role in zip(
        chained.exported_program.graph_signature.user_inputs, chained.roles.values(), strict=True
    ):
        if role != "index":
            size = nodes[str(name)].meta["val"].shape[0].node.expr
            symbols[size] = chained.levels.index(role)
    found = []
    for node in nodes.values():
        if str(node.target) == op:
            values = [n.meta["val"] for n in node.all_input_nodes]
            sizes = [v.shape[0] for v in values if isinstance(v, Tensor)]
            known = [s.node.expr for s in sizes if isinstance(s, torch.SymInt)]
            found.append(tuple(symbols[s] for s in known))
    return found


def test_values_cross_between_neighbours(chained: ChainedModule) -> None:
    """The vendor's products read users; the attention reads its user's rows, not the vendor's."""
    assert set(batches(chained, "ikbo.linear.default")) == {(0, 1, 1)}
    assert set(batches(chained, "ikbo.expand.default")) == {(0, 1), (1, 2)}
    assert batches(chained, "ikbo.target_attention.default") == [(2, 0, 0, 2, 0)]
    assert batches(chained, "aten.index_select.default") == [(1, 2)]
    assert {at for places in batches(chained, "aten.linear.default") for at in places} == {0, 1, 2}


@torch.no_grad()
def test_flops_are_those_of_each_level(
    model: nn.Module, example: dict[str, Tensor], chained: ChainedModule
) -> None:
    """Counted when run, against products counted by hand at the batch where each belongs."""
    request = Request(example)
    with FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS) as counter:
        chained(**request.inputs, **request.links)
    at_user = 24 * D + D * D + S * D * 2 * D + 4 * D + D * 32
    at_vendor = 8 * D + 4 * D + D * 32
    at_item = 6 * D + 2 * S * D + 4 * D + (6 + D) * 32 + (32 + 4 * D) * 2
    expected = 2 * (USERS * at_user + VENDORS * at_vendor + ITEMS * at_item)
    assert counter.get_total_flops() == expected


def test_report_has_both_splits(chained: ChainedModule) -> None:
    report = chained.report()
    assert "vendor: split from user\n" in report
    assert "candidate: split from user, vendor\n" in report
    assert "test_chain.py:" in report


class Direct(nn.Module):
    """Items meet users and vendors as they are, and a history whose values alone are a vendor's."""

    def forward(self, user: Tensor, vendor: Tensor, item: Tensor) -> Tensor:
        k = user.unflatten(1, (3, 4))
        seen = functional.scaled_dot_product_attention(item[:, None], k, k * vendor[:, None])
        return seen[:, 0].sum(1) + (user[:, :4] * item).sum(1) + (vendor * item).sum(1)


class Deep(nn.Module):
    """Four levels, each of which reads all around it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4 * i, 4) for i in (1, 2, 3, 4))

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        a = self.a(a).relu()
        b = self.b(torch.cat([a, b], 1)).relu()
        c = self.c(torch.cat([a, b, c], 1)).relu()
        return self.d(torch.cat([a, b, c, d], 1))


def test_levels_that_meet_only_at_the_items() -> None:
    torch.manual_seed(0)
    module = ikbo.transform(
        Direct().eval(),
        (rows(12), rows(4), rows(4)),
        {"user": ["user"], "vendor": ["vendor"]},
        max_users=4,
        max_candidates=64,
    )
    user, vendor, item = torch.randn(2, 12), torch.randn(3, 4), torch.randn(5, 4)
    to_user, to_vendor = torch.tensor([1, 0, 1]).int(), torch.tensor([2, 0, 0, 1, 2]).int()
    got = module(user, vendor, item, vendor_to_user=to_user, cand_to_vendor=to_vendor)
    want = Direct()(user[to_user[to_vendor.long()].long()], vendor[to_vendor.long()], item)
    torch.testing.assert_close(got, want)
    # Keys of users and values of vendors are read by one index, so keys come to the vendors first.
    assert batches(module, "ikbo.expand.default").count((0, 1)) == 2


def test_four_levels() -> None:
    torch.manual_seed(0)
    model = Deep().eval()
    chain = {"a": ["a"], "b": ["b"], "c": ["c"]}
    inputs = (rows(4), rows(4), rows(4), rows(4))
    module = ikbo.transform(model, inputs, chain, max_users=4, max_candidates=64)
    assert module.levels == ("a", "b", "c", "candidate")
    values = [torch.randn(n, 4) for n in (2, 3, 5, 9)]
    links = [torch.randint(n, (m,)).int() for n, m in ((2, 3), (3, 5), (5, 9))]
    names = ("b_to_a", "c_to_b", "cand_to_c")
    with torch.no_grad():
        got = module(*values, **dict(zip(names, links, strict=True)))
        to_c = links[2].long()
        to_b = links[1].long()[to_c]
        to_a = links[0].long()[to_b]
        repeated = (values[0][to_a], values[1][to_b], values[2][to_c], values[3])
        torch.testing.assert_close(got, model(*repeated))


REFUSED: dict[str, tuple[Any, str]] = {
    "a name": ({"user": ["user"], "cand": ["vendor"]}, "not 'candidate' or 'cand'"),
    "twice": ({"user": ["user"], "vendor": ["user", "vendor"]}, "{'user': 'user'} already"),
    "none": ({"user": ["user", "vendor"], "vendor": []}, "'vendor' has none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_chains_are_refused(name: str) -> None:
    chain, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        levels_of(chain, ["user", "vendor", "item"], (8, 64))


def test_what_is_no_chain_is_refused() -> None:
    model, inputs = Direct().eval(), (rows(12), rows(4), rows(4))
    with pytest.raises(ValueError, match="two levels or more beside the candidates"):
        ikbo.transform(model, inputs, {"user": ["user"]})
    with pytest.raises(ValueError, match="of one level as a whole"):
        ikbo.transform(model, inputs, {"user": ["user[:, 0:2]"], "vendor": ["vendor"]})


def test_bad_calls_name_the_level(chained: ChainedModule, example: dict[str, Tensor]) -> None:
    request = Request(example)
    values = {**request.inputs, **request.links}
    with pytest.raises(ValueError, match=r"cand_to_vendor must have B = 40 rows, as item; got 39"):
        chained(**{**values, "cand_to_vendor": values["cand_to_vendor"][:-1]})
    with pytest.raises(ValueError, match="vendor_to_user must have vendor = 7 rows, as vendor"):
        chained(**{**values, "vendor_to_user": values["vendor_to_user"][:-1]})


def test_planted_index_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index composed in the wrong order gives other users: the verification sees it."""
    from ikbo.transform import chain

    def wrong(links: Any, inner: int, outer: int) -> Tensor:
        return links[inner - 1].clone() if outer == inner - 1 else links[inner - 1] % 1

    monkeypatch.setattr(chain, "composed", wrong)
    torch.manual_seed(0)
    with pytest.raises(TransformError, match="differs from the unmodified model"):
        ikbo.transform(
            Direct().eval(),
            (rows(12), rows(4), rows(4)),
            {"user": ["user"], "vendor": ["vendor"]},
            max_users=4,
            max_candidates=64,
        )
