# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of an operator, as formulas in the number of users and candidates.

FLOPs are counted as `torch.utils.flop_counter` counts them: two per multiply-add of products,
nothing for the rest. Bytes are what the operator must read and write by itself: its tensor operands
and results once each; of a table, the rows that are looked up. Views are free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

aten = torch.ops.aten
ikbo = torch.ops.ikbo

_TERM = re.compile(r"(?P<factor>[0-9.e+-]+)|(?P<symbol>[UB])(?:\^(?P<power>\d+))?")


@dataclass(frozen=True)
class Formula:
    """A polynomial in U and B: `terms[(i, j)]` is the coefficient of `U^i B^j`."""

    terms: Mapping[tuple[int, int], float]

    def __call__(self, num_users: int, num_candidates: int) -> float:
        return sum(c * num_users**i * num_candidates**j for (i, j), c in self.terms.items())

    def __add__(self, other: Formula) -> Formula:
        keys = {**self.terms, **other.terms}
        return Formula({k: self.terms.get(k, 0) + other.terms.get(k, 0) for k in keys})

    def __str__(self) -> str:
        parts = []
        for (i, j), coefficient in sorted(self.terms.items(), reverse=True):
            powers = [(name, p) for name, p in (("U", i), ("B", j)) if p]
            number = f"{coefficient!r}" if coefficient % 1 else f"{int(coefficient)}"
            text = [name if p == 1 else f"{name}^{p}" for name, p in powers]
            parts.append("*".join(text if text and coefficient == 1 else [number, *text]))
        return " + ".join(parts) or "0"

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Reads what `str` writes. Errors: ValueError on anything else."""
        terms: dict[tuple[int, int], float] = {}
        for part in text.split(" + "):
            coefficient, powers = 1.0, {"U": 0, "B": 0}
            for piece in part.split("*"):
                match = _TERM.fullmatch(piece)
                if match is None:
                    raise ValueError(
                        f"ikbo.Spec: a formula must be a sum of terms like 8*U*B^2; got {text!r}"
                    )
                if match["symbol"]:
                    powers[match["symbol"]] += int(match["power"] or 1)
                else:
                    coefficient *= float(match["factor"])
            key = (powers["U"], powers["B"])
            terms[key] = terms.get(key, 0) + coefficient
        return cls({key: value for key, value in terms.items() if value})


ZERO = Formula({})


def _linear(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
    return 2 * _numel(x) * weight[0]


def _matmul(a: Any, b: Any, *_: Any, out_shape: Any, **__: Any) -> Any:
    return 2 * _numel(out_shape) * a[-1]


def _addmm(_c: Any, a: Any, b: Any, *_: Any, out_shape: Any, **__: Any) -> Any:
    return 2 * _numel(out_shape) * a[-1]


def _einsum(equation: str, operands: Any, *_: Any, **__: Any) -> Any:
    inputs = equation.replace(" ", "").split("->")[0].split(",")
    letters: dict[str, Any] = {}
    for term, shape in zip(inputs, operands, strict=True):
        letters.update(zip(term, shape, strict=True))
    return 2 * math.prod(letters.values()) if len(operands) == 2 else 0


def _tensordot(a: Any, b: Any, dims: Any, *_: Any, **__: Any) -> Any:
    return 2 * _numel(a) * _numel(b) / _numel([a[dim] for dim in dims])


def _conv(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> Any:
    return 2 * _numel(out_shape) * _numel(weight[1:])


def _sdpa(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return 2 * _numel(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _recurrent(x: Any, state: Any, weights: Any, *_: Any, **__: Any) -> Any:
    steps = _numel(x[:-1])
    return sum(2 * steps * _numel(w) for w in weights if len(w) == 2)


# Both with the candidate's tensor or a list of them, and its weight plain or packed.
def _ikbo_linear(xu: Any, xc: Any, wu: Any, *_: Any, **__: Any) -> Any:
    parts = xc if isinstance(xc, list) else [xc]
    return 2 * wu[0] * (_numel(xu) + sum(_numel(part) for part in parts))


def _ikbo_bmm(
    a: Any, b: Any, _i: Any, transpose_a: bool = False, *_: Any, out_shape: Any, **__: Any
) -> Any:
    return 2 * _numel(out_shape) * a[1 if transpose_a else 2]


def _target_attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return 4 * _numel(q) * k[1]


# FLOPs from the shapes of an operator's arguments; also a `custom_mapping` for `FlopCounterMode`.
FLOPS: dict[Any, Callable[..., Any]] = {
    aten.linear: _linear,
    aten.matmul: _matmul,
    aten.mm: _matmul,
    aten.bmm: _matmul,
    aten.addmm: _addmm,
    aten.baddbmm: _addmm,
    aten.einsum: _einsum,
    aten.tensordot: _tensordot,
    aten.conv1d: _conv,
    aten.conv2d: _conv,
    aten.scaled_dot_product_attention: _sdpa,
    aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    aten.gru: _recurrent,
    aten.lstm: _recurrent,
    aten.rnn_tanh: _recurrent,
    aten.rnn_relu: _recurrent,
    ikbo.linear: _ikbo_linear,
    ikbo.lce: _ikbo_linear,
    ikbo.bmm: _ikbo_bmm,
    ikbo.target_attention: _target_attention,
}

# Layers: products with one weight for all rows.
_ROUNDED = {aten.linear, aten.mm, aten.addmm, aten.matmul, ikbo.linear, ikbo.lce}

# What `FlopCounterMode` lacks; it sees the operators of torch after they were decomposed.
COUNTER_FORMULAS = {
    op: FLOPS[op]
    for op in (
        ikbo.linear, ikbo.lce, ikbo.bmm, ikbo.target_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
}  # fmt: skip


def _numel(shape: Any) -> Any:
    return math.prod(shape)


# Views whose schemas leave it open, and copies, which a compiler leaves out or fuses.
_FREE = (
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
    aten.clone.default,
    aten.contiguous.default,
)
_LOOKUPS = (aten.embedding.default, aten.index_select.default, aten.embedding_bag.padding_idx)


def flops(node: Node, symbols: Mapping[Any, Any], multiple: int = 1) -> Formula:
    """FLOPs of one call.

    Args:
        symbols: from the graph's batch symbols to U and B.
        multiple: rows and columns of a layer's weight are rounded up to a multiple of it.
    """
    formula = FLOPS.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return ZERO

    packet = node.target.overloadpacket  # type: ignore[union-attr]
    step = multiple if packet in _ROUNDED and not _is_turned(node, multiple) else 1

    def shape(operand: Node) -> Any:
        return _rounded(_shape(operand), step)

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), shape)
    value = node.meta["val"]
    out_shape = _rounded(_dims(value), step) if isinstance(value, Tensor) else None
    return polynomial(formula(*args, **kwargs, out_shape=out_shape), symbols)


def _is_turned(node: Node, multiple: int) -> bool:
    """Whether a layer stands before fewer columns than a kernel takes: one product over all rows.

    `W @ x [B, K, 1]` is `x [B, K] @ W.T`: no column of `x` is filled up.
    """
    if node.target is not aten.matmul.default:
        return False
    first, second = map(_shape, node.args)  # type: ignore[arg-type]
    width = second[-1]
    return len(first) == 2 < len(second) and isinstance(width, int) and width < multiple


def moved_bytes(node: Node, symbols: Mapping[Any, Any]) -> Formula:
    """Bytes that one call reads and writes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.is_view or target in _FREE:
        return ZERO
    results = _tensors(node.meta.get("val"))
    operands = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)
    ]
    if target in _LOOKUPS:
        operands = [*operands[1:], *results[:1]]
    total = sum(math.prod(_dims(x)) * x.element_size() for x in [*operands, *results])
    return polynomial(total, symbols)


