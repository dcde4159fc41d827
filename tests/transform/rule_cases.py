# SPDX-License-Identifier: Apache-2.0
"""Per rule: calls that it must take, and near misses that it must leave alone.

The rules that only move data have theirs in `move_cases`, in the same tables.
"""

from collections.abc import Callable
from typing import Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import Cand, Concat, Const, PerBatch, Rows, User
from ikbo.transform.pending import Reordered
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


def reordered(d: Draw, axis: int, shape: list[int]) -> Reordered:
    """Elements of both sides, some of them twice, some never."""
    x = d.concat(axis, shape)
    places = range(size_of(x, axis))
    return Reordered(x, (*d.choose.choices(places, k=4), d.choose.choice(places)))


@takes("linear.linear", aten.linear.default)
def _(d: Draw) -> Any:
    rank = d.size(1, 3)
    x = reordered(d, rank, [d.size() for _ in range(rank - 1)])
    return x, d.const(3, 5), d.choose.choice([None, d.const(3)])


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
    x = d.concat(d.choose.choice([1, 3]), [d.size(), d.size()])
    return x, d.const(d.size(), size_of(x, 1), 1, 1), None, [1, 1], [0, 0]


@leaves("linear.conv", aten.conv1d.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size(4, 6)])
    return x, d.const(d.size(), size_of(x, 1), 2), None


