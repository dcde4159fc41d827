# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes of the operators: the formulas that docs and benchmarks use.

FLOPs are two per multiply-add of a product. Unique bytes are each input read once and each output
written once: what an operator cannot do without. Requested bytes count a user's rows once per
candidate, as the replicated form reads them: their ratio is what reading by index saves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Cost:
    """Of one call."""

    flops: int
    unique_bytes: int
    requested_bytes: int


@dataclass(frozen=True)
class _Elements:
    """Elements of one call: products, user data once, the same per candidate, the rest."""

    products: int
    user: int
    replicated: int
    other: int


def _expand(s: Sizes) -> _Elements:
    row = s["K_user"]
    return _Elements(0, s["U"] * row, s["B"] * row, s["B"] * row)


def _linear(s: Sizes) -> _Elements:
    k_user, k_cand, m = s["K_user"], s["K_cand"], s["M"]
    return _Elements(
        products=m * (s["U"] * k_user + s["B"] * k_cand),
        user=s["U"] * k_user,
        replicated=s["B"] * k_user,
        other=m * (k_user + k_cand) + s["B"] * (k_cand + m),
    )


def _lce(s: Sizes) -> _Elements:
    k_user, k_cand, m, n = s["K_user"], s["K_cand"], s["M"], s["N"]
    return _Elements(
        products=m * n * (s["U"] * k_user + s["B"] * k_cand),
        user=s["U"] * k_user * n,
        replicated=s["B"] * k_user * n,
        other=m * (k_user + k_cand) + s["B"] * n * (k_cand + m),
    )


def _bmm(s: Sizes) -> _Elements:
    p, r, n = s["P"], s["R"], s["N"]
    return _Elements(
        products=s["B"] * p * r * n,
        user=s["U"] * p * r,
        replicated=s["B"] * p * r,
        other=s["B"] * n * (r + p),
    )


def _target_attention(s: Sizes) -> _Elements:
    rows = s["B"] * s["Q"] * s["H"]
    keys = 2 * s["S"] * s["H_kv"] * s["D"]
    return _Elements(
        products=2 * rows * s["S"] * s["D"],
        user=s["U"] * keys,
        replicated=s["B"] * keys,
        other=2 * rows * s["D"],
    )


def _self_target_attention(s: Sizes) -> _Elements:
    rows = s["U"] * s["S"] + s["B"] * s["Q"]
    history = 2 * s["S"] * (s["H"] + s["H_kv"]) * s["D"]  # queries, results, keys, values
    return _Elements(
        products=2 * rows * s["H"] * s["S"] * s["D"],
        user=s["U"] * history,
        replicated=s["B"] * history,
        other=2 * s["B"] * s["Q"] * s["H"] * s["D"],
    )


_ELEMENTS: dict[str, Callable[[Sizes], _Elements]] = {
    "bmm": _bmm,
    "expand": _expand,
    "lce": _lce,
    "linear": _linear,
    "self_target_attention": _self_target_attention,
    "target_attention": _target_attention,
}


def cost_of(op: str, sizes: Sizes, dtype: torch.dtype) -> Cost:
    """Cost of one call with whole histories, which nothing is hidden of; the index, a bias and the
    log-sum-exp are left out.

    Args:
        op: the operator's name.
        sizes: every glossary letter of its schema, U and B too.
        dtype: of its tensors.
    """
    elements = _ELEMENTS[op](sizes)
    return Cost(
        flops=2 * elements.products,
        unique_bytes=dtype.itemsize * (elements.user + elements.other),
        requested_bytes=dtype.itemsize * (elements.replicated + elements.other),
    )
