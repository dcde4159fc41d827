# SPDX-License-Identifier: Apache-2.0
"""The cases of attention that a model spells out; see `rule_cases`."""

from typing import Any

import torch

from ikbo.transform.forms import Const
from tests.transform.random_forms import Draw
from tests.transform.rule_cases import INF, leaves, takes

aten = torch.ops.aten

LOWER = torch.ones(5, 5, dtype=torch.bool).tril()
# The user's tokens come first: three, then two of the candidate.
WIDTHS = [3, 2]


def _tokens(d: Draw, axis: int, *shape: int) -> Any:
    return d.concat(axis, shape, WIDTHS)


def _masked(d: Draw, low: float) -> tuple[Any, ...]:
    """One way to write `low` where a token is not seen."""
    steps = [
        (aten.masked_fill.Scalar, Const(~LOWER), low),
        (aten.add.Tensor, Const(torch.zeros(5, 5).double().masked_fill(~LOWER, low)[None])),
    ]
    return d.choose.choice(steps)


@takes("dead_rows.attention", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:
    d.live = d.choose.choice([(2, 4, 5), (2, 3, 5), (2, 2, 4), (2, 0, 1)])
    of_inputs = d.choose.choice([d.mask(1, 5, 5), d.mask(1, 1, 5)])
    of_inputs.tensor[..., 0] = True
    mask = d.choose.choice([(None, 0.0, True), (), (Const(LOWER),), (of_inputs,)])
    return *[_tokens(d, 2, 2, 4) for _ in range(3)], *mask


@leaves("dead_rows.attention", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # all is read; a range of heads
    d.live = d.choose.choice([None, (1, 0, 1), (2, 0, 5)])
    return [_tokens(d, 2, 2, 4) for _ in range(3)]


@takes("dead_rows.masked_product", aten.baddbmm.default)
def _(d: Draw) -> Any:
    d.live = d.choose.choice([(1, 3, 5), (1, 4, 5)])
    mask = d.choose.choice([d.user(1, 3), d.cand(5, 3), d.user(5, 3)])
    return mask, _tokens(d, 1, 4), d.choose.choice([d.user(4, 3), d.cand(4, 3)])


@leaves("dead_rows.masked_product", aten.baddbmm.default)
def _(d: Draw) -> Any:  # all is read; columns are
    live, mask = d.choose.choice([(None, d.cand(5, 3)), ((2, 0, 2), d.cand(5, 3))])
    d.live = live
    return mask, _tokens(d, 1, 4), d.cand(4, 3)


@takes("dead_rows.product", aten.matmul.default)
def _(d: Draw) -> Any:
    d.live = (1, 3, 5)
    other = d.choose.choice([_tokens(d, 2, 4), d.user(4, 3), d.cand(4, 3)])
    return _tokens(d, 1, 4), other


@leaves("dead_rows.product", aten.matmul.default)
def _(d: Draw) -> Any:
    d.live = d.choose.choice([None, (2, 0, 2)])
    return _tokens(d, 1, 4), d.cand(4, 3)


@takes("chains.scores", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (_tokens(d, 1, 4), _tokens(d, 2, 4)),
            (_tokens(d, 2, 2, 4), _tokens(d, 3, 2, 4)),
        ]
    )


@leaves("chains.scores", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.cand(5, 4), _tokens(d, 2, 4)),
            (_tokens(d, 1, 4), d.user(4, 5)),
            (_tokens(d, 1, 5), d.concat(1, [4], WIDTHS)),
        ]
    )


@takes("chains.biased_scores", aten.baddbmm.default)
def _(d: Draw) -> Any:
    return d.choose.choice([d.const(1, 5, 5), d.const(5)]), _tokens(d, 1, 4), _tokens(d, 2, 4)


@leaves("chains.biased_scores", aten.baddbmm.default)
def _(d: Draw) -> Any:
    product = (_tokens(d, 1, 4), _tokens(d, 2, 4))
    return d.choose.choice(
        [((d.const(5, 5), *product), {"beta": 2}), ((d.cand(5, 5), *product), {})]
    )


@takes("chains.spelled_product", aten.einsum.default)
def _(d: Draw) -> Any:
    weights = d.scores((aten.tanh.default,), heads=[2])
    return d.choose.choice(
        [
            ("bnhd,bmhd->bhnm", [_tokens(d, 1, 2, 4), _tokens(d, 1, 2, 4)]),
            ("bnd, bmd -> bnm", [_tokens(d, 1, 4), _tokens(d, 1, 4)]),
            ("bhnm,bmhd->bnhd", [weights, _tokens(d, 1, 2, 4)]),
        ]
    )


@leaves("chains.spelled_product", aten.einsum.default)
def _(d: Draw) -> Any:
    x, y = _tokens(d, 1, 2, 4), _tokens(d, 1, 2, 4)
    return d.choose.choice(
        [
            ("bnhd,bmhd->bnm", [x, y]),  # two letters are summed
            ("bnhd,bmhd->bnhmd", [x, y]),  # none is
            ("bnhd,bnhd->bnhd", [x, y]),
            ("bnhd,bmhd->bhnm", [d.cand(5, 2, 4), y]),
        ]
    )


@takes("chains.attended", aten.matmul.default)
def _(d: Draw) -> Any:  # a softmax over what is seen
    heads = d.choose.choice([[], [2]])
    half = (aten.mul.Tensor, 0.5)
    softmax = (aten.softmax.int, d.choose.choice([-1, 2 + len(heads)]))
    mask = _masked(d, d.choose.choice([-INF, -1e9, -1e4]))
    steps = d.choose.choice([[mask, softmax], [half, mask, softmax], [mask, softmax, half]])
    return d.scores(*steps, heads=heads), _tokens(d, 1 + len(heads), *heads, 4)


@takes("chains.attended", aten.bmm.default)
def _(d: Draw) -> Any:  # no softmax
    gate, mask = (aten.silu.default,), (aten.mul.Tensor, Const(LOWER.double()))
    return d.scores((aten.add.Tensor, d.const(5, 5)), gate, mask), _tokens(d, 1, 4)


@takes("chains.attended", aten.matmul.default)
def _(d: Draw) -> Any:  # values in other ranges than keys
    steps = [_masked(d, -INF), (aten.softmax.int, -1)]
    return d.scores(*steps), d.concat(1, [4], [4, 1])


@leaves("chains.attended", aten.matmul.default)
def _(d: Draw) -> Any:  # a fill that large scores outweigh
    return d.scores(_masked(d, -1e3), (aten.softmax.int, -1)), _tokens(d, 1, 4)


@leaves("chains.attended", aten.matmul.default)
def _(d: Draw) -> Any:
    softmax, lower = (aten.softmax.int, -1), (aten.mul.Tensor, Const(LOWER.double()))
    v = _tokens(d, 1, 4)
    return d.choose.choice(
        [
            (d.scores(softmax), v),  # every token sees every token
            (d.scores(softmax, lower), v),  # what is not seen counts in the sum
            (d.scores(_masked(d, -3.0), softmax), v),  # little is not nothing
            (d.scores(lower), d.concat(2, [5], WIDTHS)),
            (d.scores(lower), d.cand(5, 4)),
        ]
    )
