# SPDX-License-Identifier: Apache-2.0
"""Inputs that are not one row of one side: packed columns, and several rows one after another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ikbo.transform.forms import Cand, Concat, Form, Merged, Rows, User

_SUBSCRIPT = re.compile(r"(?P<name>[^\[\]]+)\[(?P<inside>.*)\]")
# A range of columns as Python writes it: "4", "3:7", ":7", "3:", "0:8:2".
_RANGE = re.compile(r"-?\d+|(-?\d+)?:(-?\d+)?(:-?\d+)?")

# The sides of a packed input, in the order in which a transformed module takes them.
SIDES = ("user", "cand")


@dataclass(frozen=True)
class Packed:
    """Which columns, the positions along `axis`, are the user's.

    A transformed module takes such an input as a dict of its two parts, `{"user": [U, ...], "cand":
    [B, ...]}`; in each, the columns keep their order.
    """

    axis: int
    width: int
    user: frozenset[int]

    def columns(self, side: str) -> tuple[int, ...]:
        """The columns of the part `side`."""
        return tuple(i for i in range(self.width) if (i in self.user) == (side == "user"))

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """The parts of a tensor that holds all columns."""
        places = {side: torch.tensor(self.columns(side), device=x.device) for side in SIDES}
        return {side: x.index_select(self.axis, places[side]) for side in SIDES}

    def join(self, user: Tensor, cand: Tensor) -> Tensor:
        """The tensor with all columns, of parts with one batch size."""
        order = self.order(user.device)
        return torch.cat([user, cand], self.axis).index_select(self.axis, order)

    def order(self, device: torch.device) -> Tensor:
        """Where each column lies in both parts side by side."""
        places = self.columns("user") + self.columns("cand")
        return torch.tensor(sorted(range(self.width), key=places.__getitem__), device=device)

    def form(self, user: Tensor, cand: Tensor) -> Concat:
        """The tensor with all columns as a form, of parts at U and at B."""
        parts: list[User | Cand] = []
        taken = {True: 0, False: 0}
        for is_user, run in groupby(i in self.user for i in range(self.width)):
            length = len(list(run))
            part = (user if is_user else cand).narrow(self.axis, taken[is_user], length)
            parts.append((User if is_user else Cand)(part, Rows()))
            taken[is_user] += length
        return Concat(self.axis, tuple(parts), Rows())


@dataclass(frozen=True)
class Layout:
    """How a transformed module takes an input of the model.

    Where the model has `count` rows of it per candidate, one after another, they become an axis
    behind the batch; a packed input becomes its two parts.
    """

    count: int = 1
    packed: Packed | None = None

    def join(self, parts: Iterator[Any]) -> Any:
        """The model's input, of parts with one batch size."""
        x = next(parts) if self.packed is None else self.packed.join(next(parts), next(parts))
        return x if self.count == 1 else x.flatten(0, 1)

    def form(self, kind: type[User | Cand], parts: Iterator[Tensor]) -> Form:
        """The model's input as a form, of parts at U and at B; `kind` is its side if it has one."""
        merged = Rows(inner=self.count)
        if self.packed is None:
            x = next(parts)
            return kind(x if self.count == 1 else x.flatten(0, 1), merged)
        concat = self.packed.form(next(parts), next(parts))
        if self.count == 1:
            return concat
        if concat.axis == 1:
            return Merged(concat)
        flat = tuple(type(p)(p.tensor.flatten(0, 1), merged) for p in concat.parts)
        return Concat(concat.axis - 1, flat, merged)


def apart(
    named: Sequence[tuple[str, Any]], row_counts: Mapping[str, int] | None
) -> list[tuple[str, Any]]:
    """The inputs, those with several rows per candidate with these as an axis behind the batch.

    Errors:
        ValueError: `row_counts` does not fit the inputs.
    """
    counts = dict(row_counts or {})
    values = dict(named)
    for name, count in counts.items():
        x = values.get(name)
        if not isinstance(x, Tensor) or x.ndim == 0:
            raise ValueError(
                f"ikbo.transform: row_counts has {name!r}, which is no input of the model; the "
                f"inputs are {list(values)}"
            )
        if not isinstance(count, int) or count < 1 or x.shape[0] % count:
            raise ValueError(
                f"ikbo.transform: row_counts must say how many rows of input {name!r} belong to "
                f"one candidate, a divisor of its {x.shape[0]} rows; got {count!r}"
            )
        values[name] = x.unflatten(0, (-1, count))
    return [(name, values[name]) for name, _ in named]


