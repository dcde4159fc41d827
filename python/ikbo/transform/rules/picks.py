# SPDX-License-Identifier: Apache-2.0
"""Columns of a concatenation by number, in any order; rows that a candidate picks (A21)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Rows, User
from ikbo.transform.parts import narrow, together
from ikbo.transform.rowwise import MAX_PIECES
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@rule(aten.index.Tensor)
def index(walk: Walk, x: Form, indices: Sequence[Form | None]) -> Form | None:
    """before: Concat(1, [u, c])[:, [3, 0, 1]]; after: Concat(1, [c[:, [1]], u[:, 0:2]])."""
    used = [(axis, picks) for axis, picks in enumerate(indices) if picks is not None]
    if len(used) != 1:
        return None
    axis, picks = used[0]
    picked = _picked(walk, x, axis, picks)
    if picked is None or f.rank(picks) == 1:
        return picked
    dims = f.shape(picked)
    return walk.apply(aten.view.default, picked, [*dims[:axis], *f.shape(picks), *dims[axis + 1 :]])


@rule(aten.index_select.default)
def index_select(walk: Walk, x: Form, dim: int, picks: Form) -> Form | None:
    """before: index_select(Concat(1, [u, c]), 1, [3, 0]); after: columns of c and of u."""
    return _picked(walk, x, f.normal_axis(dim, f.rank(x)), picks)


@rule(aten.gather.default)
def gather(walk: Walk, x: Form, dim: int, picks: Form, **_: Any) -> Cand | None:
    """A21: rows of the user that a candidate picks are read by index.

    before: gather(expand(x_user) [B, S, D], 1, picks [B, K, D])    after: x_user[i, picks]
    """
    if not isinstance(x, User) or not isinstance(picks, Cand) or x.rows != picks.rows:
        return None
    axis = f.normal_axis(dim, f.rank(x))
    if x.rows != Rows() or axis == 0:
        return None
    small, sizes = picks.spread, x.tensor.shape
    numbers, used = picks.tensor, f.rank(x)
    if (
        small is not None
        and list(small.tensor.shape[axis + 1 :]) == [1] * (used - axis - 1)
        and picks.tensor.shape[axis + 1 :] == sizes[axis + 1 :]
    ):  # one number for all that lies behind the axis
        numbers, used = small.tensor.flatten(axis), axis + 1
    index: list[Tensor] = []
    for a in range(used):
        along = [-1 if b == a else 1 for b in range(numbers.ndim)]
        places = torch.arange(numbers.shape[a], device=numbers.device) if a else walk.cand_to_user
        index.append(numbers if a == axis else places.long().reshape(along))
    return Cand(aten.index.Tensor(x.tensor, index), Rows())


def _picked(walk: Walk, x: Form, axis: int, picks: Form) -> Form | None:
    """The columns of a concatenation that a constant names; neighbours of one part stay together.

    Returns:
        None where `x` is no concatenation along `axis`, or `picks` no constant numbers.
    """
    if not isinstance(x, Concat) or x.axis != axis or not isinstance(picks, Const):
        return None
    if picks.rows is not None or picks.tensor.dtype == torch.bool or not picks.tensor.numel():
        return None
    places = walk.constants.fold(lambda: picks.tensor.reshape(-1).tolist())
    owners = [(p, i) for p, part in enumerate(x.parts) for i in range(f.width(part, axis))]
    runs = _runs(owners, places)
    parts: Sequence[Form] = x.parts
    if len(runs) > MAX_PIECES:
        parts = sides(walk, x)
        runs = _runs(places_in_sides(x), places)
    pieces = [_columns(walk, parts[p], axis, inside, picks) for p, inside in runs]
    return pieces[0] if len(pieces) == 1 else walk.apply(aten.cat.default, pieces, axis)


def _runs(owners: Sequence[tuple[int, int]], places: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Neighbours among the places that one part owns, each with their numbers in that part."""
    found = groupby([owners[place] for place in places], key=lambda owner: owner[0])
    return [(p, [i for _, i in run]) for p, run in found]


def sides(walk: Walk, x: Concat) -> list[Any]:
    """What is at U and what is not, each as one value."""
    return walk.once("sides", x, lambda: _sides(walk, x))


def _sides(walk: Walk, x: Concat) -> list[Any]:
    of_user = [part for part in x.parts if f.is_user_only(part)]
    others = [part for part in x.parts if not f.is_user_only(part)]
    return [together(walk, parts, x.axis, x.rows) for parts in (of_user, others)]


def places_in_sides(x: Concat) -> list[tuple[int, int]]:
    """Per column, its side in `sides` and its number there."""
    taken, owners = [0, 0], []
    for part in x.parts:
        side = 0 if f.is_user_only(part) else 1
        for _ in range(f.width(part, x.axis)):
            owners.append((side, taken[side]))
            taken[side] += 1
    return owners


def _columns(walk: Walk, part: Form, axis: int, inside: list[int], picks: Const) -> Form:
    """Columns of one part; a range of them is no copy."""
    first, count = inside[0], len(inside)
    if inside == list(range(first, first + count)):
        return narrow(walk, part, axis, first, count)
    numbers = walk.fold(
        partial(torch.tensor, inside, device=picks.tensor.device), f"{picks.name}_part"
    )
    return walk.apply(aten.index_select.default, part, axis, numbers)
