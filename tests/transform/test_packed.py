# SPDX-License-Identifier: Apache-2.0
"""Packed inputs: how columns are named, how the transformed module takes them, what is refused."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo._served import from_transformed
from ikbo.transform import Spec, TransformedModule
from ikbo.transform.packed import Packed, split_commas
from tests.transform.mixed_models import MIXED, floats


class Sides(nn.Module):
    """Columns 1, 2 and 4 of six in one layer with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


X = floats(6)
USER, CAND = (1, 2, 4), (0, 3, 5)


def transform(users: Any, columns: Any = None, x: Any = X) -> TransformedModule:
    torch.manual_seed(0)
    model = Sides().double().eval()
    return ikbo.transform(model, (x,), users, columns=columns, max_users=8, max_candidates=64)


def batch_of(module: TransformedModule, op: str) -> str:
    return next(row.batch for row in module.spec.rows if row.op == op)


NAMES = ["a", "b", "c", "d", "e", "f"]
SPELLINGS: dict[str, tuple[list[str], Any]] = {
    "ranges and numbers": (["x[:, 1:3]", "x[:, -2]"], None),
    "a list": (["x[:, [4, 1:3, 2]]"], None),
    "names": (["x.b", "x.c", "x.e"], {"x": NAMES}),
    "named ranges": (
        ["x.history", "x.age"],
        {"x": {"history": (1, 3), "price": 5, "age": [4, 5]}},
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_columns_have_many_spellings(name: str) -> None:
    users, columns = SPELLINGS[name]
    module = transform(users, columns)
    assert module.roles == {"x.user": "user", "x.cand": "candidate", "cand_to_user": "index"}
    assert module.columns == {"x.user": USER, "x.cand": CAND}


@pytest.fixture(scope="module")
def sides() -> TransformedModule:
    return transform(["x[:, 1:3]", "x[:, 4]"])


def test_the_parts_are_one_split_layer(sides: TransformedModule) -> None:
    nodes = sides.exported_program.graph.nodes
    assert "ikbo.linear.default" in [str(n.target) for n in nodes]
    assert batch_of(sides, "aten.linear.default") == "U+B"


@pytest.mark.parametrize("order", [("user", "cand"), ("cand", "user")])
def test_call_with_a_dict_of_parts(sides: TransformedModule, order: Any) -> None:
    index = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    parts = {"user": X[:2, list(USER)], "cand": X[4:8, list(CAND)]}
    whole = X[4:8].clone()
    whole[:, list(USER)] = parts["user"][index.long()]
    torch.manual_seed(0)
    want = Sides().double()(whole)
    got = sides({side: parts[side] for side in order}, cand_to_user=index)
    torch.testing.assert_close(got, want)


def test_parts_are_checked(sides: TransformedModule) -> None:
    index = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x.user must have sizes \[U, 3\]; got \[2, 6\]"):
        sides({"user": X[:2], "cand": X[:4, :3]}, cand_to_user=index)
    with pytest.raises(TypeError, match="must have the structure"):
        sides(X[:4], cand_to_user=index)


def test_columns_are_in_the_spec_and_in_the_manifest(sides: TransformedModule) -> None:
    columns = {"x.user": list(USER), "x.cand": list(CAND)}
    assert json.loads(sides.spec.to_json())["columns"] == columns
    assert Spec.from_json(sides.spec.to_json()) == sides.spec
    served = from_transformed(sides, None, None, both_forms=False)
    assert served.spec is sides.spec
    assert {name: tuple(x.shape[1:]) for name, x in served.examples.items()} == {
        "x.user": (3,), "x.cand": (3,), "cand_to_user": (),
    }  # fmt: skip


def test_nested_inputs_and_another_axis() -> None:
    class Nested(nn.Module):
        def forward(self, features: dict[str, dict[str, Tensor]], item: Tensor) -> Tensor:
            grid = features["dense"]["grid"]
            return grid.tanh().sum((1, 2)) * item

    inputs = {"features": {"dense": {"grid": floats(2, 3)}}, "item": floats()}
    users = ["features.dense.grid[:, :, 1:]"]
    module = ikbo.transform(Nested(), inputs, users, max_users=8, max_candidates=64)
    assert list(module.roles) == [
        "features.dense.grid.user", "features.dense.grid.cand", "item", "cand_to_user",
    ]  # fmt: skip
    assert module.columns == {
        "features.dense.grid.user": (1, 2), "features.dense.grid.cand": (0,),
    }  # fmt: skip
    assert batch_of(module, "aten.tanh.default") == "U+B"


def test_all_columns_are_the_input() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, item: Tensor) -> Tensor:
            return x.tanh() * item

    inputs = {"x": X, "item": X.clone()}
    module = ikbo.transform(Two(), inputs, ["x[:, :4]", "x[:, 4:]"], max_users=8)
    assert module.roles == {"x": "user", "item": "candidate", "cand_to_user": "index"}
    assert module.columns == {}


def test_wrong_columns_are_caught() -> None:
    """The verification draws users and candidates of one matrix apart, and puts them together."""
    captured = Packed(1, 6, frozenset(USER))
    parts = captured.split(X)
    assert torch.equal(captured.join(parts["user"], parts["cand"]), X)
    mixed = captured.join(parts["user"], parts["cand"].roll(1, 0))
    assert torch.equal(mixed[:, list(USER)], X[:, list(USER)])
    assert torch.equal(mixed[:, list(CAND)], X.roll(1, 0)[:, list(CAND)])


@pytest.mark.parametrize(
    ("users", "columns", "text"),
    [
        (["x[:, 6]"], None, r"'6' must be a column or a range.*axis 1 of input 'x', which has 6"),
        (["x[:, 3:3]"], None, "'3:3' must be a column"),
        (["x[:, one]"], None, "'one' must be a column"),
        (["x[:, 0:6:0]"], None, "'0:6:0' must be a column"),
        (["x[2]"], None, r"along one axis that is not the batch, as x\[:, 3:7\]"),
        (["x[:, 1, 2]"], None, "along one axis"),
        (["x[:, :, 1]"], None, r"'x' must have columns, an axis 2.*shape is \[40, 6\]"),
        (["x.g"], {"x": NAMES}, r"'x.g', which is no input of the model and no column;.*'x.f'"),
        (["y[:, 1]"], None, r"'y\[:, 1\]', which is no input of the model; the inputs are \['x'\]"),
        (["x[:, :3]", "x[:, 3:]"], None, "leave at least one input to the candidates"),
        (["x.a"], {"y": NAMES}, "columns has 'y', which is no input"),
        (["x.a"], {"x": NAMES[:5]}, "must name each of the 6 columns of input 'x' once"),
        (["x.a"], {"x": {"a": (5, 7)}}, "column 'a' of input 'x' must lie within its 6.*5:7"),
    ],
)
def test_columns_are_refused(users: Any, columns: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transform(users, columns)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (NAMES, "a dict from input name to column names; got"),
        ({"x": "abcdef"}, "the names of the columns of x, or a dict; got 'abcdef'"),
        ({"x": {"a": "b"}}, r"a column or \(start, stop\) for x.a; got 'b'"),
    ],
)
def test_columns_of_another_type_are_refused(columns: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        transform(["x.a"], columns)


def test_columns_along_two_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be along one axis.*axes \[1, 2\]"):
        transform(["x[:, 1]", "x[:, :, 1]"], x=floats(6, 6))


def test_names_of_parts_may_not_be_taken() -> None:
    class Two(nn.Module):
        def forward(self, features: dict[str, Tensor]) -> Tensor:
            return features["x"] * features["x.user"]

    inputs = ({"x": X, "x.user": X},)
    with pytest.raises(ValueError, match=r"has the inputs \['x.user'\]; rename them"):
        ikbo.transform(Two(), inputs, ["x[:, 1]"])


class Rows(nn.Module):
    """Three rows per candidate of `events`, two columns each; one row of `item`."""

    def forward(self, events: Tensor, item: Tensor) -> Tensor:
        return events.tanh().view(item.shape[0], 3, 2).sum(1) * item


EVENTS, ITEM = floats(3, 2).flatten(0, 1), floats(2)


@pytest.mark.parametrize(
    ("users", "shapes"),
    [
        (["events"], {"events": (3, 2), "item": (2,)}),
        (["item"], {"events": (3, 2), "item": (2,)}),
        (["events[:, 1:]"], {"events.user": (2, 2), "events.cand": (1, 2), "item": (2,)}),
        (["events[:, :, 0]"], {"events.user": (3, 1), "events.cand": (3, 1), "item": (2,)}),
    ],
)
def test_several_rows_per_candidate(users: Any, shapes: Any) -> None:
    module = ikbo.transform(
        Rows(), (EVENTS, ITEM), users, row_counts={"events": 3}, max_users=8, max_candidates=64
    )
    served = from_transformed(module, None, None, both_forms=False)
    assert {n: tuple(x.shape[1:]) for n, x in served.examples.items()} == shapes | {
        "cand_to_user": ()
    }
    if users != ["item"]:
        assert "U" in batch_of(module, "aten.tanh.default")


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"event": 3}, r"row_counts has 'event', which is no input.*\['events', 'item'\]"),
        ({"events": 7}, "how many rows of input 'events'.*a divisor of its 120 rows; got 7"),
        ({"events": 0}, "a divisor of its 120 rows; got 0"),
        ({}, "one batch size.*'events': 120"),
    ],
)
def test_row_counts_are_checked(counts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ikbo.transform(Rows(), (EVENTS, ITEM), ["events"], row_counts=counts)


def test_commas_inside_of_brackets() -> None:
    assert split_commas("a, x[:, [0, 5:8]],b") == ["a", "x[:, [0, 5:8]]", "b"]


def test_packed_ids_are_cast_and_looked_up_at_users() -> None:
    made = MIXED["packed_float_matrix"]()
    module = ikbo.transform(
        made.model, made.inputs, made.users, columns=made.columns, max_users=8, max_candidates=64
    )
    batches = [row.batch for row in module.spec.rows if row.op == "aten.embedding.default"]
    assert sorted(batches) == ["B", "B", "U", "U", "U", "U", "U"]
    x, index = made.inputs[0], torch.arange(30, dtype=torch.int32) % 3
    places = {side: list(module.columns[f"x.{side}"]) for side in ("user", "cand")}
    whole = x[:30].clone()
    whole[:, places["user"]] = x[:3, places["user"]][index.long()]
    parts = {"user": x[:3, places["user"]], "cand": x[:30, places["cand"]]}
    torch.testing.assert_close(module(parts, cand_to_user=index), made.model(whole))