def ranges(columns: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, range]]:
    """The path of each named column to its input and its range along the input's last axis.

    Args:
        columns: per input, the names of its columns in order, or a dict from name to column or
            `(start, stop)`.
        tensors: the model's inputs by name.

    Errors:
        TypeError, ValueError: `columns` is not as described, or does not fit the inputs.
    """
    if columns is not None and not isinstance(columns, Mapping):
        raise _columns_error("a dict from input name to column names", columns)
    found = {}
    for name, given in (columns or {}).items():
        if name not in tensors:
            raise ValueError(
                f"ikbo.transform: columns has {name!r}, which is no input of the model; the inputs "
                f"are {list(tensors)}"
            )
        width = _width(name, tensors[name], tensors[name].ndim - 1)
        for column, place in _named(name, given, width).items():
            if not 0 <= place.start < place.stop <= width:
                raise ValueError(
                    f"ikbo.transform: column {column!r} of input {name!r} must lie within its "
                    f"{width} columns; got {place.start}:{place.stop}"
                )
            found[f"{name}.{column}"] = (name, place)
    return found


def _named(name: str, given: Any, width: int) -> dict[str, range]:
    if isinstance(given, Mapping):
        places = {}
        for column, place in given.items():
            ends = (place, place + 1) if isinstance(place, int) else tuple(place)
            if len(ends) != 2 or not all(isinstance(end, int) for end in ends):
                raise _columns_error(f"a column or (start, stop) for {name}.{column}", place)
            places[str(column)] = range(*ends)
        return places
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _columns_error(f"the names of the columns of {name}, or a dict", given)
    if len(given) != width or len(set(given)) != width:
        raise ValueError(
            f"ikbo.transform: columns must name each of the {width} columns of input {name!r} "
            f"once; got {list(given)}"
        )
    return {str(column): range(i, i + 1) for i, column in enumerate(given)}


def _columns_error(wanted: str, got: Any) -> TypeError:
    return TypeError(f"ikbo.transform: columns must have {wanted}; got {got!r}")


def subscript(text: str, tensors: Mapping[str, Tensor]) -> tuple[str, int, set[int]] | None:
    """The input, axis and columns that a text like `x[:, 3:7]` or `x[:, [0, 5:8]]` names.

    Returns:
        None if it is no such text.

    Errors:
        ValueError: it is one, but names no columns of an input.
    """
    match = _SUBSCRIPT.fullmatch(text)
    if match is None or match["name"] not in tensors:
        return None
    name, items = match["name"], split_commas(match["inside"])
    picks = [(axis, item) for axis, item in enumerate(items) if item != ":"]
    if len(picks) != 1 or picks[0][0] == 0:
        raise ValueError(
            "ikbo.transform: columns in request_only must be given along one axis that is not the "
            f"batch, as {name}[:, 3:7] or {name}[:, [0, 5:8]]; got {text!r}"
        )
    axis, pick = picks[0]
    width = _width(name, tensors[name], axis)
    inner = pick[1:-1] if pick.startswith("[") and pick.endswith("]") else pick
    chosen: set[int] = set()
    for item in split_commas(inner):
        places = _places(item, width)
        if not places:
            raise ValueError(
                f"ikbo.transform: request_only has {text!r}; {item!r} must be a column or a range "
                f"with a column of axis {axis} of input {name!r}, which has {width}"
            )
        chosen.update(places)
    return name, axis, chosen


def _places(item: str, width: int) -> list[int]:
    if not _RANGE.fullmatch(item):
        return []
    if ":" in item:
        ends = [int(end) if end else None for end in item.split(":")]
        return list(range(width)[slice(*ends)]) if ends[2:] != [0] else []
    return [int(item) % width] if -width <= int(item) < width else []


def split_commas(text: str) -> list[str]:
    """The texts between commas that stand outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _width(name: str, tensor: Tensor, axis: int) -> int:
    if not 0 < axis < tensor.ndim:
        raise ValueError(
            f"ikbo.transform: input {name!r} must have columns, an axis {max(axis, 1)} after the "
            f"batch; its shape is {list(tensor.shape)}"
        )
    return tensor.shape[axis]


def columns_of_texts(texts: Sequence[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Per packed input, the range of each column, of texts like `x=user,age,history:20`."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for text in texts:
        name, _, columns = text.partition("=")
        places: dict[str, tuple[int, int]] = {}
        start = 0
        for column in columns.split(","):
            match = re.fullmatch(r"([^:]+)(?::([1-9]\d*))?", column.strip())
            if not name or match is None or match[1] in places:
                raise ValueError(
                    f"--columns must be NAME=COLUMN[:WIDTH],... with each column once; got {text!r}"
                )
            places[match[1]] = (start, start := start + int(match[2] or 1))
        found[name] = places
    return found


def counts_of_texts(texts: Sequence[str]) -> dict[str, int]:
    """Per input, its rows per candidate, of texts like `ids=7`."""
    found = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdecimal():
            raise ValueError(f"--row-count must be NAME=N; got {text!r}")
        found[name] = int(count)
    return found
