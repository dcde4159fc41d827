# SPDX-License-Identifier: Apache-2.0
"""The products in the table of operators that treat each position of an axis alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ikbo.transform.rowwise_table import Axis, entry, free, pointwise_axis

aten = torch.ops.aten


@entry(aten.linear.default)
def _linear(x: Axis, weight: Axis, bias: Axis | None = None) -> int | None:
    return x.axis if free(weight, bias) and not x.is_any(-1) else None


@entry(aten.matmul.default, aten.mm.default, aten.bmm.default)
def _matmul(a: Axis, b: Axis) -> int | None:
    if a.ndim < 2 or b.ndim < 2:
        is_vector = b.ndim == 1 and a.ndim > 1 and free(b)
        return a.axis if is_vector and not a.is_any(-1) else None
    ndim = max(a.ndim, b.ndim)
    if free(b) and not a.is_any(-1):
        assert a.axis is not None
        return a.axis + ndim - a.ndim
    if free(a) and not b.is_any(-2):
        assert b.axis is not None
        return b.axis + ndim - b.ndim
    return pointwise_axis([a, b]) if not (a.is_any(-1, -2) or b.is_any(-1, -2)) else None


@entry(aten.baddbmm.default)
def _baddbmm(c: Axis, a: Axis, b: Axis, **_: Any) -> int | None:
    inner = any(x.is_any(-1, -2) for x in (c, a, b))
    return None if inner or free(a) != free(b) else pointwise_axis([c, a, b])


@entry(aten.addmm.default)
def _addmm(c: Axis, a: Axis, b: Axis, **_: Any) -> int | None:
    return a.axis if free(b) and a.axis == 0 and (free(c) or c.axis == c.ndim - 2) else None


@entry(aten.einsum.default)
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


@entry(aten.scaled_dot_product_attention.default)
def _sdpa(
    q: Axis, k: Axis, v: Axis, mask: Axis | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> int | None:  # fmt: skip
    if free(k, v, mask) and q.is_any(-2) and not is_causal and mask is None:
        return q.axis
    tensors = [x for x in (q, k, v, mask) if isinstance(x, Axis)]
    if free(q) or free(k) or free(v) or any(x.is_any(-1, -2) for x in tensors):
        return None
    return pointwise_axis(tensors)


@entry(aten.conv1d.default, aten.conv2d.default)
def _conv(x: Axis, weight: Axis, bias: Axis | None = None, *_: Any) -> int | None:
    return 0 if x.axis == 0 and free(weight, bias) else None


@entry(aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _gru(x: Axis, state: Axis, weights: Any, *options: Any) -> Any:
    return _recurrent(x, [state], weights, options[-1], 2)


@entry(aten.lstm.input)
def _lstm(x: Axis, states: Sequence[Axis], weights: Any, *options: Any) -> Any:
    return _recurrent(x, states, weights, options[-1], 3)


def _recurrent(x: Axis, states: Any, weights: Any, batch_first: bool, results: int) -> Any:
    axis = 0 if batch_first else 1
    ok = x.ndim == 3 and x.axis == axis and all(s.axis == 1 for s in states) and free(weights)
    return (axis, *[1] * (results - 1)) if ok else None
