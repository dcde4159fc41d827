# SPDX-License-Identifier: Apache-2.0
"""Sizes that depend on the batch, and where the batch lies in a shape.

`Rows` says where the batch lies in a shape. A `Size` is a number computed from the batch size: it
has a reading at U and one at B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

# Any dimension of a shape: static, or a number that depends on the batch size.
Dim = Any

# The end of a slice that goes as far as the axis.
LAST = 2**63 - 1

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

    def apart(self, is_inner: bool) -> tuple[int, Rows]:
        """What is merged with the batch, inside of its rows or around it, as an axis of its own
        behind or before the batch: its size, and where the batch is then.
        """
        if is_inner:
            return self.inner, replace(self, inner=1)
        return self.outer, replace(self, axis=self.axis + 1, outer=1)

    def length(self) -> Dim:
        factor = self.outer * self.inner
        return BATCH if factor == 1 else Size(lambda n: n * factor)


def repeat_row(tensor: Tensor, rows: Rows, n: Any) -> Tensor:
    """Repeats the shared row of a constant, as a view where it can be one."""
    if rows.outer * rows.inner == 1:
        return tensor.expand(*tensor.shape[: rows.axis], n, *tensor.shape[rows.axis + 1 :])
    split = tensor.unflatten(rows.axis, (rows.outer, 1, rows.inner))
    sizes = list(split.shape)
    sizes[rows.axis + 1] = n
    return split.expand(sizes).flatten(rows.axis, rows.axis + 2)
