# SPDX-License-Identifier: Apache-2.0
"""Per rule: calls that it must take, and near misses that it must leave alone."""

from collections.abc import Callable
from typing import Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import BATCH, Cand, Concat, Const, PerBatch, Rows, Size, Sum, User
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


def _width(x: Any, axis: int) -> int:
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
    return x, d.const(m, _width(x, rank)), bias


@leaves("linear.linear", aten.linear.default)
def _(d: Draw) -> Any:  # the mixed axis is not the one that is multiplied
    k = d.size()
    return d.concat(1, [k]), d.const(d.size(), k), None


@takes("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:
    x = _mixed(d, 2, [d.size()])
    return x, d.const(_width(x, 2), d.size())


@takes("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    return d.const(d.size(), _width(x, 1)), x


@leaves("linear.matmul", aten.matmul.default)
def _(d: Draw) -> Any:  # one matrix per row of the batch
    x = d.concat(2, [d.size()])
    return x, d.cand(_width(x, 2), d.size())


@takes("linear.addmm", aten.addmm.default)
def _(d: Draw) -> Any:
    x, m = _mixed(d, 1, []), d.size()
    return d.const(m), x, d.const(_width(x, 1), m)


@leaves("linear.addmm", aten.addmm.default)
def _(d: Draw) -> Any:
    x, m = d.concat(1, []), d.size()
    return (d.const(m), x, d.const(_width(x, 1), m)), {"alpha": 2}


@takes("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    w = d.const(d.size(), _width(x, 1))
    return d.choose.choice([("mk,bkn->bmn", [w, x]), ("bkn, mk -> bnm", [x, w])])


@takes("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:
    x = d.concat(2, [d.size()])
    return "btk,km->btm", [x, d.const(_width(x, 2), d.size())]


@leaves("linear.einsum", aten.einsum.default)
def _(d: Draw) -> Any:  # two axes are summed
    x = d.concat(1, [3])
    return "bkn,kn->b", [x, d.const(_width(x, 1), 3)]


@takes("linear.conv", aten.conv1d.default)
def _(d: Draw) -> Any:
    x, m = d.concat(1, [d.size()]), d.size()
    return x, d.const(m, _width(x, 1), 1), d.choose.choice([None, d.const(m)])


@takes("linear.conv", aten.conv2d.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size(), d.size()])
    return x, d.const(d.size(), _width(x, 1), 1, 1), None, [1, 1], [0, 0]


@leaves("linear.conv", aten.conv1d.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size(4, 6)])
    return x, d.const(d.size(), _width(x, 1), 2), None


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
    k = _width(x, 1)
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
    width = _width(x, -1)
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
    return d.positive(_width(x, 1)), x


@takes("affine.shift", aten.add.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return d.choose.choice([(x, _vector(d, x)), (_vector(d, x), x)])


@leaves("affine.shift", aten.add.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return (x, d.const(_width(x, 1))), {"alpha": 2}


@takes("affine.subtract", aten.sub.Tensor)
def _(d: Draw) -> Any:
    x = _sums_and_concats(d)
    return x, _vector(d, x)


@leaves("affine.subtract", aten.sub.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return d.const(_width(x, 1)), x


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


# slicing


@takes("slicing.slice_", aten.slice.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    total = _width(x, 1)
    lo = d.size(0, total - 1)
    hi = d.choose.choice([d.size(lo + 1, total), 2**63 - 1, None])
    return x, 1, lo, hi


@takes("slicing.slice_", aten.slice.Tensor)
def _(d: Draw) -> Any:
    return d.batched(d.size()), 0, 0, d.choose.choice([2**63 - 1, BATCH])


@leaves("slicing.slice_", aten.slice.Tensor)
def _(d: Draw) -> Any:
    return d.concat(1, [3]), 1, 0, 2, 2


@leaves("slicing.slice_", aten.slice.Tensor)
def _(d: Draw) -> Any:  # a part of the batch
    return d.user(3), 0, 0, 1


@takes("slicing.select", aten.select.int)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    return x, 1, d.size(-_width(x, 1), _width(x, 1) - 1)


@leaves("slicing.select", aten.select.int)
def _(d: Draw) -> Any:
    return d.concat(1, [3]), 2, 0


@takes("slicing.split", aten.split_with_sizes.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    first = d.size(0, _width(x, 1) - 1) or 1
    return x, [first, _width(x, 1) - first], 1


@takes("slicing.split", aten.split.Tensor)
def _(d: Draw) -> Any:
    return d.concat(1, []), d.size(), 1


@leaves("slicing.split", aten.split.Tensor)
def _(d: Draw) -> Any:
    return d.concat(1, [4]), 2, 2


@takes("slicing.unbind", aten.unbind.int)
def _(d: Draw) -> Any:
    return d.concat(1, [d.size()]), 1


@leaves("slicing.unbind", aten.unbind.int)
def _(d: Draw) -> Any:
    return d.concat(1, [2]), 2


_DOUBLE = {"dtype": torch.float64}
_TWICE = Size(lambda n: 2 * n)


@takes("slicing.full", aten.full.default)
def _(d: Draw) -> Any:
    sizes = d.choose.choice([[BATCH, 3], [2, BATCH], [_TWICE, 3], [BATCH]])
    return (sizes, 1.5), _DOUBLE


@leaves("slicing.full", aten.full.default)
def _(d: Draw) -> Any:
    return ([BATCH, BATCH], 1.5), _DOUBLE


@leaves("slicing.full", aten.full.default)
def _(d: Draw) -> Any:
    return ([Size(lambda n: n + 1), 2], 1.5), _DOUBLE


@takes("slicing.zeros", aten.zeros.default)
def _(d: Draw) -> Any:
    return ([BATCH, d.size()],), _DOUBLE


@takes("slicing.ones", aten.ones.default)
def _(d: Draw) -> Any:
    return ([BATCH, d.size()],), {}


@takes("slicing.new_zeros", aten.new_zeros.default)
def _(d: Draw) -> Any:
    return d.batched(2), [BATCH, 3]


@takes("slicing.new_ones", aten.new_ones.default)
def _(d: Draw) -> Any:
    return d.batched(2), [3, BATCH]


@takes("slicing.new_full", aten.new_full.default)
def _(d: Draw) -> Any:
    return d.cand(2), [BATCH], 2.5


for _name, _more in (("zeros_like", ()), ("ones_like", ()), ("full_like", (2.5,))):
    _op = getattr(aten, _name).default

    @takes(f"slicing.{_name}", _op)
    def _(d: Draw, more: Any = _more) -> Any:
        return d.choose.choice([d.user(2), d.cand(3), d.concat(1, [2])]), *more


@takes("slicing.arange", aten.arange.start_step)
def _(d: Draw) -> Any:
    return 0, Size(lambda n: 3 * n), 3


@takes("slicing.arange", aten.arange.default)
def _(d: Draw) -> Any:
    return (BATCH,)


@leaves("slicing.arange", aten.arange.default)
def _(d: Draw) -> Any:
    return (4,)


# structural


@takes("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:
    n = d.size()
    parts = [d.user(d.size(), n), d.cand(d.size(), n), d.shared(d.size(), n), d.concat(1, [n])]
    d.choose.shuffle(parts)
    if all(isinstance(x, Concat) is False for x in parts[:2]):
        parts = [*parts, d.user(1, n), d.cand(2, n)]
    return parts, d.choose.choice([1, -2])


@leaves("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:  # along the batch
    return [d.user(2), d.cand(2)], 0


@leaves("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:  # promotes types
    return [d.user(2), Cand(d.cand(2).tensor.float(), Rows())], 1


@takes("structural.stack", aten.stack.default)
def _(d: Draw) -> Any:
    n = d.size()
    return [d.user(n), d.cand(n), d.batched(n)], d.choose.choice([1, 2, -1])


@takes("structural.hstack", aten.hstack.default)
def _(d: Draw) -> Any:
    return ([d.user(2), d.cand(3), d.user(1)],)


@leaves("structural.hstack", aten.hstack.default)
def _(d: Draw) -> Any:  # along the batch
    return ([d.cand(), d.cand()],)


for _op in (aten.clone.default, aten.alias.default, aten.detach.default):

    @takes("structural.identity", _op)
    def _(d: Draw) -> Any:
        return (d.choose.choice([d.user(2), d.concat(1, [2]), d.total(2)]),)


def _any_form(d: Draw, *shape: int) -> Any:
    return d.choose.choice([d.user(*shape), d.cand(*shape), d.shared(*shape), d.const(2, *shape)])


@takes("structural.permute", aten.permute.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form(d, 3, 2), d.concat(1, [2]), d.concat(2, [3])])
    return x, d.choose.choice([[0, 2, 1], [1, 0, 2], [2, -3, 1], [0, 1, 2]])


@takes("structural.permute", aten.permute.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([d.total(2, rank=3), d.total(3, kind="lce")])
    return x, [0, 2, 1]


@takes("structural.permute", aten.permute.default)
def _(d: Draw) -> Any:  # back to what it was
    x = d.user(3, 2)
    return User(x.tensor.permute(0, 2, 1), Rows(), base=x, dims=(0, 2, 1)), [0, 2, 1]


@leaves("structural.permute", aten.permute.default)
def _(d: Draw) -> Any:
    return d.total(2, rank=3, shared=True), [0, 2, 1]


@takes("structural.transpose", aten.transpose.int)
def _(d: Draw) -> Any:
    return d.choose.choice([_any_form(d, 3, 2), d.concat(1, [2])]), *d.choose.sample(range(3), 2)


@takes("structural.t", aten.t.default)
def _(d: Draw) -> Any:
    return (d.choose.choice([d.user(3), d.concat(1, []), d.const(2, 3)]),)


@takes("structural.unsqueeze", aten.unsqueeze.default)
def _(d: Draw) -> Any:
    x = d.choose.choice(
        [_any_form(d, 3, 2), d.concat(1, [2]), d.concat(2, [3]), d.total(2, rank=3)]
    )
    return x, d.size(-4, 3)


@takes("structural.squeeze", aten.squeeze.dim)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form(d, 1, 2), d.concat(2, [1]), d.concat(1, [2])])
    return x, d.choose.choice([1, 2, -2])


@takes("structural.squeeze", aten.squeeze.default)
def _(d: Draw) -> Any:
    # A batch of one row is no axis to drop: graphs are made for any batch.
    d.num_candidates = max(2, d.num_candidates)
    d.index = torch.zeros(d.num_candidates, dtype=torch.int32)
    return (d.choose.choice([d.user(1, 2, 1), d.cand(2, 1), d.concat(1, [1])]),)


@takes("structural.squeeze", aten.squeeze.dims)
def _(d: Draw) -> Any:
    return d.concat(1, [1, 1]), [2, 3]


@takes("structural.view", aten.view.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form_batched(d, 4, 3), d.total(2, kind="lce")])
    if isinstance(x, Sum):
        return x, [BATCH, -1]
    flat = Size(lambda n: 4 * n)
    return x, d.choose.choice(
        [[BATCH, 12], [-1, 3], [flat, 3], [BATCH, 2, 2, 3], [2, -1], [1, BATCH, 4, 3], [-1, 4, 3]]
    )


def _any_form_batched(d: Draw, *shape: int) -> Any:
    return d.choose.choice([d.user(*shape), d.cand(*shape), d.shared(*shape)])


@takes("structural.view", aten.view.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [3])
    total = _width(x, 1)
    return x, d.choose.choice(
        [[BATCH, -1], [BATCH, total, 3, 1], [BATCH, 1, total * 3], [-1, total, 3]]
    )


@takes("structural.view", aten.view.default)
def _(d: Draw) -> Any:  # merged batches come apart again
    x = d.choose.choice(
        [
            User(d.tensor(d.num_users * 3, 2), Rows(0, 1, 3)),
            User(d.tensor(3 * d.num_users, 2), Rows(0, 3)),
        ]
    )
    return x, [BATCH, 3, 2] if x.rows.inner == 3 else [3, BATCH, 2]


@takes("structural.view", aten.view.default)
def _(d: Draw) -> Any:  # fields of width 2 side by side
    return d.concat(1, [], [4, 2, 6, 2]), [BATCH, -1, 2]


@leaves("structural.view", aten.view.default)
def _(d: Draw) -> Any:  # an axis would hold user and candidate values
    x = Concat(1, (d.user(3), d.cand(5)), Rows())
    return x, [BATCH, 4, 2]


@takes("structural.expand", aten.expand.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.const(1, 3), [BATCH, -1]),
            (d.const(3), [BATCH, 3]),
            (d.const(1, 1), [2, 3]),
            (d.user(1, 3), [-1, 4, -1]),
            (d.cand(1, 3), [BATCH, 4, 3]),
            (d.shared(1, 3), [BATCH, 4, 3]),
            (d.user(3), [2, BATCH, 3]),
        ]
    )


@leaves("structural.expand", aten.expand.default)
def _(d: Draw) -> Any:  # every row of the batch again for every row
    return d.const(1, 1), [BATCH, BATCH]


@takes("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [(d.const(1, 3), [BATCH, 2]), (d.const(3), [BATCH, 1]), (d.const(2, 3), [2, 1])]
    )


@leaves("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:
    return d.user(3), [1, 2]


@leaves("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:  # rows of a constant that are not one row
    return d.const(2, 3), [BATCH, 1]
