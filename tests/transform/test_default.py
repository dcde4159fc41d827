# SPDX-License-Identifier: Apache-2.0
"""What no rule takes: run at U, applied to each part, or materialised; the meaning stays."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo.transform import forms as f
from ikbo.transform import rowwise
from ikbo.transform.device_costs import SHIPPED
from ikbo.transform.forms import (
    BATCH,
    Cand,
    Concat,
    Const,
    Merged,
    PerBatch,
    Rows,
    Scores,
    Sum,
    User,
)
from ikbo.transform.pending import Affine, Normed, Scaled
from tests.transform.random_forms import Draw, assert_same

aten = torch.ops.aten


def turned(d: Draw, *shape: int) -> User:
    """A user value with the batch on its second axis."""
    return User(d.tensor(shape[0], d.num_users, *shape[1:]), Rows(1))


def merged(d: Draw, inner: int, *shape: int) -> User:
    """A user value whose first axis is the batch times `inner`."""
    return User(d.tensor(d.num_users * inner, *shape), Rows(0, 1, inner))


def of_other_shape(x: Concat, d: Draw) -> Concat:
    """Parts of the same widths and origins as those of `x`, with new values."""
    parts = [type(p)(d.tensor(*p.tensor.shape), p.rows) for p in x.parts]
    return Concat(x.axis, tuple(parts), x.rows)


def numbers(x: Concat, limit: int) -> Concat:
    """The concatenation with row numbers for values."""
    parts = [type(p)((p.tensor.abs() * 7).long() % limit, p.rows) for p in x.parts]
    return Concat(x.axis, tuple(parts), x.rows)


# Name to (operator, arguments of a draw, form of the result).
CASES: dict[str, tuple[Any, Callable[[Draw], Any], type]] = {
    "user": (aten.tanh.default, lambda d: (d.user(3),), User),
    "user and constant": (aten.mul.Tensor, lambda d: (d.user(2, 3), d.const(3)), User),
    "user and shared row": (aten.mul.Tensor, lambda d: (d.user(2, 3), d.shared(1, 3)), User),
    "constants": (aten.mul.Tensor, lambda d: (d.const(2, 3), d.const(3)), Const),
    "shared rows": (aten.add.Tensor, lambda d: (d.shared(2, 3), d.const(3)), Const),
    "user and candidate": (aten.mul.Tensor, lambda d: (d.user(3), d.cand(3)), Cand),
    "batch on another axis": (aten.layer_norm.default, lambda d: (turned(d, 2, 4), [4]), User),
    "batches on two axes": (aten.mul.Tensor, lambda d: (turned(d, 1, 3), d.cand(1, 3)), Cand),
    "merged batch": (aten.relu.default, lambda d: (merged(d, 3, 2),), User),
    "two merged batches": (aten.mul.Tensor, lambda d: (merged(d, 2, 3), merged(d, 2, 3)), User),
    "softmax of a row": (aten.softmax.int, lambda d: (d.user(4), 1), User),
    "softmax of a column": (aten.softmax.int, lambda d: (d.user(4), 0), Cand),
    "sum of everything": (aten.sum.default, lambda d: (d.user(4),), Cand),
    "rows meet": (aten.mm.default, lambda d: (d.user(3), d.const(3, 2)), User),
    "attention of the user": (
        aten.scaled_dot_product_attention.default,
        lambda d: (d.user(1, 3, 2), d.user(1, 4, 2), d.user(1, 4, 2), d.mask(1, 1, 4)),
        User,
    ),
    "parts": (aten.tanh.default, lambda d: (d.concat(1, [3]),), Concat),
    "parts in a norm": (aten.layer_norm.default, lambda d: (d.concat(1, [3]), [3]), Concat),
    "parts across a norm": (
        aten.layer_norm.default, lambda d: (x := d.concat(2, [3]), [f.shape(x)[2]]), Normed,
    ),
    "token parts in a linear layer": (
        aten.linear.default,
        lambda d: (d.concat(1, [3]), d.const(2, 3), d.const(2)),
        Concat,
    ),
    "parts and a vector": (
        aten.pow.Tensor_Tensor,
        lambda d: (x := d.concat(1, [2]), Const(torch.full((f.shape(x)[1], 1), 2.0).double())),
        Concat,
    ),
    "parts and a user value along them": (
        aten.mul.Tensor,
        lambda d: (x := d.concat(1, [2]), d.user(f.shape(x)[1], 2)),
        Concat,
    ),
    "parts and a user value across them": (
        aten.mul.Tensor, lambda d: (d.concat(1, [2]), d.user(1, 2)), Concat,
    ),
    "parts and a candidate value": (
        aten.div.Tensor, lambda d: (d.concat(1, [2]), d.cand(1, 2)), Cand,
    ),
    "parts and a gain": (aten.mul.Tensor, lambda d: (d.concat(1, [2]), d.cand(1, 2)), Scaled),
    "parts and equal parts": (
        aten.mul.Tensor, lambda d: (x := d.concat(1, [2]), of_other_shape(x, d)), Concat,
    ),
    "parts and other parts": (
        aten.mul.Tensor,
        lambda d: (
            Concat(1, (d.user(1), d.cand(3)), Rows()),
            Concat(1, (d.user(2), d.cand(2)), Rows()),
        ),
        Concat,
    ),
    "parts that never meet their like": (
        aten.mul.Tensor,
        lambda d: (
            Concat(1, (d.user(1), d.cand(3)), Rows()),
            Concat(1, (d.cand(2), d.user(2)), Rows()),
        ),
        Cand,
    ),
    "parts and parts along another axis": (
        aten.mul.Tensor,
        lambda d: (d.concat(1, [4], [2, 2]), d.concat(2, [4], [2, 2])),
        Cand,
    ),
    "numbers in a row of a table": (
        aten.gather.default,
        lambda d: (d.shared(5), 1, numbers(d.concat(1, [], [2, 1]), 5)),
        Concat,
    ),
    "numbers in a table": (
        aten.index.Tensor, lambda d: (d.const(5, 2), [numbers(d.concat(1, []), 5)]), Concat,
    ),
    "parts joined across": (
        aten.cat.default,
        lambda d: ([d.concat(1, [2], [3, 2]), d.shared(5, 2), d.concat(1, [1], [2, 3])], 2),
        Concat,
    ),
    "parts joined across with a candidate's": (
        aten.cat.default, lambda d: ([d.concat(1, [2], [3, 2]), d.cand(5, 2)], 2), Cand,
    ),
    "scores": (
        aten.masked_fill.Scalar,
        lambda d: (d.scores(), Const(torch.ones(5, 5, dtype=torch.bool)), 0.0),
        Scores,
    ),
    "scores and a row of each user": (
        aten.add.Tensor, lambda d: (d.scores(), d.user(5, 5)), Cand,
    ),
    "scores and more axes": (aten.add.Tensor, lambda d: (d.scores(), d.const(2, 1, 5, 5)), Cand),
    "scores and scores": (aten.mul.Tensor, lambda d: (x := d.scores(), x), Cand),
    "softmax over queries": (aten.softmax.int, lambda d: (d.scores(), 1), Cand),
    "sum of scores": (aten.sum.dim_IntList, lambda d: (d.scores(), [2]), Cand),
    "merged parts": (aten.tanh.default, lambda d: (d.merged([3]),), Merged),
    "merged parts in a linear layer": (
        aten.linear.default, lambda d: (d.merged([3]), d.const(2, 3), d.const(2)), Merged,
    ),
    "merged parts around the batch": (
        aten.linear.default,
        lambda d: (Merged(d.batch_inside([3])), d.const(2, 3), d.const(2)),
        Merged,
    ),
    "merged parts around the batch and a user's": (
        aten.add.Tensor,
        lambda d: (
            Merged(d.batch_inside([3], [2, 2])), User(d.tensor(4 * d.num_users, 3), Rows(0, 4)),
        ),
        Merged,
    ),
    "merged parts joined": (
        aten.cat.default, lambda d: ([d.merged([3], [2, 1]), d.merged([1], [2, 1])], 1), Merged,
    ),
    "merged parts with other borders": (
        aten.mul.Tensor, lambda d: (d.merged([3], [2, 1]), d.merged([3], [1, 2])), Merged,
    ),
    "merged parts and a row of all of them": (
        aten.add.Tensor,
        lambda d: (d.merged([3], [2, 2]), Const(d.tensor(4, 3), Rows(0, 1, 4))),
        Merged,
    ),
    "merged parts and a user's": (
        aten.add.Tensor, lambda d: (d.merged([3], [2, 2]), merged(d, 4, 3)), Merged,
    ),
    "merged parts and a candidate's": (
        aten.add.Tensor,
        lambda d: (d.merged([3], [2, 2]), Cand(d.tensor(d.num_candidates * 4, 3), Rows(0, 1, 4))),
        Cand,
    ),
    "merged parts split into halves": (aten.split.Tensor, lambda d: (d.merged([4]), 2, 1), tuple),
    "merged parts over each other": (aten.softmax.int, lambda d: (d.merged([3]), 0), Cand),
    "query parts in attention": (
        aten.scaled_dot_product_attention.default,
        lambda d: (d.concat(1, [2]), d.user(4, 2), d.user(4, 2)),
        Concat,
    ),
    "two results of parts": (aten.max.dim, lambda d: (d.concat(1, [3]), 2), tuple),
    "pending scale": (aten.tanh.default, lambda d: (d.affine(1, [3]),), Concat),
    "sum": (aten.tanh.default, lambda d: (d.total(3),), Cand),
    "rows by number": (
        aten.mul.Tensor,
        lambda d: (PerBatch(lambda n: torch.arange(n).double()), d.user()),
        Cand,
    ),
    "size": (aten.full.default, lambda d: ([BATCH, BATCH], 1.0), Cand),
    "type promotion": (
        aten.add.Tensor, lambda d: (d.user(3), Cand(d.cand(3).tensor.float(), Rows())), Cand,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_meaning_and_form(name: str) -> None:
    target, make, kind = CASES[name]
    for draw in range(15):
        d = Draw(f"default/{name}/{draw}")
        args, walk = make(d), d.walk()
        result = walk.apply(target, *args)
        assert isinstance(result, kind)
        want = target(*f.map_leaves(d.meaning, args))
        pairs = zip(result, want, strict=True) if kind is tuple else [(result, want)]
        for got, expected in pairs:
            assert_same(walk.materialise(got), expected)
            assert_same(d.meaning(got), expected)


@pytest.mark.parametrize("target", [aten.view.default, aten._unsafe_view.default])
def test_a_rewrite_may_lay_out_otherwise_what_the_model_views(target: Any) -> None:
    d = Draw("layout")
    turned = d.cand(2, 3).tensor.mT
    result = d.walk().apply(target, Cand(turned, None), [BATCH, -1])
    assert_same(result.tensor, turned.flatten(1))


def test_a_user_value_is_broadcast_once() -> None:
    d = Draw("once")
    walk, user = d.walk(), d.user(3)
    assert walk.materialise(user, "first") is walk.materialise(user, "second")
    assert [why for _, why in walk.broadcasts] == ["first"]


def many(d: Draw, kinds: str) -> Concat:
    """Parts one wide, `u` a user's and `c` a candidate's."""
    parts = [d.user(1, 2) if kind == "u" else d.cand(1, 2) for kind in kinds]
    return Concat(1, tuple(parts), Rows())


def test_neighbours_among_many_parts_are_joined() -> None:
    d = Draw("many")
    walk = d.walk()
    x, y = many(d, "u" * 30 + "c" * 10 + "u" * 5), many(d, "u" * 25 + "cu" * 10)
    for target, args in ((aten.mul.Tensor, (x, y)), (aten.tanh.default, (x,))):
        result = walk.apply(target, *args)
        assert isinstance(result, Concat)
        whole = {id(p.range_of[0]) if p.range_of else id(p) for p in result.parts}
        assert len(whole) == 2 < rowwise.MAX_PIECES
        assert any(isinstance(part, User) for part in result.parts)
        assert_same(walk.materialise(result), target(*map(d.meaning, args)))


def test_many_picks_are_taken_from_the_two_sides() -> None:
    d = Draw("picks")
    kinds = "uuucuuuccc"
    walk, x = d.walk(), many(d, kinds)
    rows = [j for i in range(10) for j in range(i)] + [0, 2, 4, 5, 1, 6, 8, 3]
    picks = Const(torch.tensor(rows))
    result = walk.apply(aten.index.Tensor, x, [None, picks])
    assert isinstance(result, Concat)
    assert len(result.parts) == len(list(itertools.groupby(kinds[i] for i in rows)))
    assert_same(walk.materialise(result), d.meaning(x)[:, rows])


def test_a_shared_sum_is_added_up_once() -> None:
    d = Draw("shared")
    walk, total = d.walk(), d.total(3, shared=True)
    gate = walk.apply(aten.sigmoid.default, total)
    result = walk.apply(aten.mul.Tensor, total, gate)
    meaning = d.meaning(total)
    assert_same(walk.materialise(result), meaning * meaning.sigmoid())
    assert walk.materialise(total) is walk.materialise(total)


def test_pending_forms_can_be_settled() -> None:
    d = Draw("settle")
    walk, affine = d.walk(), d.affine(1, [2])
    assert isinstance(affine, Affine)
    settled = walk.settle(affine)
    assert isinstance(settled, Concat)
    assert any(isinstance(part, User) for part in settled.parts)
    assert_same(d.meaning(settled), d.meaning(affine))
    assert not isinstance(walk.apply(aten.tanh.default, d.total(2)), Sum)


class _Dots(nn.Module):
    """Products of each two of a model's rows, and what is left of DLRM."""

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([torch.tanh(item), user], dim=1)
        return torch.bmm(rows, rows.transpose(1, 2)).flatten(1).relu()


