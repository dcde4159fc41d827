# SPDX-License-Identifier: Apache-2.0
"""What no rule takes: run at U, applied to each part, or materialised; the meaning stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import BATCH, Affine, Cand, Concat, Const, PerBatch, Rows, Sum, User
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
        aten.layer_norm.default, lambda d: (x := d.concat(2, [3]), [f.shape(x)[2]]), Cand,
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
        aten.mul.Tensor, lambda d: (d.concat(1, [2]), d.cand(1, 2)), Cand,
    ),
    "parts and equal parts": (
        aten.mul.Tensor, lambda d: (x := d.concat(1, [2]), of_other_shape(x, d)), Concat,
    ),
    "parts and other parts": (
        aten.mul.Tensor,
        lambda d: (
            Concat(1, (d.user(1), d.cand(3)), Rows()),
            Concat(1, (d.user(2), d.cand(2)), Rows()),
        ),
        Cand,
    ),
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


def test_a_user_value_is_broadcast_once() -> None:
    d = Draw("once")
    walk, user = d.walk(), d.user(3)
    assert walk.materialise(user, "first") is walk.materialise(user, "second")
    assert [why for _, why in walk.broadcasts] == ["first"]


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
