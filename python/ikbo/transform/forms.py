# SPDX-License-Identifier: Apache-2.0
"""Factored values: how a value of the model depends on users and candidates.

| form | means |
|---|---|
| `Const` | no batch, or one row that every batch row shares (`rows` given; that axis has size 1) |
| `User` | computed from request-only inputs alone; a tensor at U |
| `Cand` | everything else; a tensor at B |
| `Concat` | parts of different origin side by side along a non-batch axis |
| `Merged` | a `Concat` whose axis is merged with the batch beside it |
| `Pending` | not computed yet, one class for each family of rules (`pending.py`) |
| `Sum` | `user[cand_to_user] + cand`, not added yet; a term may be a `Product` not computed yet |
| `Scores` | queries times keys, masked, not computed yet: attention in a mixed sequence |
| `PerBatch` | a value made from the batch size alone that differs from row to row (`arange(B)`) |

Forms are immutable; constants are real tensors at all times, so
that arithmetic on weights never enters a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo.transform.sizes import BATCH as BATCH
from ikbo.transform.sizes import LAST as LAST
from ikbo.transform.sizes import PROBES as PROBES
from ikbo.transform.sizes import Dim as Dim
from ikbo.transform.sizes import Rows as Rows
from ikbo.transform.sizes import Size as Size
from ikbo.transform.sizes import at as at
from ikbo.transform.sizes import product as product
from ikbo.transform.sizes import repeat_row as repeat_row
from ikbo.transform.sizes import same as same


@dataclass(frozen=True, eq=False)
class Const:
    """A value without candidates or users; `rows` marks the size-1 batch axis of a shared row."""

    tensor: Tensor
    rows: Rows | None = None
    name: str = "constant"


@dataclass(frozen=True, eq=False)
class _Batched:
    tensor: Tensor
    rows: Rows | None
    # What this is a permutation or a view of: lets the inverse step return the original.
    base: Form | None = None
    dims: tuple[int, ...] | None = None
    # A boolean form, if this float is 0 where that is true and -inf elsewhere.
    keep: Form | None = None
    # Of a mask, bool [rows, keys], its last two axes: where it masks whatever the inputs are.
    dead: Tensor | None = None
    # What this is a range of, along which axis, from where on.
    range_of: tuple[Form, int, int] | None = None
    # What this repeats along axes of size 1.
    spread: Form | None = None
    # What this is the negative of.
    minus: Form | None = None
    # What this is the concatenation of, along axis 1.
    pieces: tuple[Tensor, ...] | None = None


class User(_Batched):
    """A tensor with one row per user."""


class Cand(_Batched):
    """A tensor with one row per candidate; `rows` is None where the batch axis is not known."""


@dataclass(frozen=True, eq=False)
class Concat:
    """Parts side by side along `axis`, which is not the batch axis."""

    axis: int
    parts: tuple[Const | User | Cand, ...]
    rows: Rows
    # What this is a permutation of: one concatenation is written for both.
    base: Concat | None = None
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Merged:
    """`x` with its batch axis and the axis of the concatenation, its neighbour, as one axis.

    Where the batch comes first, the parts alternate along it, one piece of each per row.
    """

    x: Concat

    @property
    def is_inner(self) -> bool:
        """Whether the concatenation lies inside of a row of the batch."""
        return self.x.axis > self.x.rows.axis

    @property
    def axis(self) -> int:
        return min(self.x.axis, self.x.rows.axis)

    @property
    def rows(self) -> Rows:
        total = sum(width(part, self.x.axis) for part in self.x.parts)
        if self.is_inner:
            return replace(self.x.rows, inner=total)
        return replace(self.x.rows, axis=self.axis, outer=total)


class Pending:
    """A value of a family of rules, computed when it is needed: `settled` gives it computed."""

    rows: Rows | None

    def dims(self) -> list[Dim]:
        """The shape, with a `Size` where the batch is."""
        raise NotImplementedError

    def sample(self) -> Tensor:
        """A tensor with the element type and device."""
        raise NotImplementedError

    def settled(self, walk: Any) -> Form:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Product:
    """A product that is computed when it is needed.

    `kind` is "linear" (`x @ weight.T + bias` over the last axis) or "lce" (`weight @ x + bias` over
    the last axis but one, one bias value per row).
    """

    kind: str
    x: User | Cand
    weight: Const
    bias: Const | None
    origin: str


@dataclass(frozen=True, eq=False)
class Sum:
    """`user[cand_to_user] + cand`. Both terms have one shape, batch apart.

    `is_shared` marks a value that the model reads more than once: it is added up once, where it is,
    since a rule that follows it would compute its products again.
    """

    user: User | Product
    cand: Cand | Product
    rows: Rows
    is_shared: bool = False


@dataclass(frozen=True, eq=False)
class PerBatch:
    """A constructor that is given the batch size; `make(n)` calls it for n rows."""

    make: Callable[[Any], Tensor]

    @property
    def rows(self) -> None:
        return None


HOLE = object()


@dataclass(frozen=True, eq=False)
class Step:
    """An operator on a `Scores`, which `HOLE` stands for in its arguments, and on constants."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: str