def bytes_of(x: Tensor, symbols: Mapping[Any, Any]) -> Formula:
    """The size of a tensor."""
    return polynomial(math.prod(_dims(x)) * x.element_size(), symbols)


def _rounded(shape: Any, multiple: int) -> Any:
    """A shape with its last size rounded up; of a matrix, both; where they are known."""
    if multiple == 1 or not isinstance(shape, tuple):
        return shape
    first = len(shape) - (2 if len(shape) == 2 else 1)
    return tuple(
        -(-size // multiple) * multiple if place >= first and isinstance(size, int) else size
        for place, size in enumerate(shape)
    )


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, Tensor)]


def _shape(node: Node) -> Any:
    value = node.meta["val"]
    return _dims(value) if isinstance(value, Tensor) else value


def _dims(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(d.node.expr if isinstance(d, torch.SymInt) else d for d in tensor.shape)


_U, _B = sympy.symbols("U B", integer=True, positive=True)


def polynomial(expression: Any, symbols: Mapping[Any, Any]) -> Formula:
    """An expression in a graph's batch symbols as a formula in U and B."""
    names = {"U": _U, "B": _B}
    replaced = {symbol: names[name] for symbol, name in symbols.items()}
    # Quotients of a batch size are counted as exact.
    rational = sympy.sympify(expression).replace(
        lambda e: type(e).__name__ == "FloorDiv", lambda e: e.args[0] / e.args[1]
    )
    polynomial = sympy.Poly(rational.subs(replaced), _U, _B)
    return Formula({(i, j): float(c) for (i, j), c in polynomial.terms() if c})
