# SPDX-License-Identifier: Apache-2.0
"""Products with a constant matrix over a mixed axis (A1, A2), and what may follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, Form, Product, Sum, User
from ikbo.transform.parts import rejoined
from ikbo.transform.pending import Affine, Joined, Normed, Reordered, Scaled
from ikbo.transform.rules.registry import rule

if TYPE_CHECKING:
    from ikbo.transform.walk import Walk

aten = torch.ops.aten


def is_mixed_along(x: Form, axis: int) -> bool:
    """Whether user and candidate parts lie side by side along `axis`."""
    concat = x.x if isinstance(x, Affine) else x
    ndim = f.rank(x)
    if isinstance(concat, Joined | Normed):
        return f.normal_axis(axis, ndim) == ndim - 1
    return isinstance(concat, Concat | Reordered | Scaled) and concat.axis == f.normal_axis(
        axis, ndim
    )


@rule(aten.linear.default)
def linear(walk: Walk, x: Form, weight: Form, bias: Form | None = None) -> Sum | None:
    """A1: a linear layer over a concatenation.

    before: linear(cat([expand(u), c], -1), W, b)
    after:  Sum(linear(u, W[:, u columns], b) at U, linear(c, W[:, c columns]) at B)
    """
    if not (is_mixed_along(x, -1) and isinstance(weight, Const)):
        return None
    if not (bias is None or isinstance(bias, Const)):
        return None
    if isinstance(x, Affine):
        weight, bias = _fold_affine(walk, x, weight, bias)
        x = x.x
    if isinstance(x, Reordered):
        weight = _fold_order(walk, x, weight)
        x = x.x
    if not isinstance(x, Concat):
        return None
    user, cand = (side_of(walk, x, side) for side in (User, Cand))
    w_user, w_cand = (columns_of(walk, x, weight, side) for side in (User, Cand))
    return Sum(
        Product("linear", user, w_user, bias, walk.node),
        Product("linear", cand, w_cand, None, walk.node),
        x.rows,
    )


def _fold_affine(
    walk: Walk, x: Affine, weight: Const, bias: Const | None
) -> tuple[Const, Const | None]:
    """A3: `W (s x + t) + b = (W s) x + (b + W t)`."""
    scale, shift = x.scale, x.shift
    folded = weight
    if scale is not None:
        folded = walk.fold(lambda: weight.tensor * scale.tensor, f"{weight.name}_scaled")
    if shift is not None:
        old = bias
        bias = walk.fold(
            lambda: weight.tensor @ shift.tensor + (0 if old is None else old.tensor),
            f"{weight.name}_shift",
        )
    return folded, bias


def _fold_order(walk: Walk, x: Reordered, weight: Const) -> Const:
    """A6, A11: the columns of a weight that meet each element of `x.x`, added up."""

    def moved() -> torch.Tensor:
        columns = weight.tensor.new_zeros(weight.tensor.shape[0], f.width(x.x, x.axis))
        order = torch.tensor(x.order, device=columns.device)
        return columns.index_add_(1, order, weight.tensor.detach())

    return walk.fold(moved, f"{weight.name}_reordered")


def _is_on(part: Any, side: type) -> bool:
    return isinstance(part, Cand) == (side is Cand)


def side_of(walk: Walk, x: Concat, side: type) -> Any:
    """The user's or the candidate's parts of a concatenation, as one form."""
    return walk.once(f"{side.__name__} side", x, lambda: _side(walk, x, side))


def _side(walk: Walk, x: Concat, side: type) -> Any:
    parts = rejoined(walk, [part for part in x.parts if _is_on(part, side)], x.axis)
    if len(parts) == 1 and isinstance(parts[0], User | Cand):
        return parts[0]
    tensors = [p.tensor if isinstance(p, Cand) else walk.at_users(p) for p in parts]
    return _cat(side, parts, tensors, x)


def columns_of(walk: Walk, x: Concat, weight: Const, side: type) -> Const:
    """The columns of a weight that meet the parts of one side."""
    widths = [f.width(part, x.axis) for part in x.parts]
    ranges = [
        (sum(widths[:i]), width)
        for i, (part, width) in enumerate(zip(x.parts, widths, strict=True))
        if _is_on(part, side)
    ]
    return walk.fold(
        lambda: torch.cat([weight.tensor.narrow(1, lo, width) for lo, width in ranges], 1),
        f"{weight.name}_{'user' if side is User else 'cand'}",
    )


def _cat(kind: type, forms: list[Any], tensors: list[Any], x: Concat) -> Any:
    """Joins parts; parts that are one permutation of others are joined before it.

    The permutation that the model applies to fields before a product then disappears from the
    graph.
    """
    dims = {getattr(form, "dims", None) for form in forms}
    order = dims.pop() if len(dims) == 1 else None
    if order is None:
        return kind(torch.cat(tensors, x.axis), x.rows)
    bases, axis = [form.base for form in forms], order[x.axis]
    pieces = tuple(base.tensor for base in bases)
    base = kind(torch.cat(pieces, axis), bases[0].rows, pieces=pieces if axis == 1 else None)
    return kind(base.tensor.permute(order), x.rows, base=base, dims=order)


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default)
def matmul(walk: Walk, a: Form, b: Form) -> Form | None:
    """A1, A2: a product with a constant matrix on either side.

    before: cat([u, c], -1) @ V             W @ cat([e_user, e_cand], -2)
    after:  linear(cat([u, c], -1), V.T)    linear(cat(...) transposed, W) transposed
    """
    if isinstance(b, Const) and b.tensor.ndim == 2 and is_mixed_along(a, -1):
        return walk.apply(aten.linear.default, a, _transposed(walk, b))
    if isinstance(a, Const) and a.tensor.ndim == 2 and is_mixed_along(b, -2):
        swapped = walk.apply(aten.transpose.int, b, -1, -2)
        return walk.apply(aten.transpose.int, walk.apply(aten.linear.default, swapped, a), -1, -2)
    return None


def _transposed(walk: Walk, weight: Const) -> Const:
    return walk.fold(weight.tensor.t, weight.name)


@rule(aten.addmm.default)
def addmm(walk: Walk, c: Form, a: Form, b: Form, *, beta: Any = 1, alpha: Any = 1) -> Form | None:
    """A1: before: addmm(bias, cat([u, c], 1), V); after: linear(cat([u, c], 1), V.T, bias)."""
    is_bias = isinstance(c, Const) and c.tensor.ndim == 1
    if beta != 1 or alpha != 1 or not is_bias or not isinstance(b, Const):
        return None
    if not is_mixed_along(a, -1) or c.tensor.shape[0] != b.tensor.shape[1]:
        return None
    return walk.apply(aten.linear.default, a, _transposed(walk, b), c)


@rule(aten.einsum.default)
def einsum(walk: Walk, equation: str, operands: Sequence[Form], **_: Any) -> Form | None:
    """A1, A2: one contraction of a mixed axis with a constant matrix.

    before: einsum("mk,bkn->bmn", W, cat([e_user, e_cand], 1))
    after:  permute, linear, permute
    """
    equation = equation.replace(" ", "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if isinstance(operands[0], Const):
        terms, operands = terms[::-1], operands[::-1]
    (x_term, w_term), (x, weight) = terms, operands
    summed = set(x_term) & set(w_term) - set(output)
    if len(summed) != 1 or len(set(w_term)) != 2 or len(w_term) != 2:
        return None
    k = summed.pop()
    m = w_term.replace(k, "")
    rest = x_term.replace(k, "")
    plain = len(set(x_term)) == len(x_term) and sorted(output) == sorted(rest + m)
    if not plain or not isinstance(weight, Const) or not is_mixed_along(x, x_term.index(k)):
        return None
    last = walk.apply(aten.permute.default, x, [x_term.index(letter) for letter in rest + k])
    matrix = weight if w_term == m + k else _transposed(walk, weight)
    out = walk.apply(aten.linear.default, last, matrix)
    return walk.apply(aten.permute.default, out, [(rest + m).index(letter) for letter in output])


@rule(aten.tensordot.default)
def tensordot(
    walk: Walk, x: Form, weight: Form, x_dims: Sequence[int], weight_dims: Sequence[int]
) -> Form | None:
    """A1: before: tensordot(cat([u, c], 1), V, [1], [0]); after: permute, linear(..., V.T)."""
    is_matrix = isinstance(weight, Const) and weight.tensor.ndim == 2 and weight.rows is None
    if not is_matrix or len(x_dims) != 1 or isinstance(x, Const):
        return None
    ndim, axis = f.rank(x), f.normal_axis(x_dims[0], f.rank(x))
    last = walk.apply(aten.permute.default, x, [*(a for a in range(ndim) if a != axis), axis])
    is_first = f.normal_axis(weight_dims[0], 2) == 0
    matrix = _transposed(walk, weight) if is_first else weight  # type: ignore[arg-type]
    return walk.apply(aten.linear.default, last, matrix)


@rule(aten.conv1d.default, aten.conv2d.default)
def conv(walk: Walk, x: Form, weight: Form, bias: Form | None = None, *options: Any) -> Form | None:
    """A1, A2: a convolution of kernel size 1 over mixed channels, or over positions of both sides.

    before: conv1d(cat([e_user, e_cand], 1), W[M, K, 1], b)
    after:  permute channels last, linear(W[M, K], b), permute back
    """
    is_mixed = isinstance(x, Concat) or is_mixed_along(x, 1)
    if not (isinstance(weight, Const) and is_mixed) or f.rank(x) < 3:
        return None
    defaults: list[Any] = [1, 0, 1, 1]
    stride, padding, _, groups = list(options) + defaults[len(options) :]
    flat = [*_ints(stride), *[p + 1 for p in _ints(padding)], groups, *weight.tensor.shape[2:]]
    if any(number != 1 for number in flat) or isinstance(padding, str):
        return None
    ndim = f.rank(x)
    last = walk.apply(aten.permute.default, x, [0, *range(2, ndim), 1])
    matrix = walk.fold(lambda: weight.tensor.flatten(1), weight.name)
    out = walk.apply(aten.linear.default, last, matrix, bias)
    return walk.apply(aten.permute.default, out, [0, ndim - 1, *range(1, ndim - 1)])


def _ints(value: Any) -> list[int]:
    if isinstance(value, str):
        return [0]
    return list(value) if isinstance(value, list | tuple) else [value]


def swapped(total: Sum) -> Sum | None:
    """A `Sum` of products with its last two axes exchanged, without computing it."""

    def swap(term: Any) -> Product:
        x = _permuted(term.x, (0, 2, 1))
        return replace(term, kind="lce" if term.kind == "linear" else "linear", x=x)

    terms = (total.user, total.cand)
    if not all(isinstance(t, Product) and t.x.tensor.ndim == 3 for t in terms):
        return None
    return (
        replace(total, user=swap(total.user), cand=swap(total.cand))
        if total.rows.is_plain
        else None
    )


def _permuted(x: Any, dims: tuple[int, ...]) -> Any:
    if x.base is not None and x.dims is not None and [x.dims[d] for d in dims] == sorted(dims):
        return x.base
    return type(x)(x.tensor.permute(dims), x.rows, base=x, dims=dims)


def _activation(name: str, target: Any) -> None:
    @rule(target)
    def activate(walk: Walk, x: Form, **options: Any) -> Cand | None:
        """A22: an activation after a split linear layer.

        before: act(Sum(linear(u), linear(c)))
        after:  ikbo::linear(u, c, ..., activation=act)
        """
        is_erf = options.get("approximate", "none") == "none"
        if not (isinstance(x, Sum) and not x.is_shared and x.rows.is_plain and is_erf):
            return None
        terms = (x.user, x.cand)
        if not all(isinstance(t, Product) and t.kind == "linear" for t in terms) or f.rank(x) != 2:
            return None
        return Cand(walk.add_up(x, name), x.rows)

    activate.__name__ = f"activate_{name}"


for _name in ("relu", "gelu", "silu", "sigmoid"):
    _activation(_name, getattr(aten, _name).default)
