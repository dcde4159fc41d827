# SPDX-License-Identifier: Apache-2.0
"""Pairs of fields: dot interactions (A6), outer products (A11)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Concat, Const, Form, Rows, Scores
from ikbo.transform.parts import plain
from ikbo.transform.pending import Outer, Reordered
from ikbo.transform.rules.picks import places_in_sides, sides
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten

Pair = tuple[int, int]


@rule(aten.index.Tensor)
def dots(walk: Walk, x: Form, indices: Sequence[Form | None]) -> Form | None:
    """A6: dot products of chosen pairs of fields, in the model's order.

    before: bmm(x, x.mT)[:, rows, columns], x = cat([expand(x_u), x_c], 1)
    after:  pairs of x_u at U, pairs with x_c at B, Reordered
    """
    if not isinstance(x, Scores) or x.steps or not _is_plain(x) or len(indices) != 3:
        return None
    first, *rest = indices
    if first is not None or not all(_is_list(picks) for picks in rest):
        return None
    lists = walk.constants.fold(lambda: [picks.tensor.tolist() for picks in rest])  # type: ignore
    counts = (f.width(x.q, 1), f.width(x.k, 2))
    places = [(i % counts[0], j % counts[1]) for i, j in zip(*lists, strict=True)]
    return _dots(walk, x, places)


def _is_list(picks: Any) -> bool:
    if not isinstance(picks, Const) or picks.rows is not None or picks.tensor.ndim != 1:
        return False
    return picks.tensor.dtype != torch.bool and picks.tensor.numel() > 0


def _is_plain(x: Scores) -> bool:
    return f.rank(x) == 3 and x.rows == Rows()


@rule(aten.view.default, aten._unsafe_view.default)
def all_pairs(walk: Walk, x: Form, shape: Sequence[Any]) -> Form | None:
    """A6, A11: all pairs of fields one after the other.

    before: view(bmm(x, x.mT), [B, K * K])        view(x[:, :, None] * x[:, None], [B, K * K, D])
    after:  pairs of the user's fields at U, the others at B
    """
    if not isinstance(x, Scores | Outer) or (
        isinstance(x, Scores) and (x.steps or not _is_plain(x))
    ):
        return None
    dims = f.shape(x)
    if (isinstance(x, Outer) and x.rows != Rows()) or len(shape) != len(dims) - 1:
        return None
    known = [d for d in shape if not (isinstance(d, int) and d == -1)]
    wanted = [dims[0], dims[1] * dims[2], *dims[3:]]
    is_merge = len(known) >= len(shape) - 1 and all(
        (isinstance(d, int) and d == -1) or f.same(d, w) for d, w in zip(shape, wanted, strict=True)
    )
    if not is_merge:
        return None
    places = [(i, j) for i in range(dims[1]) for j in range(dims[2])]
    if isinstance(x, Scores):
        return _dots(walk, x, places)
    return _chosen(walk, x.p, x.q, places, lambda a, b: walk.apply(aten.mul.Tensor, a, b))


def _dots(walk: Walk, x: Scores, places: list[Pair]) -> Form | None:
    is_symmetric = len(x.q.parts) == len(x.k.parts) and all(
        getattr(k, "base", None) is q and k.dims == (0, 2, 1)  # type: ignore[union-attr]
        for q, k in zip(x.q.parts, x.k.parts, strict=True)
    )
    if is_symmetric:  # of a pair and its mirror image one is computed
        owners = places_in_sides(x.q)
        places = [(j, i) if owners[i][0] < owners[j][0] else (i, j) for i, j in places]
    return _chosen(walk, x.q, x.k, places, lambda a, b: walk.apply(aten.matmul.default, a, b))


def _chosen(
    walk: Walk, p: Concat, q: Concat, places: list[Pair], product: Callable[[Any, Any], Any]
) -> Form | None:
    """Chosen elements of the grid of `p` and `q`: those of two user fields at U."""
    kinds = [set(map(f.is_user_only, x.parts)) for x in (p, q)]
    if any(len(some) < 2 for some in kinds):
        return None
    of_p, of_q = sides(walk, p), sides(walk, q)
    owners_p, owners_q = places_in_sides(p), places_in_sides(q)
    chosen = []
    for i, j in places:
        (side, row), (other, column) = owners_p[i], owners_q[j]
        chosen.append(((side, other), row * f.width(of_q[other], 2) + column))
    if (0, 0) not in {block for block, _ in chosen}:
        return None
    values: list[Any] = []
    where: dict[tuple[Pair, int], int] = {}
    total = 0
    for block in dict.fromkeys(block for block, _ in chosen):
        grid = product(of_p[block[0]], of_q[block[1]])
        dims = f.shape(grid)
        flat = walk.apply(aten.view.default, grid, [dims[0], dims[1] * dims[2], *dims[3:]])
        numbers = sorted({number for owner, number in chosen if owner == block})
        values.append(plain(walk, _picked(walk, plain(walk, flat), numbers)))
        where |= {(block, number): total + at for at, number in enumerate(numbers)}
        total += len(numbers)
    whole = Concat(1, tuple(values), Rows())
    return Reordered(whole, tuple(where[pair] for pair in chosen))


def _picked(walk: Walk, x: Any, numbers: list[int]) -> Any:
    if numbers == list(range(f.width(x, 1))):
        return x
    picks = walk.fold(lambda: torch.tensor(numbers, device=f.sample(x).device), "pairs")
    return walk.apply(aten.index_select.default, x, 1, picks)


@rule(aten.mul.Tensor)
def outer(walk: Walk, x: Form, y: Form) -> Outer | None:
    """A11: before: cat([u, c], 1)[:, :, None] * cat([u, c], 1)[:, None]; after: Outer(..., ...)."""
    if not (isinstance(x, Concat) and isinstance(y, Concat)) or x.rows != y.rows:
        return None
    p, q = (x, y) if x.axis < y.axis else (y, x)
    dims, sizes = f.shape(p), f.shape(q)
    is_grid = (p.axis, q.axis) == (1, 2) and len(dims) == len(sizes) == 4 and p.rows == Rows()
    if not is_grid or dims[2] != 1 or sizes[1] != 1 or dims[3] != sizes[3]:
        return None
    kind = f.dtype(p)
    return Outer(p, q, walk.node) if kind == f.dtype(q) and kind.is_floating_point else None


@rule(aten.einsum.default)
def spelled_outer(walk: Walk, equation: str, operands: Sequence[Form], **_: Any) -> Form | None:
    """A11: before: einsum("bhd,bmd->bhmd", x, y); after: x[:, :, None] * y[:, None]."""
    equation = equation.replace(" ", "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if not all(isinstance(x, Concat) for x in operands) or len(set(output)) != len(output):
        return None
    if any(len(set(t)) != len(t) for t in terms) or set("".join(terms)) != set(output):
        return None
    sides_of = []
    for x, term in zip(operands, terms, strict=True):
        turned = walk.apply(aten.permute.default, x, [term.index(n) for n in output if n in term])
        for axis, letter in enumerate(output):
            if letter not in term:
                turned = walk.apply(aten.unsqueeze.default, turned, axis)
        sides_of.append(turned)
    return walk.apply(aten.mul.Tensor, *sides_of)
