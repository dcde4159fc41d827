# SPDX-License-Identifier: Apache-2.0
"""Per rule: calls that it must take, and near misses that it must leave alone.

The rules that only move data have theirs in `move_cases`, in the same tables.
"""

from collections.abc import Callable
from typing import Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Const, PerBatch, Rows, User
from tests.transform.random_forms import Draw

aten = torch.ops.aten
INF = float("inf")

# Rule ("family.name") to makers of (operator, args, kwargs).
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
TAKES: dict[str, list[Callable[[Draw], Call]]] = {}
LEAVES: dict[str, list[Callable[[Draw], Call]]] = {}


def _register(table: dict[str, list[Callable[[Draw], Call]]], rule: str, target: Any) -> Any:
    def add(make: Callable[[Draw], Any]) -> Callable[[Draw], Any]:
        def call(d: Draw) -> Call:
            made = make(d)
            args, kwargs = made if isinstance(made[-1], dict) else (made, {})
            return target, tuple(args), kwargs

        table.setdefault(rule, []).append(call)
        return make

    return add


def takes(rule: str, target: Any) -> Any:
    return _register(TAKES, rule, target)


def leaves(rule: str, target: Any) -> Any:
    return _register(LEAVES, rule, target)


def size_of(x: Any, axis: int) -> int:
    return int(f.shape(x)[axis])


def _mixed(d: Draw, axis: int, shape: list[int]) -> Any:
    return d.choose.choice([d.concat, d.affine])(axis, shape)


# linear


@takes("linear.linear", aten.linear.default)
def _(d: Draw) -> Any:
    rank = d.size(1, 3)
    x = _mixed(d, rank, [d.size() for _ in range(rank - 1)])
    m = d.size()
    bias = d.choose.choice([None, d.const(m)])
    return x, d.const(m, size_of(x, rank)), bias


@leaves("linear.linear", aten.linear.default)
def _(d: Draw) -> Any:  # the mixed axis is not the one that is multiplied
    k = d.size()
    return d.concat(1, [k]), d.const(d.size(), k), None