@dataclass(frozen=True, eq=False)
class Scores:
    """The product of queries and keys, tokens of both sides in each, and what was done to it.

    `q` lies along its last axis but one, `k` along its last. `steps`, none of which lets rows meet,
    are not done yet. `probe` is what they make of the random `products`, for one row of the batch.
    """

    q: Concat
    k: Concat
    steps: tuple[Step, ...]
    products: Tensor
    probe: Tensor
    origin: str

    @property
    def rows(self) -> Rows:
        return self.q.rows


Form = Const | User | Cand | Concat | Merged | Sum | Scores | PerBatch | Pending
FORMS = (Const, User, Cand, Concat, Merged, Sum, Scores, PerBatch, Pending)


def is_user_only(form: Form) -> bool:
    """Whether a form can be computed at U."""
    return isinstance(form, Const | User)


def holds_user(form: Form) -> bool:
    """Whether a form, or a part of a concatenation, is a user value."""
    concat = form.x if isinstance(form, Merged) else form
    parts = concat.parts if isinstance(concat, Concat) else (form,)
    return any(isinstance(part, User) for part in parts)


def shape(form: Form) -> list[Dim]:
    """The shape, with a `Size` where the batch is."""
    if isinstance(form, Const | User | Cand):
        dims: list[Dim] = list(form.tensor.shape)
        if form.rows is not None:
            dims[form.rows.axis] = form.rows.length()
        return dims
    if isinstance(form, Concat):
        dims = shape(form.parts[0])
        dims[form.rows.axis] = form.rows.length()
        dims[form.axis] = sum(width(part, form.axis) for part in form.parts)
        return dims
    if isinstance(form, Merged):
        dims = shape(form.x)
        return [*dims[: form.axis], form.rows.length(), *dims[form.axis + 2 :]]
    if isinstance(form, Scores):
        return [*shape(form.q)[:-1], shape(form.k)[-1]]
    if isinstance(form, Pending):
        return form.dims()
    if isinstance(form, Sum):
        term = form.user
        if isinstance(term, User):
            return shape(term)
        dims = shape(term.x)
        dims[-1 if term.kind == "linear" else -2] = term.weight.tensor.shape[0]
        return dims
    dims = list(form.make(_SHAPE_PROBE).shape)
    return [BATCH if dim == _SHAPE_PROBE else dim for dim in dims]


# A batch size at which a `PerBatch` is built to learn its shape.
_SHAPE_PROBE = 97


def rank(form: Form) -> int:
    return len(shape(form))


def width(form: Form, axis: int) -> int:
    """The static size of a non-batch axis."""
    return int(shape(form)[axis])


def sample(form: Form) -> Tensor:
    """A tensor with the form's element type and device."""
    if isinstance(form, Concat | Merged):
        return form.parts[0].tensor if isinstance(form, Concat) else sample(form.x)
    if isinstance(form, Scores):
        return form.probe
    if isinstance(form, Pending):
        return form.sample()
    if isinstance(form, Sum):
        return (form.user.x if isinstance(form.user, Product) else form.user).tensor
    return form.make(1) if isinstance(form, PerBatch) else form.tensor


def dtype(form: Form) -> torch.dtype:
    """The element type."""
    return sample(form).dtype


def normal_axis(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (*FORMS, Size))


def leaves(tree: Any) -> list[Any]:
    """The forms, sizes and plain values in nested arguments."""
    return pytree.tree_leaves(tree, is_leaf=_is_leaf)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(function, tree, is_leaf=_is_leaf)