def test_a_permuted_concatenation_is_written_once() -> None:
    """As in the unmodified model: both operands of the product are views of one concatenation."""
    inputs = torch.randn(16, 3, 4), torch.randn(16, 2, 4)
    costs = SHIPPED / "cpu.json"  # by which the split of the products does not pay
    module = ikbo.transform(_Dots().eval(), inputs, ["user"], ratio=1, device_costs=costs)
    graph = module.exported_program.graph
    (product,) = [n for n in graph.nodes if n.target in (aten.matmul.default, aten.bmm.default)]
    first, second = product.args
    assert first.target is aten.cat.default
    assert second.target is aten.permute.default and second.args[0] is first


def test_permutations_of_a_concatenation_are_of_the_first_one() -> None:
    d = Draw("permuted")
    walk = d.walk()
    x = d.concat(1, [2, 3])
    turned_once = walk.apply(aten.permute.default, x, [0, 2, 3, 1])
    turned_twice = walk.apply(aten.permute.default, turned_once, [0, 2, 3, 1])
    assert turned_twice.base is x and turned_twice.dims == (0, 3, 1, 2)
    assert walk.apply(aten.permute.default, turned_twice, [0, 2, 3, 1]) is x
    expected = walk.materialise(x).permute(0, 3, 1, 2)
    got = walk.materialise(turned_twice)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert got.data_ptr() == walk.materialise(x).data_ptr()


