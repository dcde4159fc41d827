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


def entry(*targets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            TABLE[target] = function
        return function

    return register


def free(*operands: Any) -> bool:
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


@entry(
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims,
    aten.argmax.default, aten.argmin.default,
)  # fmt: skip
def _reduce(x: Axis, dim: Any = None, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@entry(aten.prod.dim_int, aten.count_nonzero.default)
def _prod(x: Axis, dim: int | None = None, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@entry(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default)
def _max(x: Axis, dim: int = -1, keepdim: bool = False) -> Any:
    axis = _reduced(x, dim, keepdim)
    return None if axis is None else (axis, axis)


@entry(aten.var.correction, aten.std.correction)
def _var(x: Axis, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> int | None:
    return _reduced(x, dim, keepdim)


@entry(aten.var.dim, aten.std.dim)
def _var_dim(x: Axis, dim: Any, unbiased: bool = True, keepdim: bool = False) -> int | None:
    return _reduced(x, dim, keepdim)


@entry(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def _norm(x: Axis, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> int | None:
    return _reduced(x, dim, keepdim)


@entry(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default,
    aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default,
    aten.glu.default,
)  # fmt: skip
def _along(x: Axis, dim: int = -1, *_: Any, **__: Any) -> int | None:
    return None if x.is_any(dim) else x.axis


@entry(aten.sort.default, aten.argsort.default)
def _sort(x: Axis, dim: int = -1, descending: bool = False) -> Any:
    return None if x.is_any(dim) else x.axis


@entry(aten.topk.default)
def _topk(x: Axis, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> int | None:
    return None if x.is_any(dim) else x.axis


@entry(aten.flip.default)
def _flip(x: Axis, dims: Any) -> int | None:
    return None if x.is_any(*dims) else x.axis


@entry(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(x: Axis, normalized_shape: Any, *rest: Any) -> int | None:
    inside = x.is_any(*range(-len(normalized_shape), 0))
    return x.axis if free(*rest) and not inside else None


@entry(aten.native_layer_norm.default)
def _native_layer_norm(x: Axis, normalized_shape: Any, *rest: Any) -> Any:
    axis = _layer_norm(x, normalized_shape, *rest)
    return None if axis is None else (axis, axis, axis)


@entry(aten.group_norm.default)
def _group_norm(x: Axis, num_groups: int, *rest: Any) -> int | None:
    return 0 if free(*rest) and x.axis == 0 else None


@entry(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(x: Axis, *rest: Any) -> Any:
    # The two further results are empty in evaluation.
    return (x.axis, None, None) if free(*rest) and x.axis != 1 else None


@entry(aten.max_pool1d.default, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default)
def _pool(x: Axis, *_: Any, **__: Any) -> int | None:
    return x.axis if x.ndim == 3 and not x.is_any(-1) else None


@entry(aten.embedding.default)
def _embedding(weight: Axis, indices: Axis, *_: Any) -> int | None:
    return indices.axis if free(weight) else None


@entry(aten.type_as.default)
def _type_as(x: Axis, other: Axis) -> int | None:
    return x.axis


@entry(aten.bucketize.Tensor)
def _bucketize(x: Axis, boundaries: Axis, **_: Any) -> int | None:
    return x.axis if free(boundaries) else None


@entry(aten.one_hot.default)
def _one_hot(x: Axis, num_classes: int = -1) -> int | None:
    return x.axis if num_classes >= 0 else None


@entry(aten.select.int)
def _select(x: Axis, dim: int, index: Any) -> int | None:
    return _reduced(x, dim, keepdim=False)


@entry(aten.slice.Tensor)
def _slice(x: Axis, dim: int = 0, *_: Any) -> int | None:
    return None if x.is_any(dim) else x.axis


@entry(aten.split.Tensor, aten.split_with_sizes.default)
def _split(x: Axis, sizes: Any, dim: int = 0) -> int | None:
    return None if x.is_any(dim) else x.axis


@entry(aten.unbind.int)
def _unbind(x: Axis, dim: int = 0) -> int | None:
    return _reduced(x, dim, keepdim=False)


@entry(aten.index_select.default)
def _index_select(x: Axis, dim: int, index: Axis) -> int | None:
    if free(x):
        return f.normal_axis(dim, x.ndim) if index.axis == 0 else None
    return None if x.is_any(dim) or not free(index) else x.axis


@entry(aten.gather.default)
def _gather(x: Axis, dim: int, index: Axis, **_: Any) -> int | None:
    if x.axis is None:  # each number of the index finds its value alone
        return index.axis if index.is_any(dim) else None
    return None if x.is_any(dim) or x.axis != index.axis else x.axis


@entry(aten.scatter.value, aten.scatter.src)
def _scatter(x: Axis, dim: int, index: Axis, source: Any) -> int | None:
    axes = {v.axis for v in (x, index, source) if isinstance(v, Axis)}
    return None if len(axes) != 1 or x.is_any(dim) else x.axis


@entry(aten.index.Tensor)
def _index(x: Axis, indices: Sequence[Any]) -> int | None:
    # x[:, i, j]: what stands before neighbouring indices stays there, their axes take their place.
    used = [i for i, index in enumerate(indices) if index is not None]
    place = used[0]
    if used != list(range(place, place + len(used))):
        return None
    if free(x):
        return place + indices[place].axis if len(used) == 1 else None
    return x.axis if free(indices) and x.axis is not None and x.axis < place else None


@entry(aten.cat.default)
def _cat(tensors: Sequence[Axis], dim: int = 0) -> int | None:
    axes = {x.axis for x in tensors}
    return None if len(axes) != 1 or tensors[0].is_any(dim) else tensors[0].axis


@entry(aten.pad.default)
def _pad(x: Axis, pad: Sequence[int], *_: Any) -> int | None:
    return None if x.is_any(*range(-(len(pad) // 2), 0)) else x.axis


@entry(aten.repeat.default)
def _repeat(x: Axis, repeats: Sequence[Any]) -> int | None:
    new = len(repeats) - x.ndim
    assert x.axis is not None
    axis = x.axis + new
    return axis if isinstance(repeats[axis], int) and repeats[axis] == 1 else None


@entry(aten.repeat_interleave.self_int)
def _repeat_interleave(x: Axis, repeats: int, dim: int | None = None, **_: Any) -> int | None:
    return None if dim is None or x.is_any(dim) else x.axis


@entry(aten.roll.default)
def _roll(x: Axis, shifts: Any, dims: Sequence[int] = ()) -> int | None:
    return None if not dims or x.is_any(*dims) else x.axis


@entry(aten.tril.default, aten.triu.default)
def _triangle(x: Axis, diagonal: int = 0) -> int | None:
    return None if x.is_any(-1, -2) else x.axis


@entry(aten.unfold.default)
def _unfold(x: Axis, dim: int, size: int, step: int) -> int | None:
    return None if x.is_any(dim) else x.axis


@entry(aten.prelu.default)
def _prelu(x: Axis, weight: Axis) -> int | None:
    return x.axis if free(weight) and x.axis != 1 else None


@entry(aten.cosine_similarity.default)
def _cosine_similarity(a: Axis, b: Axis, dim: int = 1, eps: float = 1e-8) -> int | None:
    return _reduced(a, dim, keepdim=False) if (a.ndim, a.axis) == (b.ndim, b.axis) else None


@entry(aten.searchsorted.Tensor)
def _searchsorted(sequence: Axis, x: Axis, **options: Any) -> int | None:
    return x.axis if free(sequence, list(options.values())) and sequence.ndim == 1 else None


@entry(aten.isin.Tensor_Tensor)
def _isin(x: Axis, values: Axis, **_: Any) -> int | None:
    return x.axis if free(values) else None


def pointwise_axis(tensors: Sequence[Axis]) -> int | None:
    """The axis in a broadcast result; None if the operands do not agree on it."""
    from_right = {x.ndim - x.axis for x in tensors if x.axis is not None}
    ndim = max(x.ndim for x in tensors)
    return ndim - from_right.pop() if len(from_right) == 1 else None