@takes("linear.tensordot", aten.tensordot.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([d.concat(1, [d.size()]), d.user(3, 2), d.cand(2)])
    k, m = size_of(x, 1), d.size()
    return d.choose.choice([(x, d.const(k, m), [1], [0]), (x, d.const(m, k), [1], [-1])])


@leaves("linear.tensordot", aten.tensordot.default)
def _(d: Draw) -> Any:  # two axes are summed
    x = d.concat(1, [3])
    return x, d.const(size_of(x, 1), 3), [1, 2], [0, 1]


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


# masked


def _tokens(d: Draw, *shape: int) -> Any:
    """Three user tokens, then two of the candidate."""
    return d.concat(len(shape), shape, [3, 2])


def _causal(kind: str, ndim: int) -> Any:
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    alone = lower & ((torch.arange(5) < 3) | torch.eye(5, dtype=torch.bool))
    seen = alone if kind == "isolating" else lower
    if kind == "additive":
        seen = torch.rand(5, 5, dtype=torch.float64).masked_fill(~lower, -INF)
    return Const(seen.reshape(*[1] * (ndim - 2), 5, 5))


@takes("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:
    shape = d.choose.choice([[2, 4], [4]])
    q, k, v = (_tokens(d, *shape) for _ in range(3))
    kind = d.choose.choice(["is_causal", "lower", "isolating", "additive"])
    if kind == "is_causal":
        return (q, k, v, None, 0.0, True), {"scale": d.choose.choice([None, 0.5])}
    return q, k, v, _causal(kind, d.choose.choice([2, len(shape) + 1]))


@takes("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # queries in other ranges than keys, keys than values
    q, k, v = (d.concat(2, [2, 4], [*widths]) for widths in ([2, 3], [4, 1], [3, 2]))
    return q, k, v, _causal("lower", 2)


@takes("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # fewer heads of keys
    q, k, v = _tokens(d, 4, 2), _tokens(d, 2, 2), _tokens(d, 2, 2)
    return (q, k, v, None, 0.0, True), {"enable_gqa": True}


@leaves("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # every token sees every token
    return tuple(_tokens(d, 2, 4) for _ in range(3))


@leaves("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # the user's tokens come last and see the candidate's
    tokens = [Concat(2, (d.cand(2, 1, 4), d.user(2, 2, 4)), Rows()) for _ in range(3)]
    return *tokens, None, 0.0, True


@leaves("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # a mask of the user's own
    return *[_tokens(d, 2, 4) for _ in range(3)], d.mask(1, 5, 5)


@leaves("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # heads of both sides
    return *[d.concat(1, [3, 4], [1, 1]) for _ in range(3)], None, 0.0, True


@takes("masked.joint_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:
    q, k, v = d.cand(2, 2, 4), _tokens(d, 2, 4), _tokens(d, 2, 4)
    seen = torch.ones(2, 5, dtype=torch.bool)
    seen[0, d.size(3, 4)] = False
    additive = torch.rand(2, 5, dtype=torch.float64) * (torch.arange(5) >= 3)
    masks = [None, Const(seen), Const(additive), Const(additive.masked_fill(~seen, -INF)[None])]
    return (q, k, v, d.choose.choice(masks)), {"scale": d.choose.choice([None, 0.3])}


@leaves("masked.joint_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # queries of both; a history that is not seen whole; fewer heads of keys
    tokens = [_tokens(d, 2, 4) for _ in range(3)]
    bias = Const(torch.rand(1, 5, dtype=torch.float64))
    few = [d.concat(2, [1, 4], [3, 2]) for _ in range(2)]
    return d.choose.choice(
        [
            tokens,
            [d.cand(2, 1, 4), *tokens[:2], bias],
            [d.cand(2, 1, 4), *tokens[:2], d.mask(1, 1, 5)],
            ([d.cand(2, 1, 4), *few, None, 0.0, False], {"enable_gqa": True}),
        ]
    )


def _keys(d: Draw, dtype: torch.dtype) -> Any:
    """A mask of three user keys and two of the candidate, in their order, out of inputs."""
    parts = []
    for kind, width in ((User, 3), (Cand, 2)):
        rows = d.num_users if kind is User else d.num_candidates
        mask = d.bools(rows, 1, 1, width)
        mask[..., 0] = True
        zeros = torch.zeros(mask.shape, dtype=torch.float64)
        is_bool = dtype == torch.bool
        parts.append(kind(mask if is_bool else zeros.masked_fill(~mask, -INF), Rows()))
    return Concat(3, tuple(parts), Rows())


@takes("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # padding and a constant mask
    kind = d.choose.choice(["lower", "isolating", "additive"])
    const = _causal(kind, d.choose.choice([2, 3, 4]))
    target = aten.add.Tensor if kind == "additive" else aten.bitwise_and.Tensor
    mask = d.walk().apply(target, _keys(d, const.tensor.dtype), const)
    return *[_tokens(d, 2, 4) for _ in range(3)], mask


@leaves("masked.masked_sdpa", aten.scaled_dot_product_attention.default)
def _(d: Draw) -> Any:  # padding alone; padding and a mask that lets everything be seen
    mask = _keys(d, torch.bool)
    seen = Const(torch.ones(5, 5, dtype=torch.bool))
    mask = d.choose.choice([mask, d.walk().apply(aten.bitwise_and.Tensor, mask, seen)])
    return *[_tokens(d, 2, 4) for _ in range(3)], mask


@takes("masked.joint_mask", aten.bitwise_and.Tensor)
def _(d: Draw) -> Any:
    keys, const = d.mask(1, 1, 5), _causal("lower", d.choose.choice([2, 4]))
    return d.choose.choice([(keys, const), (const, keys)])


@takes("masked.joint_mask", aten.logical_and.default)
def _(d: Draw) -> Any:
    return Cand(d.bools(d.num_candidates, 5, 5), Rows()), _causal("isolating", 2)


@takes("masked.joint_mask", aten.add.Tensor)
def _(d: Draw) -> Any:
    return _causal("additive", 3), d.choose.choice([d.user(1, 5), d.cand(5, 5), d.user(2, 5, 1)])


@leaves("masked.joint_mask", aten.add.Tensor)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (_causal("additive", 2), _causal("additive", 2)),
            (_causal("additive", 2), d.concat(2, [1], [3, 2])),
            (d.const(5, 5), d.user(1, 5)),
            (Const(torch.tensor([0.0, -INF]).double()), d.user(5, 2)),
        ]
    )