@takes("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:
    x = _mixed(d, 2, [d.size()])
    return x, d.const(size_of(x, 2), d.size())


@takes("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    return d.const(d.size(), size_of(x, 1)), x


@leaves("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:  # one matrix per row of the batch
    x = d.concat(2, [d.size()])
    return x, d.cand(size_of(x, 2), d.size())


@takes("linear.addmm", aten.addmm.default)
def _(d: Draw) -> Any:
    x, m = _mixed(d, 1, []), d.size()
    return d.const(m), x, d.const(size_of(x, 1), m)


@leaves("linear.addmm", aten.addmm.default)
def _(d: Draw) -> Any:
    x, m = d.concat(1, []), d.size()
    return (d.const(m), x, d.const(size_of(x, 1), m)), {"alpha": 2}


@takes("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    w = d.const(d.size(), size_of(x, 1))
    return d.choose.choice([("mk,bkn->bmn", [w, x]), ("bkn, mk -> bnm", [x, w])])


@takes("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:
    x = d.concat(2, [d.size()])
    return "btk,km->btm", [x, d.const(size_of(x, 2), d.size())]


@leaves("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:  # two axes are summed
    x = d.concat(1, [3])
    return "bkn,kn->b", [x, d.const(size_of(x, 1), 3)]


@takes("linear.conv", aten.conv1d.default)
def _(d: Draw) -> Any:
    x, m = d.concat(1, [d.size()]), d.size()
    return x, d.const(m, size_of(x, 1), 1), d.choose.choice([None, d.const(m)])


@takes("linear.conv", aten.conv2d.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size(), d.size()])
    return x, d.const(d.size(), size_of(x, 1), 1, 1), None, [1, 1], [0, 0]


@leaves("linear.conv", aten.conv1d.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size(4, 6)])
    return x, d.const(d.size(), size_of(x, 1), 2), None


for _name in ("relu", "gelu", "silu", "sigmoid"):
    _op = getattr(aten, _name).default

    @takes(f"linear.activate_{_name}", _op)
    def _(d: Draw) -> Any:
        return (d.total(d.size()),)

    @leaves(f"linear.activate_{_name}", _op)
    def _(d: Draw) -> Any:
        return (d.total(d.size(), rank=3),)


@leaves("linear.activate_gelu", aten.gelu.default)
def _(d: Draw) -> Any:
    return (d.total(3),), {"approximate": "tanh"}


@leaves("linear.activate_relu", aten.relu.default)
def _(d: Draw) -> Any:
    return (d.total(3, shared=True),)


# affine


@takes("affine.batch_norm", aten._native_batch_norm_legit_no_training.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([d.concat(1, []), d.concat(1, [d.size()]), d.total(d.size())])
    k = size_of(x, 1)
    return x, d.const(k), d.choose.choice([None, d.const(k)]), d.const(k), d.positive(k), 0.1, 1e-5


@leaves("affine.batch_norm", aten._native_batch_norm_legit_no_training.default)
def _(d: Draw) -> Any:  # channels are not the mixed axis
    k = d.size()
    return d.concat(2, [k]), d.const(k), d.const(k), d.const(k), d.positive(k), 0.1, 1e-5


def _sums_and_concats(d: Draw) -> Any:
    return d.choose.choice(
        [d.concat(1, []), d.affine(1, []), d.total(d.size()), d.total(d.size(), rank=3)]
    )


def _vector(d: Draw, x: Any) -> Any:
    width = size_of(x, -1)
    return d.choose.choice(
        [1.5, d.positive(width), d.positive(1), Const(torch.full((), 2.0).double())]
    )


@takes("affine.scale", aten.mul.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return d.choose.choice([(x, _vector(d, x)), (_vector(d, x), x)])


@leaves("affine.scale", aten.mul.Tensor)
def _(d: Draw) -> Any:
    return d.concat(1, [3]), d.const(3)


@takes("affine.divide", aten.div.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return x, _vector(d, x)


@leaves("affine.divide", aten.div.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return d.positive(size_of(x, 1)), x


@takes("affine.shift", aten.add.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return d.choose.choice([(x, _vector(d, x)), (_vector(d, x), x)])


@leaves("affine.shift", aten.add.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return (x, d.const(size_of(x, 1))), {"alpha": 2}


@takes("affine.subtract", aten.sub.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return x, _vector(d, x)


@leaves("affine.subtract", aten.sub.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return d.const(size_of(x, 1)), x


@takes("affine.add", aten.add.Tensor)
def _(d: Draw) -> Any:
    m = d.size()
    values = [d.total(m), d.choose.choice([d.user(m), d.cand(m), d.total(m)])]
    if d.choose.random() < 0.3:
        values = [d.user(m), d.cand(m)]
    d.choose.shuffle(values)
    return tuple(values)


@leaves("affine.add", aten.add.Tensor)
def _(d: Draw) -> Any:  # shapes differ
    return d.user(1), d.cand(d.size(2))


@leaves("affine.add", aten.add.Tensor)
def _(d: Draw) -> Any:
    m = d.size()
    return d.total(m, shared=True), d.user(m)


# attention


def _heads(d: Draw, q: int, s: int, kv: int | None = None) -> tuple[Any, Any, Any]:
    h, width = d.size(1, 3), d.size()
    kv = kv or h
    return d.cand(h, q, width), d.user(kv, s, width), d.user(kv, s, width)


@takes("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:
    s = d.size(2, 6)
    mask = d.choose.choice([None, d.mask(1, 1, s), d.mask(1, 1, 1)])
    return (*_heads(d, d.size(), s), mask), {"scale": d.choose.choice([None, 0.3])}


@takes("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:
    q, k, v = _heads(d, d.size(), d.size(2, 6))
    narrow = [type(x)(x.tensor[:, 0], x.rows) for x in (q, k, v)]
    return tuple(narrow)


@takes("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # an additive mask that is known to come from a boolean
    s = d.size(2, 6)
    keep = d.mask(1, 1, s)
    zeros = torch.zeros(keep.tensor.shape, dtype=torch.float64)
    mask = User(zeros.masked_fill(~keep.tensor, -INF), Rows(), keep=keep)
    return *_heads(d, d.size(), s), mask


@leaves("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # an additive mask of any values
    return *_heads(d, 2, 4), d.user(1, 1, 4)


@leaves("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # a mask per candidate
    q, k, v = _heads(d, 2, 4)
    return q, k, v, Cand(d.bools(d.num_candidates, 1, 1, 4), Rows())


@leaves("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # a mask per query
    return *_heads(d, 2, 4), d.mask(1, 2, 4)


@leaves("attention.sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # keys of candidates
    q, k, v = _heads(d, 2, 4)
    return q, k, d.cand(*v.tensor.shape[1:]), None


def _filled(d: Draw) -> Any:
    return d.choose.choice([d.mask(4), d.mask(2, 3)])


@takes("attention.additive_mask", aten.masked_fill.Scalar)
def _(d: Draw) -> Any:
    mask = _filled(d)
    zeros = torch.zeros(1, *mask.tensor.shape[1:], dtype=torch.float64)
    return Const(zeros, Rows()), mask, -INF


@leaves("attention.additive_mask", aten.masked_fill.Scalar)
def _(d: Draw) -> Any:
    return d.user(4), d.mask(4), -INF


@leaves("attention.additive_mask", aten.masked_fill.Scalar)
def _(d: Draw) -> Any:
    return Const(torch.zeros(1, 4).double(), Rows()), d.mask(4), -1e9


@takes("attention.additive_where", aten.where.Scalar)
def _(d: Draw) -> Any:
    return d.choose.choice([(_filled(d), 0.0, -INF), (_filled(d), -INF, 0.0)])


@takes("attention.additive_where", aten.where.self)
def _(d: Draw) -> Any:
    low = Const(torch.full((), -INF, dtype=torch.float64))
    return _filled(d), Const(torch.zeros(1, dtype=torch.float64)), low


@leaves("attention.additive_where", aten.where.self)
def _(d: Draw) -> Any:
    return d.mask(4), d.const(4), d.const(4)


# reduce


@takes("reduce.sum_", aten.sum.dim_IntList)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    dims = d.choose.choice([[1], [1, 2], [-2]])
    return x, dims, d.choose.random() < 0.5


@leaves("reduce.sum_", aten.sum.dim_IntList)
def _(d: Draw) -> Any:  # over the batch too
    return d.concat(1, [2]), [0, 1]


@takes("reduce.mean", aten.mean.dim)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    return x, d.choose.choice([[1], [1, 2]]), d.choose.random() < 0.5


@leaves("reduce.mean", aten.mean.dim)
def _(d: Draw) -> Any:
    return d.concat(1, [2]), [2]


def _bags(d: Draw, width: int, step: int) -> Any:
    ids = torch.randint(0, 5, (d.num_users * width,), generator=d.generator)
    offsets = PerBatch(lambda n: torch.arange(0, n * width, step)[:n])
    return d.const(5, d.size()), User(ids, Rows(0, 1, width)), offsets, False, 0, False, None


@takes("reduce.embedding_bag", aten.embedding_bag.padding_idx)
def _(d: Draw) -> Any:
    return *_bags(d, w := d.size(), w), False, None


@leaves("reduce.embedding_bag", aten.embedding_bag.padding_idx)
def _(d: Draw) -> Any:  # bags of another size
    return *_bags(d, 4, 2), False, None
