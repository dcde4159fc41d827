# SPDX-License-Identifier: Apache-2.0
"""Products of a user's matrix with a candidate's, read by index (A13)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Form, Rows, Sum, User
from ikbo.transform.parts import narrow, plain, together
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


def indexed_product(walk: Walk, user: Tensor, cand: Tensor, *, user_first: bool) -> Tensor:
    """`user @ cand`, or `cand @ user`, row by row; `[U, ..., P, R]` and `[B, ..., R, N]`.

    Axes between, the same in both, count as users of their own.
    """
    between = cand.shape[1:-2]
    if len(between) > 1:
        pair = (x.flatten(1, len(between)) for x in (user, cand))
        return indexed_product(walk, *pair, user_first=user_first).unflatten(1, between)
    if between:
        heads = between[0]
        places = torch.arange(heads, dtype=torch.int32, device=cand.device)
        index = (walk.cand_to_user.unsqueeze(1) * heads + places).flatten()
        out = _bmm(user.flatten(0, 1), cand.flatten(0, 1), index, user_first)
        return out.unflatten(0, (-1, heads))
    return _bmm(user, cand, walk.cand_to_user, user_first)


def _bmm(user: Tensor, cand: Tensor, index: Tensor, user_first: bool) -> Tensor:
    if user_first:
        return torch.ops.ikbo.bmm(user, cand, index, False, False)
    return torch.ops.ikbo.bmm(user, cand, index, True, True).mT


@rule(aten.matmul.default, aten.bmm.default)
def product(walk: Walk, a: Form, b: Form) -> Cand | None:
    """A13: a product of a user's matrix with a candidate's.

    before: matmul(weights [B, Q, S], expand(k [U, S, D]))    after: ikbo::bmm(k.mT, weights.mT).mT
    """
    user, cand = (a, b) if isinstance(a, User) else (b, a)
    if not isinstance(user, User) or not isinstance(cand, Cand | Sum) or f.rank(a) != f.rank(b):
        return None
    kind = f.dtype(a)
    fits = user.rows == cand.rows == Rows() and kind == f.dtype(b) and kind.is_floating_point
    if not fits or f.rank(a) < 3 or f.shape(a)[1:-2] != f.shape(b)[1:-2]:
        return None
    out = indexed_product(walk, user.tensor, walk.materialise(cand), user_first=user is a)
    return Cand(out, Rows())


@rule(aten.matmul.default, aten.bmm.default)
def product_of_rows(walk: Walk, a: Form, b: Form) -> Cand | None:
    """A7: rows, or columns, of both sides meet a candidate's matrix side by side.

    before: bmm(cat([expand(x_u), x_c], 1), y)    after: cat([ikbo::bmm(x_u, y), bmm(x_c, y)], 1)
    """
    x, y = (a, b) if isinstance(a, Concat) else (b, a)
    if not isinstance(x, Concat) or not _meets(x, y) or x.axis != f.rank(x) - (2 if x is a else 1):
        return None
    y = plain(walk, y)
    pairs = [(part, y) if x is a else (y, part) for part in x.parts]
    out = [walk.materialise(walk.apply(aten.matmul.default, *pair)) for pair in pairs]
    return Cand(torch.cat(out, x.axis), Rows())


@rule(aten.matmul.default, aten.bmm.default)
def product_over_rows(walk: Walk, a: Form, b: Form) -> Cand | None:
    """A13: a candidate's weights meet rows of both sides part by part.

    before: matmul(w [B, Q, K], cat([expand(x_u), x_c], 1))
    after:  ikbo::bmm(x_u.mT, w[:, :, u].mT).mT + matmul(w[:, :, c], x_c)
    """
    x, y = (a, b) if isinstance(a, Concat) else (b, a)
    if not isinstance(x, Concat) or not _meets(x, y) or x.axis != f.rank(x) - (1 if x is a else 2):
        return None
    y = plain(walk, y)
    across, start, total = 2 * f.rank(x) - 3 - x.axis, 0, []
    for part in together_by_side(walk, x):
        width = f.width(part, x.axis)
        some = narrow(walk, y, across, start, width)
        pair = (part, some) if x is a else (some, part)
        total.append(walk.materialise(walk.apply(aten.matmul.default, *pair)))
        start += width
    return Cand(sum(total[1:], total[0]), Rows())


def together_by_side(walk: Walk, x: Concat) -> list[Any]:
    """The parts, neighbours of one side as one."""
    runs = groupby(x.parts, key=f.is_user_only)
    return [together(walk, list(run), x.axis, x.rows) for _, run in runs]


def _meets(x: Concat, y: Form) -> bool:
    """Whether a candidate's matrix meets the concatenation row by row."""
    if not isinstance(y, Cand | Sum) or f.rank(x) != f.rank(y) or f.rank(x) < 3:
        return False
    kind = f.dtype(x)
    fits = x.rows == y.rows == Rows() and kind == f.dtype(y) and kind.is_floating_point
    return fits and x.axis > 0 and f.shape(x)[1:-2] == f.shape(y)[1:-2]


@rule(aten.einsum.default)
def spelled(walk: Walk, equation: str, operands: Sequence[Form], **_: Any) -> Form | None:
    """A13: before: einsum("bt,btd->bd", w, expand(k)); after: permutations around a product."""
    equation = equation.replace(" ", "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    if {isinstance(x, User) for x in operands} != {True, False}:
        return None
    if not all(isinstance(x, User | Cand) and x.rows == Rows() for x in operands):
        return None
    inputs, output = equation.split("->")
    a, b = inputs.split(",")
    shared = [x for x in a if x in b and x in output]
    summed = [x for x in a if x in b and x not in output]
    left, right = ([x for x in t if x not in o] for t, o in ((a, b), (b, a)))
    names = [*shared, *left, *right]
    is_product = len(summed) == 1 and max(len(left), len(right)) < 2
    if not is_product or sorted(names) != sorted(output) or a[0] != b[0] or a[0] not in shared:
        return None
    if len(set(a)) != len(a) or len(set(b)) != len(b):
        return None
    turned = []
    for x, term, order, size in (
        (operands[0], a, [*shared, *left, *summed], -2),
        (operands[1], b, [*shared, *summed, *right], -1),
    ):
        y = walk.apply(aten.permute.default, x, [term.index(n) for n in order])
        is_whole = len(order) == len(shared) + 2
        turned.append(y if is_whole else walk.apply(aten.unsqueeze.default, y, size))
    out = walk.apply(aten.matmul.default, *turned)
    for axis, letters in ((len(shared) + 1, right), (len(shared), left)):
        if not letters:
            out = walk.apply(aten.squeeze.dim, out, axis)
    return walk.apply(aten.permute.default, out, [names.index(n) for n in output])
