# SPDX-License-Identifier: Apache-2.0
"""Products of a user's rows with a candidate's row, and layers over them (A12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Pending, Rows, Sum, User
from ikbo.transform.origin import at_origin
from ikbo.transform.parts import plain, together
from ikbo.transform.pending import Cross, Joined
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

# Which columns of a weight meet a value: where they begin, how many, and with which sign.
Ranges = list[tuple[int, int, int]]


@rule(aten.mul.Tensor)
def cross(walk: Walk, x: Form, y: Form) -> Cross | None:
    """A12: a product of rows of the user with a candidate's is left to what reads it.

    before: u [U, T, d] * c [B, 1, d]    after: Cross(u, c)
    """
    user, cand = (x, y) if isinstance(x, User) else (y, x)
    if not (isinstance(user, User) and isinstance(cand, Cand)) or f.rank(user) != 3:
        return None
    if user.rows != Rows() or cand.rows != Rows() or f.rank(cand) != 3:
        return None
    kind = f.dtype(user)
    if kind != f.dtype(cand) or not kind.is_floating_point:
        return None
    small = _small(cand)
    whole, narrow = (Cross(user, c, walk.node) for c in (cand, small))
    return narrow if narrow.dims()[1:] == whole.dims()[1:] else whole


def _small(x: Any) -> Any:
    """A value without its repetitions along axes of size 1."""
    return x if getattr(x, "spread", None) is None else x.spread


@rule(aten.sum.dim_IntList)
def contract(walk: Walk, x: Form, dim: Any, keepdim: bool = False, **options: Any) -> Form | None:
    """A13: a sum of such a product over one axis reads the user's rows by index.

    before: sum(expand(u) [B, T, d] * w [B, T, 1], 1)    after: ikbo::bmm(u.mT, w)
    before: sum(expand(u) [B, T, d] * c [B, 1, d], 2)    after: ikbo::bmm(u, c.mT)
    """
    if not isinstance(x, Cross) or options or not dim or len(dim) != 1:
        return None
    axis, other = f.normal_axis(dim[0], 3), 3 - f.normal_axis(dim[0], 3)
    user, cand = x.user.tensor, x.cand.tensor
    if axis == 0 or cand.shape[other] != 1 or user.shape[axis] != cand.shape[axis]:
        return None
    with at_origin(x.origin):
        out = torch.ops.ikbo.bmm(user, cand, walk.cand_to_user, axis == 1, axis == 2)
    return Cand(out.movedim(1, other) if keepdim else out.squeeze(2), Rows())


@rule(aten.cat.default)
def cat(walk: Walk, tensors: Sequence[Form], dim: int = 0) -> Joined | None:
    """A12: features that are products or repeated rows stay apart for the layer that reads them.

    before: cat([repeat(c), u, repeat(c) - u, repeat(c) * u], -1)
    after:  Joined(c, u, Sum(-u, c), Cross(u, c))
    """
    axis = f.rank(tensors[0]) - 1
    if f.normal_axis(dim, axis + 1) != axis or axis not in (1, 2):
        return None
    parts: list[Any] = []
    for x in tensors:
        parts += x.parts if isinstance(x, Concat) and x.axis == axis else [x]
    if not all(isinstance(x, Const | User | Cand | Sum | Pending) for x in parts):
        return None
    if {x.rows for x in parts} != {Rows()} or len({f.dtype(x) for x in parts}) != 1:
        return None
    if any(isinstance(x, Sum) and _spread_terms(x) is None for x in parts):
        return None
    has_pending = any(isinstance(x, Sum | Pending) for x in parts)
    is_mixed = len({isinstance(x, Cand) for x in parts}) == 2
    is_pending = has_pending or any(_small(x) is not x for x in parts)
    return Joined(tuple(parts), Rows()) if is_pending and (has_pending or is_mixed) else None


def _spread_terms(x: Sum) -> tuple[Any, Any] | None:
    """The terms of a sum, if one repeats a row; else adding it up costs no more."""
    terms = (x.user, x.cand)
    if not all(isinstance(t, User | Cand) for t in terms):
        return None
    return terms if any(_small(t) is not t for t in terms) else None


@rule(aten.linear.default)
def linear(walk: Walk, x: Form, weight: Form, bias: Form | None = None) -> Form | None:
    """A12: a layer over features of the user's rows and one candidate row.

    before: linear(cat([q, k, q - k, q * k], -1), [A, B, C, D], b) for each row k of the user
    after:  Sum(linear(k, B - C, b) at U, linear(q, A + C) once per candidate + linear(q * k, D)),
            or bmm(k, (B - C + q D).mT) + linear(q, A + C, b), which builds nothing of k's size
    """
    if not isinstance(x, Joined) or not isinstance(weight, Const):
        return None
    if not (bias is None or isinstance(bias, Const)):
        return None
    dims = [*x.plain_dims()[:-1], weight.tensor.shape[0]]
    sums: dict[type, list[Tensor]] = {User: [], Cand: []}
    # The bias goes to the fewest rows.
    groups = sorted(_groups(x), key=lambda g: (isinstance(g[1][0], Cross), g[0] is Cand))
    read = {id(g[1][0].user.tensor) for g in groups if _is_read_by_index(g[1][0], dims[-1])}
    taken: dict[int, Const] = {}
    for side, some, ranges in groups:
        part = _columns(walk, weight, ranges)
        if len(some) == 1 and isinstance(some[0], User) and id(some[0].tensor) in read:
            taken[id(some[0].tensor)] = part
            continue
        own = taken.pop(id(some[0].user.tensor), None) if isinstance(some[0], Cross) else None
        sums[side].append(_product(walk, side, some, part, bias, own))
        bias = None
    terms = [_added(side, tensors, dims) for side, tensors in sums.items() if tensors]
    out = Sum(terms[0], terms[1], Rows()) if len(terms) == 2 else terms[0]
    if x.view is None:
        return out
    return walk.apply(aten.view.default, out, [*x.view[:-1], dims[-1]])


def _groups(x: Joined) -> list[tuple[type, list[Any], list[Ranges]]]:
    """What the parts are made of: values of one side and of equal leading axes, side by side, each
    with the columns of a weight that meet it.
    """
    found: dict[int, tuple[Any, Ranges]] = {}
    start = 0
    for part in x.parts:
        width = f.width(part, f.rank(part) - 1)
        for value in (part.user, part.cand) if isinstance(part, Sum) else (part,):
            root, sign = _root(value)
            found.setdefault(id(root), (root, []))[1].append((start, width, sign))
        start += width
    groups: dict[Any, tuple[type, list[Any], list[Ranges]]] = {}
    for root, ranges in found.values():
        side = User if isinstance(root, Const | User) else Cand
        key = id(root) if isinstance(root, Pending) else (side, *root.tensor.shape[1:-1])
        _, some, columns = groups.setdefault(key, (side, [], []))
        some.append(root)
        columns.append(ranges)
    return list(groups.values())


def _root(x: Any) -> tuple[Any, int]:
    """The value that a part repeats, or is the negative of, and which of both signs it has."""
    sign = 1
    while isinstance(x, User | Cand) and (x.minus or x.spread) is not None:
        sign = sign if x.minus is None else -sign
        x = x.minus or x.spread
    return x, sign


def _columns(walk: Walk, weight: Const, ranges: list[Ranges]) -> Const:
    """The columns of a weight that meet some values, those that meet the same one added up."""

    def compute() -> Tensor:
        summed = []
        for some in ranges:
            terms = [sign * weight.tensor.narrow(1, start, width) for start, width, sign in some]
            summed.append(sum(terms[1:], terms[0]))
        return torch.cat(summed, 1)

    return walk.fold(compute, f"{weight.name}_part")


def _product(
    walk: Walk, side: type, some: list[Any], weight: Const, bias: Const | None, own: Const | None
) -> Tensor:
    """The product of some values, side by side, with the columns that meet them.

    `own` meets the user's rows of a `Cross` alone.
    """
    if isinstance(some[0], Pending) and not isinstance(some[0], Cross):
        return walk.materialise(walk.apply(aten.linear.default, some[0], weight, bias))
    matrix, added = walk.use(weight), None if bias is None else walk.use(bias)
    if isinstance(some[0], Cross):
        return _of_cross(walk, some[0], matrix, added, None if own is None else walk.use(own))
    x = together(walk, some, f.rank(some[0]) - 1, Rows())
    return torch.nn.functional.linear(x.tensor if side is Cand else walk.at_users(x), matrix, added)


def _is_read_by_index(x: Any, outputs: int) -> bool:
    """Whether a layer of so many outputs over a product reads the user's rows by index.

    `W (u * c)` for the rows of a user is `u (W * c).mT`: as many values of `W * c` as outputs, or
    of `u * c` as rows, each written once more than it has to be.
    """
    if not isinstance(x, Cross) or x.cand.tensor.shape[1] != 1:
        return False
    rows, width = x.user.tensor.shape[1:]
    return 2 * rows > outputs and x.cand.tensor.shape[2] == width


def _of_cross(
    walk: Walk, x: Cross, weight: Tensor, bias: Tensor | None, own: Tensor | None
) -> Tensor:
    """`W (u * c) + own u + bias`."""
    if not _is_read_by_index(x, weight.shape[0]):
        return torch.nn.functional.linear(plain(walk, x).tensor, weight, bias)
    with at_origin(x.origin):
        cand = x.cand.tensor
        weights = weight * cand if own is None else torch.addcmul(own, weight, cand)
    out = torch.ops.ikbo.bmm(x.user.tensor, weights, walk.cand_to_user, False, True)
    return out if bias is None else out + bias


def _added(side: type, tensors: list[Tensor], dims: list[Any]) -> Any:
    """The sum of products, of which some have one row that counts for all."""
    total = sum(tensors[1:], tensors[0])
    if list(total.shape[1:]) == dims[1:]:
        return side(total, Rows())
    return side(total.expand(-1, *dims[1:]), Rows(), spread=side(total, Rows()))
