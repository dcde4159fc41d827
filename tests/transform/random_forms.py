# SPDX-License-Identifier: Apache-2.0
"""Random forms in fp64, and what they mean, written without the pass."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.constants import Constants
from ikbo.transform.forms import (
    Cand,
    Concat,
    Const,
    Merged,
    PerBatch,
    Product,
    Rows,
    Scores,
    Sum,
    User,
)
from ikbo.transform.pending import Affine, Cross, Joined, Normed, Outer, Reordered, Scaled
from ikbo.transform.scores import run
from ikbo.transform.walk import Walk


class Draw:
    """A random request, and random forms that belong to it. Shapes leave the batch out."""

    def __init__(self, seed: str) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.choose.getrandbits(32))
        # What is read of the result of the operator that is drawn.
        self.live: tuple[int, int, int] | None = None
        self.num_users = self.choose.choice([1, 2, 3, 5])
        self.num_candidates = self.choose.choice([1, 4, 7])
        self.index = torch.randint(
            self.num_users, (self.num_candidates,), generator=self.generator, dtype=torch.int32
        )

    def walk(self) -> Walk:
        walk = Walk(Constants(), self.index, self.num_users)
        walk.node_live = self.live
        return walk

    def size(self, low: int = 1, high: int = 5) -> int:
        return self.choose.randint(low, high)

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    def const(self, *shape: int) -> Const:
        return Const(self.tensor(*shape))

    def positive(self, *shape: int) -> Const:
        return Const(self.tensor(*shape).abs() + 0.5)

    def shared(self, *shape: int) -> Const:
        """One row for the whole batch."""
        return Const(self.tensor(1, *shape), Rows())

    def user(self, *shape: int) -> User:
        return User(self.tensor(self.num_users, *shape), Rows())

    def cand(self, *shape: int) -> Cand:
        return Cand(self.tensor(self.num_candidates, *shape), Rows())

    def mask(self, *shape: int) -> User:
        return User(self.bools(self.num_users, *shape), Rows())

    def batched(self, *shape: int) -> User | Cand | Const:
        return self.choose.choice([self.user, self.cand, self.shared])(*shape)

    def concat(
        self, axis: int, shape: Sequence[int], widths: Sequence[int] | None = None
    ) -> Concat:
        """At least one part of each origin along `axis` (counted with the batch axis)."""
        kinds = [self.user, self.cand]
        kinds += self.choose.choices([self.user, self.cand, self.shared], k=self.size(0, 2))
        if widths is None:
            self.choose.shuffle(kinds)
            widths = [self.size() for _ in kinds]
        parts = []
        for kind, width in zip(kinds, widths, strict=False):
            sizes = list(shape)
            sizes.insert(axis - 1, width)
            parts.append(kind(*sizes))
        return Concat(axis, tuple(parts), Rows())

    def merged(self, shape: Sequence[int], widths: Sequence[int] | None = None) -> Merged:
        """A concatenation that follows the batch, merged with it."""
        return Merged(self.concat(1, shape, widths))

    def batch_inside(self, shape: Sequence[int], widths: Sequence[int] | None = None) -> Concat:
        """A concatenation along the first axis, before the batch."""
        x = self.concat(1, shape, widths)
        parts = [
            type(p)(p.tensor.transpose(0, 1).contiguous(), replace(p.rows, axis=1)) for p in x.parts
        ]
        return Concat(0, tuple(parts), Rows(1))

    def scores(self, *steps: Any, heads: Sequence[int] = (), widths: Sequence[int] = (3, 2)) -> Any:
        """Queries times keys of user tokens, then candidate tokens; `steps` are (operator, ...)."""
        axis = 1 + len(heads)
        q, k = self.concat(axis, [*heads, 4], widths), self.concat(axis + 1, [*heads, 4], widths)
        walk = self.walk()
        out = walk.apply(torch.ops.aten.matmul.default, q, k)
        for target, *args in steps:
            out = walk.apply(target, out, *args)
        return out

    def affine(self, axis: int, shape: Sequence[int]) -> Affine:
        x = self.concat(axis, shape)
        total = f.shape(x)[axis]
        vectors = self.choose.choice([(True, True), (True, False), (False, True)])
        return Affine(x, *(self.const(total) if given else None for given in vectors))

    def total(self, m: int, *, rank: int = 2, kind: str = "linear", shared: bool = False) -> Sum:
        """A sum of two products with M rows."""
        k_user, k_cand, n = self.size(), self.size(), self.size()
        inside = {"linear": lambda k: [n] * (rank - 2) + [k], "lce": lambda k: [k, n]}[kind]
        bias = self.choose.choice([None, self.const(m)])
        user = Product(kind, self.user(*inside(k_user)), self.const(m, k_user), bias, "?")
        cand = Product(kind, self.cand(*inside(k_cand)), self.const(m, k_cand), None, "?")
        return Sum(user, cand, Rows(), shared)

    # What a form means

    def meaning(self, form: Any) -> Any:
        """The value at B."""
        if isinstance(form, Const):
            return form.tensor if form.rows is None else self._repeated(form)
        if isinstance(form, User):
            return self._gathered(form)
        if isinstance(form, Cand):
            return form.tensor
        if isinstance(form, Concat):
            return torch.cat([self.meaning(part) for part in form.parts], form.axis)
        if isinstance(form, Merged):
            first = min(form.rows.axis, form.x.axis)
            return self.meaning(form.x).flatten(first, first + 1)
        if isinstance(form, Affine):
            value = self.meaning(form.x)
            trailing = [1] * (value.ndim - form.x.axis - 1)
            scale = 1 if form.scale is None else form.scale.tensor.reshape(-1, *trailing)
            shift = 0 if form.shift is None else form.shift.tensor.reshape(-1, *trailing)
            return value * scale + shift
        if isinstance(form, Scores):
            value = self.meaning(form.q) @ self.meaning(form.k)
            for step in form.steps:
                value = run(step, value, self.meaning)
            return value
        if isinstance(form, Sum):
            return self._term(form.user) + self._term(form.cand)
        if isinstance(form, PerBatch):
            return form.make(self.num_candidates)
        if isinstance(form, Cross):
            return self.meaning(form.user) * self.meaning(form.cand)
        if isinstance(form, Scaled):
            value = self.meaning(form.x) * self.meaning(form.gain)
            trailing = [1] * (value.ndim - form.axis - 1)
            return value + (0 if form.shift is None else form.shift.tensor.reshape(-1, *trailing))
        if isinstance(form, Normed):
            value = self.meaning(form.x)
            weight, bias = (None if v is None else v.tensor for v in (form.weight, form.bias))
            sizes = value.shape[-1:]
            return torch.nn.functional.layer_norm(value, sizes, weight, bias, form.eps)
        if isinstance(form, Outer):
            return self.meaning(form.p) * self.meaning(form.q)
        if isinstance(form, Reordered):
            return self.meaning(form.x).index_select(form.axis, torch.tensor(form.order))
        if isinstance(form, Joined):
            value = torch.cat([self.meaning(part) for part in form.parts], -1)
            dims = f.shape(form) if form.view is None else form.view
            return value.reshape([f.at(d, self.num_candidates) for d in dims])
        return f.at(form, self.num_candidates)

    def _term(self, term: Any) -> Tensor:
        if not isinstance(term, Product):
            return self.meaning(term)
        x, weight = self.meaning(term.x), term.weight.tensor
        bias = 0 if term.bias is None else term.bias.tensor
        if term.kind == "linear":
            return x @ weight.T + bias
        return weight @ x + (0 if term.bias is None else bias[:, None])

    def _repeated(self, form: Const) -> Tensor:
        rows = form.rows
        split = form.tensor.unflatten(rows.axis, (rows.outer, 1, rows.inner))
        return split.repeat_interleave(self.num_candidates, rows.axis + 1).flatten(
            rows.axis, rows.axis + 2
        )

    def _gathered(self, form: User) -> Tensor:
        rows = form.rows
        split = form.tensor.unflatten(rows.axis, (rows.outer, self.num_users, rows.inner))
        taken = split.index_select(rows.axis + 1, self.index.long())
        return taken.flatten(rows.axis, rows.axis + 2)


def assert_same(got: Any, want: Any) -> None:
    """Equal within the rounding of fp64 sums of a few dozen terms."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.is_floating_point():
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
    else:
        assert torch.equal(got, want)
