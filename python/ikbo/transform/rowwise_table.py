# SPDX-License-Identifier: Apache-2.0
"""The table of operators that treat each position of an axis alone.

Each entry has its ATen operator's own signature; tensors arrive as `Axis`, everything else as it
is. It
returns where the axis in question is in the result: one axis, a tuple with one per result, or None
if positions are not treated alone. An operator that is not listed is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ikbo.transform import forms as f

aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """A tensor operand: its rank and the axis in question, None if it does not have it."""

    ndim: int
    axis: int | None

    def is_any(self, *axes: int) -> bool:
        """Whether the axis in question is among `axes` (negative counts from the right)."""
        return self.axis in [f.normal_axis(axis, self.ndim) for axis in axes]


TABLE: dict[Any, Callable[..., Any]] = {}


def _entry(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            TABLE[target] = function
        return function

    return register


def _free(*operands: Any) -> bool:
    """Whether none of the operands has the axis in question."""
    return all(not isinstance(x, Axis) or x.axis is None for x in pytree.tree_leaves(operands))


def _reduced(x: Axis, dims: Any, keepdim: bool) -> int | None:
    """The axis after a reduction over `dims`; None if it is reduced itself."""
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or x.is_any(*dims):
        return None
    assert x.axis is not None
    gone = sum(f.normal_axis(dim, x.ndim) < x.axis for dim in dims)
    return x.axis if keepdim else x.axis - gone


@_entry(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims,
    aten.argmax.default, aten.argmin.default,
)  # fmt: skip
def _reduce(x: Axis, dim: Any = None, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@_entry(aten.prod.dim_int)
def _prod(x: Axis, dim: int, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@_entry(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default)
def _max(x: Axis, dim: int = -1, keepdim: bool = False) -> Any:
    axis = _reduced(x, dim, keepdim)
    return None if axis is None else (axis, axis)


@_entry(aten.var.correction, aten.std.correction)
def _var(x: Axis, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> int | None:
    return _reduced(x, dim, keepdim)


@_entry(aten.var.dim, aten.std.dim)
def _var_dim(x: Axis, dim: Any, unbiased: bool = True, keepdim: bool = False) -> int | None:
    return _reduced(x, dim, keepdim)


@_entry(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def _norm(x: Axis, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@_entry(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default,
    aten.cumsum.default, aten.cumprod.default, aten.glu.default,
)  # fmt: skip
def _along(x: Axis, dim: int = -1, *_: Any, **__: Any) -> int | None:
    return None if x.is_any(dim) else x.axis


@_entry(aten.sort.default, aten.argsort.default)
def _sort(x: Axis, dim: int = -1, descending: bool = False) -> Any:
    return None if x.is_any(dim) else x.axis


@_entry(aten.topk.default)
def _topk(x: Axis, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> int | None:
    return None if x.is_any(dim) else x.axis


@_entry(aten.flip.default)
def _flip(x: Axis, dims: Any) -> int | None:
    return None if x.is_any(*dims) else x.axis


@_entry(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(x: Axis, normalized_shape: Any, *rest: Any) -> int | None:
    inside = x.is_any(*range(-len(normalized_shape), 0))
    return x.axis if _free(*rest) and not inside else None


@_entry(aten.group_norm.default)
def _group_norm(x: Axis, num_groups: int, *rest: Any) -> int | None:
    return 0 if _free(*rest) and x.axis == 0 else None


@_entry(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: Axis, *rest: Any) -> Any:
    # The two further results are empty in evaluation.
    return (x.axis, None, None) if _free(*rest) and x.axis != 1 else None


@_entry(aten.linear.default)
def _linear(x: Axis, weight: Axis, bias: Axis | None = None) -> int | None:
    return x.axis if _free(weight, bias) and not x.is_any(-1) else None


@_entry(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(a: Axis, b: Axis) -> int | None:
    if a.ndim < 2 or b.ndim < 2:
        is_vector = b.ndim == 1 and a.ndim > 1 and _free(b)
        return a.axis if is_vector and not a.is_any(-1) else None
    ndim = max(a.ndim, b.ndim)
    if _free(b) and not a.is_any(-1):
        assert a.axis is not None
        return a.axis + ndim - a.ndim
    if _free(a) and not b.is_any(-2):
        assert b.axis is not None
        return b.axis + ndim - b.ndim
    return pointwise_axis([a, b]) if not (a.is_any(-1, -2) or b.is_any(-1, -2)) else None


@_entry(aten.baddbmm.default)
def _baddbmm(c: Axis, a: Axis, b: Axis, **_: Any) -> int | None:
    inner = any(x.is_any(-1, -2) for x in (c, a, b))
    return None if inner or _free(a) != _free(b) else pointwise_axis([c, a, b])


@_entry(aten.addmm.default)
def _addmm(c: Axis, a: Axis, b: Axis, **_: Any) -> int | None:
    return a.axis if _free(b) and a.axis == 0 and (_free(c) or c.axis == c.ndim - 2) else None


@_entry(aten.einsum.default)
def _einsum(equation: str, operands: Sequence[Axis], **_: Any) -> int | None:
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    letters = {t[x.axis] for t, x in zip(terms, operands, strict=True) if x.axis is not None}
    if len(letters) != 1:
        return None
    letter = letters.pop()
    alone = all(
        t.count(letter) == (x.axis is not None) for t, x in zip(terms, operands, strict=True)
    )
    return output.index(letter) if alone and output.count(letter) == 1 else None


@_entry(aten.scaled_dot_product_attention.default)
def _sdpa(
    q: Axis, k: Axis, v: Axis, mask: Axis | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> int | None:  # fmt: skip
    if _free(k, v, mask) and q.is_any(-2) and not is_causal and mask is None:
        return q.axis
    tensors = [x for x in (q, k, v, mask) if isinstance(x, Axis)]
    if _free(q) or _free(k) or _free(v) or any(x.is_any(-1, -2) for x in tensors):
        return None
    return pointwise_axis(tensors)


@_entry(aten.conv1d.default, aten.conv2d.default)
def _conv(x: Axis, weight: Axis, bias: Axis | None = None, *_: Any) -> int | None:
    return 0 if x.axis == 0 and _free(weight, bias) else None


@_entry(aten.max_pool1d.default, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default)
def _pool(x: Axis, *_: Any, **__: Any) -> int | None:
    return x.axis if x.ndim == 3 and not x.is_any(-1) else None


@_entry(aten.embedding.default)
def _embedding(weight: Axis, indices: Axis, *_: Any) -> int | None:
    return indices.axis if _free(weight) else None


@_entry(aten.bucketize.Tensor)
def _bucketize(x: Axis, boundaries: Axis, **_: Any) -> int | None:
    return x.axis if _free(boundaries) else None


@_entry(aten.one_hot.default)
def _one_hot(x: Axis, num_classes: int = -1) -> int | None:
    return x.axis if num_classes >= 0 else None


@_entry(aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _gru(x: Axis, state: Axis, weights: Any, *options: Any) -> Any:
    return _recurrent(x, [state], weights, options[-1], 2)


@_entry(aten.lstm.input)
def _lstm(x: Axis, states: Sequence[Axis], weights: Any, *options: Any) -> Any:
    return _recurrent(x, states, weights, options[-1], 3)


def _recurrent(x: Axis, states: Any, weights: Any, batch_first: bool, results: int) -> Any:
    axis = 0 if batch_first else 1
    ok = x.ndim == 3 and x.axis == axis and all(s.axis == 1 for s in states) and _free(weights)
    return (axis, *[1] * (results - 1)) if ok else None


@_entry(aten.select.int)
def _select(x: Axis, dim: int, index: Any) -> int | None:
    return _reduced(x, dim, keepdim=False)


@_entry(aten.slice.Tensor)
def _slice(x: Axis, dim: int = 0, *_: Any) -> int | None:
    return None if x.is_any(dim) else x.axis


@_entry(aten.split.Tensor, aten.split_with_sizes.default)
def _split(x: Axis, sizes: Any, dim: int = 0) -> int | None:
    return None if x.is_any(dim) else x.axis


@_entry(aten.unbind.int)
def _unbind(x: Axis, dim: int = 0) -> int | None:
    return _reduced(x, dim, keepdim=False)


@_entry(aten.index_select.default)
def _index_select(x: Axis, dim: int, index: Axis) -> int | None:
    return None if x.is_any(dim) or not _free(index) else x.axis


@_entry(aten.gather.default)
def _gather(x: Axis, dim: int, index: Axis, **_: Any) -> int | None:
    return None if x.axis is None or x.is_any(dim) or x.axis != index.axis else x.axis


@_entry(aten.index.Tensor)
def _index(x: Axis, indices: Sequence[Any]) -> int | None:
    # x[:, i]: everything before the only index stays where it is.
    used = [i for i, index in enumerate(indices) if index is not None]
    is_one = len(used) == 1 and _free(indices)
    return x.axis if is_one and x.axis is not None and x.axis < used[0] else None


@_entry(aten.cat.default)
def _cat(tensors: Sequence[Axis], dim: int = 0) -> int | None:
    axes = {x.axis for x in tensors}
    return None if len(axes) != 1 or tensors[0].is_any(dim) else tensors[0].axis


@_entry(aten.constant_pad_nd.default)
def _pad(x: Axis, pad: Sequence[int], value: Any = 0) -> int | None:
    return None if x.is_any(*range(-(len(pad) // 2), 0)) else x.axis


def pointwise_axis(tensors: Sequence[Axis]) -> int | None:
    """The axis in a broadcast result; None if the operands do not agree on it."""
    from_right = {x.ndim - x.axis for x in tensors if x.axis is not None}
    ndim = max(x.ndim for x in tensors)
    return ndim - from_right.pop() if len(from_right) == 1 else None
