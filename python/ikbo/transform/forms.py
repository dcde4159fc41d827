# SPDX-License-Identifier: Apache-2.0
"""Factored values: how a value of the model depends on users and candidates.

| form | means |
|---|---|
| `Const` | no batch, or one row that every batch row shares (`rows` given; that axis has size 1) |
| `User` | computed from request-only inputs alone; a tensor at U |
| `Cand` | everything else; a tensor at B |
| `Concat` | parts of different origin side by side along a non-batch axis |
| `Affine` | `x * scale + shift` along the axis of a `Concat`, not computed yet |
| `Sum` | `user[cand_to_user] + cand`, not added yet; a term may be a `Product` not computed yet |
| `PerBatch` | a value made from the batch size alone that differs from row to row (`arange(B)`) |

`Rows` says where the batch lies in a shape. A `Size` is a number computed from the batch size: it
has a reading at U and one at B. Forms are immutable; constants are real tensors at all times, so
that arithmetic on weights never enters a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Any dimension of a shape: static, or a number that depends on the batch size.
Dim = Any

# Two batch sizes at which shapes are compared; primes larger than any dimension of a model.
PROBES = (1_000_003, 1_000_033)


class Size:
    """A number computed from the batch size; `at(n)` is its value for a batch of n rows."""

    def __init__(self, at: Callable[[Any], Any]) -> None:
        self.at = at

    def is_batch(self) -> bool:
        """Whether it is the batch size itself."""
        return all(self.at(n) == n for n in PROBES)


BATCH = Size(lambda n: n)


def at(value: Any, n: Any) -> Any:
    """Reads a dimension or any number for a batch of n rows."""
    return value.at(n) if isinstance(value, Size) else value


def product(dims: Sequence[Dim], n: int) -> int:
    """The product of dimensions, read for a batch of n rows."""
    result = 1
    for dim in dims:
        result *= at(dim, n)
    return result


def same(a: Dim | Sequence[Dim], b: Dim | Sequence[Dim]) -> bool:
    """Whether two dimensions, or products of dimensions, are equal for every batch size."""
    a, b = (x if isinstance(x, list | tuple) else [x] for x in (a, b))
    return all(product(a, n) == product(b, n) for n in PROBES)


@dataclass(frozen=True)
class Rows:
    """The batch is axis `axis`, whose size is `outer * batch * inner`, row-major."""

    axis: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_plain(self) -> bool:
        return self == Rows()

    def length(self) -> Dim:
        factor = self.outer * self.inner
        return BATCH if factor == 1 else Size(lambda n: n * factor)


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


@dataclass(frozen=True, eq=False)
class Affine:
    """`x * scale + shift`; both are vectors along `x.axis`, None means 1 and 0."""

    x: Concat
    scale: Const | None
    shift: Const | None

    @property
    def rows(self) -> Rows:
        return self.x.rows


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


Form = Const | User | Cand | Concat | Affine | Sum | PerBatch
FORMS = (Const, User, Cand, Concat, Affine, Sum, PerBatch)


def is_user_only(form: Form) -> bool:
    """Whether a form can be computed at U."""
    return isinstance(form, Const | User)


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
    if isinstance(form, Affine):
        return shape(form.x)
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
    if isinstance(form, Concat):
        return form.parts[0].tensor
    if isinstance(form, Affine):
        return sample(form.x)
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
