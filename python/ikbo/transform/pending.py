# SPDX-License-Identifier: Apache-2.0
"""Values that are computed when they are needed, since what follows may need less than them.

| form | means |
|---|---|
| `Affine` | `x * scale + shift` along the axis of a `Concat` |
| `Cross` | `user[cand_to_user] * cand`, sizes of 1 repeated |
| `Joined` | a concatenation with pending parts, perhaps seen in another shape |
| `Scaled` | `x * gain + shift`, one gain for each row of the batch |
| `Normed` | the LayerNorm of a concatenation along its axis |
| `Outer` | every field of one concatenation times every field of another |
| `Reordered` | parts of a concatenation, their elements in another order along its axis |
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Dim, Form, Pending, Rows, User
from ikbo.transform.origin import at_origin
from ikbo.transform.parts import narrow, plain, together

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Affine(Pending):
    """`x * scale + shift`; both are vectors along `x.axis`, None means 1 and 0."""

    x: Concat
    scale: Const | None
    shift: Const | None

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return self.x.rows

    def dims(self) -> list[Dim]:
        return f.shape(self.x)

    def sample(self) -> Tensor:
        return f.sample(self.x)

    def settled(self, walk: Walk) -> Concat:
        """Each part at its own batch."""
        axis, start, parts = self.x.axis, 0, []
        for part in self.x.parts:
            length = f.width(part, axis)
            for target, vector in ((aten.mul, self.scale), (aten.add, self.shift)):
                if vector is not None:
                    part = walk.apply(target.Tensor, part, self._along(walk, vector, start, length))
            parts.append(part)
            start += length
        return Concat(axis, tuple(parts), self.x.rows)

    def _along(self, walk: Walk, vector: Const, start: int, length: int) -> Any:
        ones = [1] * (f.rank(self.x) - self.x.axis - 1)
        return walk.fold(
            lambda: vector.tensor.narrow(0, start, length).reshape(-1, *ones),
            f"{vector.name}_part",
        )


@dataclass(frozen=True, eq=False)
class Cross(Pending):
    """`user[cand_to_user] * cand`, element by element; of one rank, batch first.

    `cand` is as small as broadcasting allows.
    """

    user: User
    cand: Cand
    origin: str

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return Rows()

    def dims(self) -> list[Dim]:
        pairs = zip(self.user.tensor.shape[1:], self.cand.tensor.shape[1:], strict=True)
        return [f.BATCH, *(n if m == 1 else m for n, m in pairs)]

    def sample(self) -> Tensor:
        return self.cand.tensor

    def settled(self, walk: Walk) -> Cand:
        with at_origin(self.origin):
            user = walk.materialise(self.user, "a product of a user and a candidate value")
            return Cand(user * self.cand.tensor, Rows())


@dataclass(frozen=True, eq=False)
class Joined(Pending):
    """Parts side by side along the last axis, some of them a `Sum` or pending.

    `view` is another shape of its leading axes, in which the model sees it.
    """

    parts: tuple[Form, ...]
    rows: Rows
    view: tuple[Dim, ...] | None = None

    @property
    def axis(self) -> int:
        return len(self.dims()) - 1

    def dims(self) -> list[Dim]:
        return self.plain_dims() if self.view is None else list(self.view)

    def plain_dims(self) -> list[Dim]:
        """The shape without `view`."""
        shapes = [f.shape(part) for part in self.parts]
        return [*shapes[0][:-1], sum(dims[-1] for dims in shapes)]

    def sample(self) -> Tensor:
        return f.sample(self.parts[0])

    def settled(self, walk: Walk) -> Form:
        parts = [walk.settle(x) if isinstance(x, Pending) else x for x in self.parts]
        x = self._concat(walk, [plain(walk, part) for part in parts])
        return x if self.view is None else walk.apply(aten.view.default, x, list(self.view))

    def _concat(self, walk: Walk, parts: list[Any]) -> Form:
        axis = f.rank(parts[0]) - 1
        if any(isinstance(x, User) for x in parts):
            return Concat(axis, tuple(parts), Rows())
        return together(walk, parts, axis, Rows())


@dataclass(frozen=True, eq=False)
class Scaled(Pending):
    """`x * gain + shift`; `gain` has size 1 along the axis of `x`, `shift` is a vector along it."""

    x: Concat | Affine
    gain: Cand
    shift: Const | None

    @property
    def concat(self) -> Concat:
        return self.x.x if isinstance(self.x, Affine) else self.x

    @property
    def axis(self) -> int:
        return self.concat.axis

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return self.concat.rows

    def dims(self) -> list[Dim]:
        return f.shape(self.x)

    def sample(self) -> Tensor:
        return self.gain.tensor

    def settled(self, walk: Walk) -> Cand:
        value = walk.materialise(self.x, "a gain differs from candidate to candidate")
        out = value * self.gain.tensor
        if self.shift is not None:
            ones = [1] * (f.rank(self.x) - self.axis - 1)
            shift = self.shift
            out = out + walk.use(walk.fold(lambda: shift.tensor.reshape(-1, *ones), shift.name))
        return Cand(out, self.rows)


@dataclass(frozen=True, eq=False)
class Normed(Pending):
    """`layer_norm(x)` over the last axis, along which `x` is a concatenation."""

    x: Concat
    weight: Const | None
    bias: Const | None
    eps: float
    origin: str

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return self.x.rows

    def dims(self) -> list[Dim]:
        return f.shape(self.x)

    def sample(self) -> Tensor:
        return f.sample(self.x)

    def settled(self, walk: Walk) -> Cand:
        with at_origin(self.origin):
            value = walk.materialise(self.x, "a norm over user and candidate features")
            weight, bias = (None if v is None else walk.use(v) for v in (self.weight, self.bias))
            sizes = [value.shape[-1]]
            out = torch.nn.functional.layer_norm(value, sizes, weight, bias, self.eps)
        return Cand(out, self.rows)


@dataclass(frozen=True, eq=False)
class Outer(Pending):
    """`p * q`, of concatenations along axis 1 and axis 2, each of size 1 along the other."""

    p: Concat
    q: Concat
    origin: str

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return self.p.rows

    def dims(self) -> list[Dim]:
        dims = f.shape(self.p)
        dims[self.q.axis] = f.shape(self.q)[self.q.axis]
        return dims

    def sample(self) -> Tensor:
        return f.sample(self.p)

    def settled(self, walk: Walk) -> Cand:
        with at_origin(self.origin):
            reason = "products of user and candidate fields"
            values = [walk.materialise(x, reason) for x in (self.p, self.q)]
            return Cand(values[0] * values[1], self.rows)


@dataclass(frozen=True, eq=False)
class Reordered(Pending):
    """Elements of `x` along its axis in another order: element i is `order[i]` of `x`.

    A product over that axis takes the order into its weight; then nothing is moved.
    """

    x: Concat
    order: tuple[int, ...]

    @property
    def axis(self) -> int:
        return self.x.axis

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return self.x.rows

    def dims(self) -> list[Dim]:
        dims = f.shape(self.x)
        dims[self.axis] = len(self.order)
        return dims

    def sample(self) -> Tensor:
        return f.sample(self.x)

    def settled(self, walk: Walk) -> Form:
        """Each part in the order in which it is read, then ranges of the parts in turn."""
        axis = self.axis
        owners = [
            (part, place)
            for part, x in enumerate(self.x.parts)
            for place in range(f.width(x, axis))
        ]
        chosen = [owners[i] for i in self.order]
        pieces = []
        values, taken = [], [0] * len(self.x.parts)
        for part, x in enumerate(self.x.parts):
            values.append(_in_order(walk, x, axis, [p for owner, p in chosen if owner == part]))
        for part, run in groupby(owner for owner, _ in chosen):
            length = len(list(run))
            pieces.append(narrow(walk, values[part], axis, taken[part], length))
            taken[part] += length
        runs = [list(run) for _, run in groupby(pieces, key=lambda x: isinstance(x, User))]
        parts = [together(walk, run, axis, self.rows) for run in runs]
        return parts[0] if len(parts) == 1 else Concat(axis, tuple(parts), self.rows)


def _in_order(walk: Walk, x: Any, axis: int, places: list[int]) -> Any:
    if places == list(range(f.width(x, axis))):
        return x
    device = f.sample(x).device
    picks = walk.fold(lambda: torch.tensor(places, dtype=torch.int64, device=device), "order")
    return walk.apply(aten.index_select.default, x, axis, picks)
