# SPDX-License-Identifier: Apache-2.0
"""The parts of a concatenation: cut into pieces, and put side by side again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Rows, User

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk


def narrow(walk: Walk, form: Any, axis: int, start: int, length: int) -> Any:
    """A range of a non-batch axis of a `Const`, `User` or `Cand`."""
    if (start, length) == (0, f.width(form, axis)):
        return form
    if isinstance(form, Const):
        return walk.fold(
            lambda: form.tensor.narrow(axis, start, length), f"{form.name}_part", form.rows
        )
    whole, first = form, start
    if form.range_of is not None and form.range_of[1] == axis:
        whole, first = form.range_of[0], form.range_of[2] + start
    tensor = whole.tensor.narrow(axis, first, length)
    return type(form)(tensor, form.rows, range_of=(whole, axis, first))


def rejoined(walk: Walk, parts: Sequence[Any], axis: int) -> list[Any]:
    """The parts, where neighbours are neighbouring ranges of one value with these as one range."""
    joint: list[Any] = []
    for part in parts:
        if joint and _follows(joint[-1], part, axis):
            whole, _, first = joint[-1].range_of
            length = f.width(joint[-1], axis) + f.width(part, axis)
            joint[-1] = narrow(walk, whole, axis, first, length)
        else:
            joint.append(part)
    return joint


def _follows(x: Any, y: Any, axis: int) -> bool:
    """Whether `y` is the range behind `x` of the same value."""
    ranges = [getattr(part, "range_of", None) for part in (x, y)]
    if None in ranges:
        return False
    (whole, along, first), (other, other_along, start) = ranges  # type: ignore[misc]
    return whole is other and along == other_along == axis and first + f.width(x, axis) == start


def together(
    walk: Walk, parts: Sequence[Any], axis: int, rows: Rows | None, reason: str | None = None
) -> Any:
    """Parts of a concatenation as one value: at U if all are there, else at B."""
    parts = rejoined(walk, parts, axis)
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Const) for part in parts):
        tensors = [part.tensor for part in parts]
        return walk.fold(lambda: torch.cat(tensors, axis), parts[0].name, parts[0].rows)
    if all(map(f.is_user_only, parts)):
        return User(torch.cat([walk.at_users(part) for part in parts], axis), rows)
    return Cand(torch.cat([walk.materialise(part, reason) for part in parts], axis), rows)


def joined(walk: Walk, parts: Sequence[Any], axis: int, where: Rows) -> Concat:
    """A concatenation of results, computed where they are pending."""
    return Concat(axis, tuple(plain(walk, x) for x in parts), where)


def plain(walk: Walk, x: Any) -> Const | User | Cand:
    return x if isinstance(x, Const | User | Cand) else Cand(walk.materialise(x), x.rows)


def joint_borders(concats: Sequence[Concat]) -> list[int]:
    """Where a part of one of several concatenations of equal width begins, and the end."""
    widths = [[f.width(part, x.axis) for part in x.parts] for x in concats]
    return sorted({0, *(end for some in widths for end in accumulate(some))})


def cut(walk: Walk, x: Concat, borders: Sequence[int]) -> list[Any]:
    """The pieces of a concatenation between borders, which include its own."""
    start, pieces = 0, []
    for part in x.parts:
        end = start + f.width(part, x.axis)
        inside = [b for b in borders if start <= b <= end]
        pieces += [
            narrow(walk, part, x.axis, low - start, high - low) for low, high in pairwise(inside)
        ]
        start = end
    return pieces


class Sides:
    """Many pieces in turn, each at U or at B, as one value of each batch; and back.

    Args:
        stays: per piece, whether it is at U.
        borders: where the pieces begin, and the end.
    """

    def __init__(self, stays: Sequence[bool], borders: Sequence[int]) -> None:
        self._stays = list(stays)
        lengths = [high - low for low, high in pairwise(borders)]
        self._runs = [
            (stay, sum(length for _, length in run))
            for stay, run in groupby(zip(stays, lengths, strict=True), key=lambda pair: pair[0])
        ]

    def split(self, walk: Walk, pieces: Sequence[Any], axis: int, reason: str | None) -> list[Any]:
        """The pieces at U side by side, then those at B."""
        sides = []
        for side in (True, False):
            some = [x for x, stay in zip(pieces, self._stays, strict=True) if stay == side]
            sides.append(together(walk, some, axis, some[0].rows, reason))
        return sides

    def merge(self, walk: Walk, sides: Sequence[Any], axis: int) -> list[Any]:
        """The value at U and the value at B as pieces in their order."""
        taken, pieces = {True: 0, False: 0}, []
        values = {True: plain(walk, sides[0]), False: plain(walk, sides[1])}
        for stay, length in self._runs:
            pieces.append(narrow(walk, values[stay], axis, taken[stay], length))
            taken[stay] += length
        return pieces