class _Experts(nn.Module):
    """Experts that each turn what they read, as DCN-Mix and MMoE with fields have them."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(7, 1) for _ in range(3))
        self.matrices = nn.Parameter(torch.randn(3, 4, 7))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        rows = torch.cat([torch.tanh(user), torch.tanh(item), user[:, :1]], 1).unsqueeze(2)
        gates = [gate(rows.squeeze(2)) for gate in self.gates]
        experts = [torch.matmul(matrix, rows).squeeze(2) for matrix in self.matrices]
        return torch.cat([*gates, *experts], 1)


def test_parts_that_several_layers_read_are_joined_once() -> None:
    inputs = torch.randn(16, 3), torch.randn(16, 3)
    module = ikbo.transform(_Experts().eval(), inputs, ["user"])
    joined = [n for n in module.exported_program.graph.nodes if n.target is aten.cat.default]
    # The user's parts, with the axis added and without it, and the result.
    assert len(joined) == 3


@pytest.mark.parametrize("kwargs", [{}, {"dim": 3}])
def test_the_same_view_of_a_concatenation_is_the_same_form(kwargs: dict[str, int]) -> None:
    d = Draw("viewed")
    walk = d.walk()
    x = d.concat(1, [2, 1])
    args = () if kwargs else (3,)
    first, second = (walk.apply(aten.squeeze.dim, x, *args, **kwargs) for _ in range(2))
    assert first is second
    assert walk.apply(aten.squeeze.dim, x, 2) is not first
    assert walk.apply(aten.squeeze.dim, d.concat(1, [2, 1]), 3) is not first


def test_views_are_told_apart_by_what_is_read_of_them() -> None:
    d = Draw("live")
    walk = d.walk()
    x = d.concat(1, [2, 3])
    whole = walk.apply(aten.permute.default, x, [0, 2, 1, 3])
    walk.node_live = (2, 0, 1)
    assert walk.apply(aten.permute.default, x, [0, 2, 1, 3]) is not whole
    walk.node_live = None
    assert walk.apply(aten.permute.default, x, [0, 2, 1, 3]) is whole
