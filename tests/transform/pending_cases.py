# SPDX-License-Identifier: Apache-2.0
"""The cases of the rules whose results are not computed at once; see `rule_cases`."""

from typing import Any

import torch

from ikbo.transform import forms as f
from ikbo.transform.forms import BATCH, Cand, Concat, Const, Rows, Size, Sum, User
from ikbo.transform.pending import Cross, Normed, Scaled
from tests.transform.random_forms import Draw
from tests.transform.rule_cases import leaves, size_of, takes

aten = torch.ops.aten
T = 4


def spread(x: Any, rows: int = T) -> Any:
    """A row that is repeated for each of T rows."""
    tensor = x.tensor.expand(-1, rows, -1)
    return type(x)(tensor, Rows(), spread=x)


def features(d: Draw, width: int = 3) -> list[Any]:
    """What an attention MLP reads of a candidate and of the rows of a history."""
    k, q = d.user(T, width), spread(d.cand(1, width))
    walk = d.walk()
    difference = walk.apply(aten.sub.Tensor, *d.choose.sample([q, k], 2))
    return [q, k, difference, walk.apply(aten.mul.Tensor, q, k)]


def joined(d: Draw) -> Any:
    some = features(d)
    d.choose.shuffle(some)
    extra = d.choose.choice([[], [spread(d.user(1, 2))], [d.cand(T, 2)], [d.shared(T, 1)]])
    return d.walk().apply(aten.cat.default, [*some, *extra], -1)


def scaled(d: Draw, rank: int = 2, axis: int | None = None) -> Scaled:
    axis = rank - 1 if axis is None else axis
    others = [d.size() for _ in range(rank - 2)]
    x = d.choose.choice([d.concat, d.affine])(axis, others)
    sizes = [1 if a == axis else n for a, n in enumerate(f.shape(x))][1:]
    shift = d.choose.choice([None, d.const(f.shape(x)[axis])])
    return Scaled(x, d.cand(*sizes), shift)


def normed(d: Draw, rank: int = 2) -> Normed:
    x = d.concat(rank - 1, [d.size() for _ in range(rank - 2)])
    vectors = d.choose.choice([(True, True), (True, False), (False, False)])
    return Normed(x, *(d.const(f.shape(x)[-1]) if v else None for v in vectors), 1e-5, "?")


# crosses


@takes("crosses.cross", aten.mul.Tensor)
def _(d: Draw) -> Any:
    cand = d.choose.choice([d.cand(1, 3), d.cand(T, 1), d.cand(T, 3), spread(d.cand(1, 3))])
    pair = [d.choose.choice([d.user(T, 3), d.user(T, 3), d.user(1, 3)]), cand]
    d.choose.shuffle(pair)
    return tuple(pair)


@leaves("crosses.cross", aten.mul.Tensor)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.user(3), d.cand(3)),
            (d.user(T, 3), d.const(3)),
            (d.user(T, 3), d.user(T, 3)),
            (d.user(T, 3), Cand(d.cand(T, 3).tensor.float(), Rows())),
            (User(d.tensor(2, d.num_users, 3), Rows(1)), d.cand(1, 3)),
        ]
    )


@takes("crosses.contract", aten.sum.dim_IntList)
def _(d: Draw) -> Any:
    user = d.user(T, 3)
    x, dim = d.choose.choice(
        [(Cross(user, d.cand(1, 3), "?"), 2), (Cross(user, d.cand(T, 1), "?"), 1)]
    )
    return x, [d.choose.choice([dim, dim - 3])], d.choose.random() < 0.5


@leaves("crosses.contract", aten.sum.dim_IntList)
def _(d: Draw) -> Any:  # over the repeated axis, over both, of two full matrices
    user = d.user(T, 3)
    return d.choose.choice(
        [
            (Cross(user, d.cand(1, 3), "?"), [1]),
            (Cross(user, d.cand(1, 3), "?"), [1, 2]),
            (Cross(user, d.cand(T, 3), "?"), [2]),
            (Cross(user, d.cand(1, 3), "?"), [0]),
        ]
    )


@takes("crosses.cat", aten.cat.default)
def _(d: Draw) -> Any:
    some = features(d)
    d.choose.shuffle(some)
    return some, d.choose.choice([2, -1])


@leaves("crosses.cat", aten.cat.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (features(d), 1),
            ([d.user(T, 2), d.cand(T, 2)], 2),
            ([d.user(T, 2), Sum(d.user(T, 2), d.cand(T, 2), Rows())], 2),
            ([spread(d.cand(1, 2)), d.cand(T, 3)], 2),
        ]
    )


@takes("crosses.linear", aten.linear.default)
def _(d: Draw) -> Any:
    x, m = joined(d), d.choose.choice([2, T + 3])
    return x, d.const(m, f.shape(x)[-1]), d.choose.choice([None, d.const(m)])


@takes("crosses.linear", aten.linear.default)
def _(d: Draw) -> Any:  # rows merged with the batch
    x = joined(d)
    width, flat = f.shape(x)[-1], Size(lambda n: T * n)
    dims = d.choose.choice([[flat, width], [-1, width], [BATCH, 2, 2, width]])
    return d.walk().apply(aten.view.default, x, dims), d.const(2, width), None


@takes("crosses.linear", aten.linear.default)
def _(d: Draw) -> Any:  # a cross network beside other features
    others = [d.cand(2), d.user(3), normed(d), d.concat(1, [])]
    parts = [scaled(d), *d.choose.sample(others, d.size(1, 4))]
    x = d.walk().apply(aten.cat.default, parts, -1)
    return x, d.const(3, f.shape(x)[-1]), d.choose.choice([None, d.const(3)])


@leaves("crosses.linear", aten.linear.default)
def _(d: Draw) -> Any:  # nothing is pending
    x = d.concat(2, [T])
    return x, d.const(2, f.shape(x)[-1]), None


@takes("affine.difference", aten.sub.Tensor)
def _(d: Draw) -> Any:
    pair = [d.user(T, 3), d.choose.choice([d.cand(T, 3), spread(d.cand(1, 3))])]
    return tuple(d.choose.sample(pair, 2))


@leaves("affine.difference", aten.sub.Tensor)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            ((d.user(T, 3), d.cand(T, 3)), {"alpha": 2}),
            ((d.user(T, 3), d.user(T, 3)), {}),
            ((d.user(1, 3), d.cand(T, 3)), {}),
        ]
    )


# indexed


@takes("indexed.product", aten.matmul.default)
def _(d: Draw) -> Any:
    between = d.choose.choice([[], [], [2], [2, 3]])
    kinds = d.choose.sample([d.user, d.cand], 2)
    return kinds[0](*between, 2, 3), kinds[1](*between, 3, d.size())


@takes("indexed.product", aten.bmm.default)
def _(d: Draw) -> Any:  # of a sum, which is added up
    return d.user(2, 3), Sum(d.user(3, 4), d.cand(3, 4), Rows())


@leaves("indexed.product", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.user(2, 3), d.user(3, 2)),
            (d.cand(1, 2, 3), d.user(2, 3, 4)),
            (d.cand(2, 3), d.const(3, 2)),
        ]
    )


@takes("indexed.spelled", aten.einsum.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            ("bt,btd->bd", [d.cand(3), d.user(3, 2)]),
            ("btd,bd->bt", [d.user(3, 2), d.cand(2)]),
            ("bqd, btd -> bqt", [d.cand(4, 2), d.user(3, 2)]),
            ("bhd,bthd->bht", [d.cand(2, 4), d.user(3, 2, 4)]),
            ("bqd,btd->btq", [d.user(4, 2), d.cand(3, 2)]),
            ("bt,bt->b", [d.user(3), d.cand(3)]),
        ]
    )


@leaves("indexed.spelled", aten.einsum.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            ("btd,btd->b", [d.user(3, 2), d.cand(3, 2)]),  # two letters are summed
            ("btd,cd->bct", [d.user(3, 2), d.cand(2)]),  # every row of the batch meets every row
            ("bt,btd->bd", [d.user(3), d.user(3, 2)]),
            ("btde,bt->bde", [d.user(3, 2, 2), d.cand(3)]),
        ]
    )


# gains


@takes("gains.gain", aten.mul.Tensor)
def _(d: Draw) -> Any:
    x, gain = d.choose.choice(
        [
            (d.choose.choice([d.concat, d.affine])(1, []), d.cand(1)),
            (d.concat(1, [2]), d.cand(1, 2)),
            (d.concat(2, [2]), d.cand(2, 1)),
            (d.concat(1, []), d.total(1, shared=True)),
        ]
    )
    return d.choose.choice([(x, gain), (gain, x)])


@leaves("gains.gain", aten.mul.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return d.choose.choice(
        [(x, d.cand(f.shape(x)[1])), (x, d.user(1)), (d.concat(1, [2]), d.cand(1, 1))]
    )


@takes("gains.outer_gain", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.concat(1, [1]), d.cand(1, 1)


@leaves("gains.outer_gain", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice([(d.concat(1, [1]), d.cand(1, 2)), (d.concat(1, [2]), d.cand(2, 1))])


@takes("gains.scale", aten.mul.Tensor)
def _(d: Draw) -> Any:
    x = scaled(d, d.size(2, 3))
    vector = d.choose.choice([2.5, d.const(f.shape(x)[-1]), d.const(1)])
    return d.choose.choice([(x, vector), (vector, x)])


@leaves("gains.scale", aten.mul.Tensor)
def _(d: Draw) -> Any:
    x = scaled(d, 3, 1)
    return x, d.const(f.shape(x)[2])


@takes("gains.add", aten.add.Tensor)
def _(d: Draw) -> Any:
    x = scaled(d)
    vector = d.const(f.shape(x)[-1])
    other = Scaled(x.x, d.cand(1), d.choose.choice([None, vector]))
    return tuple(d.choose.sample([x, d.choose.choice([x.x, other, vector, 0.5])], 2))


@leaves("gains.add", aten.add.Tensor)
def _(d: Draw) -> Any:  # other features; a value for each candidate
    x = scaled(d)
    k = f.shape(x)[-1]
    return d.choose.choice([(x, d.concat(1, [], [k - 1, 1])), (x, d.cand(k)), (x, d.user(k))])


@takes("gains.linear", aten.linear.default)
def _(d: Draw) -> Any:
    x = scaled(d, d.size(2, 3))
    return x, d.const(3, f.shape(x)[-1]), d.choose.choice([None, d.const(3)])


@leaves("gains.linear", aten.linear.default)
def _(d: Draw) -> Any:
    x = scaled(d, 3, 1)
    return x, d.const(2, f.shape(x)[2]), None


@takes("gains.rms_norm", aten.rms_norm.default)
def _(d: Draw) -> Any:
    rank = d.size(1, 2)
    x = d.concat(rank, [d.size()] * (rank - 1))
    k = f.shape(x)[-1]
    return x, [k], d.choose.choice([None, d.const(k)]), d.choose.choice([None, 1e-3])


@leaves("gains.rms_norm", aten.rms_norm.default)
def _(d: Draw) -> Any:
    return d.concat(1, [3]), [3], None, 1e-3


# norms


@takes("norms.layer_norm", aten.layer_norm.default)
def _(d: Draw) -> Any:
    rank = d.size(1, 2)
    x = d.concat(rank, [d.size()] * (rank - 1))
    k = f.shape(x)[-1]
    return x, [k], d.choose.choice([None, d.const(k)]), d.choose.choice([None, d.const(k)])


@leaves("norms.layer_norm", aten.layer_norm.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [3])
    return d.choose.choice([(x, [3]), (x, f.shape(x)[1:])])


@takes("norms.linear", aten.linear.default)
def _(d: Draw) -> Any:
    x = normed(d, d.size(2, 3))
    return x, d.const(4, f.shape(x)[-1]), d.choose.choice([None, d.const(4)])


@takes("norms.linear", aten.linear.default)
def _(d: Draw) -> Any:  # a large mean that both sides have
    x = d.concat(1, [], [3, 2])
    parts = [type(p)(p.tensor + 1e3, p.rows) for p in x.parts]
    return Normed(Concat(1, tuple(parts), Rows()), None, None, 1e-5, "?"), d.const(4, 5), None


@leaves("norms.linear", aten.linear.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [])
    return x, d.const(2, f.shape(x)[-1]), None


# pairs


def crossed(d: Draw, *, symmetric: bool = True) -> Any:
    """Dot products of all pairs of five fields."""
    parts = [d.user(1, 3), d.cand(2, 3), d.user(1, 3), d.shared(1, 3)]
    d.choose.shuffle(parts)
    walk, x = d.walk(), d.choose.choice([d.concat(1, [3], [2, 3]), Concat(1, tuple(parts), Rows())])
    y = x if symmetric else d.concat(1, [3], [3, 2])
    return walk.apply(aten.matmul.default, x, walk.apply(aten.transpose.int, y, 1, 2))


@takes("pairs.dots", aten.index.Tensor)
def _(d: Draw) -> Any:
    x = crossed(d, symmetric=d.choose.random() < 0.7)
    pairs = [(i, j) for i in range(-5, 5) for j in range(5)]
    some = d.choose.choice(
        [[(i, j) for i in range(5) for j in range(i)], d.choose.sample(pairs, 9)]
    )
    rows, columns = zip(*some, *[(i, i) for i in range(5)], strict=True)
    return x, [None, Const(torch.tensor(rows)), Const(torch.tensor(columns))]


@leaves("pairs.dots", aten.index.Tensor)
def _(d: Draw) -> Any:
    picks = Const(torch.tensor([0, 4]))
    bigger = d.walk().apply(aten.mul.Tensor, crossed(d), 2.0)
    return d.choose.choice(
        [(crossed(d), [None, picks]), (bigger, [None, picks, picks]), (d.cand(5, 5), [None, picks])]
    )


def fields(d: Draw, axis: int) -> Any:
    x = d.concat(1, [3], [2, 3])
    return d.walk().apply(aten.unsqueeze.default, x, 3 - axis)


@takes("pairs.all_pairs", aten.view.default)
def _(d: Draw) -> Any:
    grid = d.walk().apply(aten.mul.Tensor, fields(d, 1), fields(d, 2))
    return d.choose.choice(
        [(crossed(d), [BATCH, 25]), (crossed(d), [BATCH, -1]), (grid, [BATCH, 25, 3]),
         (grid, [-1, 25, 3])]
    )  # fmt: skip


@leaves("pairs.all_pairs", aten.view.default)
def _(d: Draw) -> Any:
    grid = d.walk().apply(aten.mul.Tensor, fields(d, 1), fields(d, 2))
    return d.choose.choice([(grid, [BATCH, 5, 15]), (d.cand(5, 5), [BATCH, 25])])


@takes("pairs.outer", aten.mul.Tensor)
def _(d: Draw) -> Any:
    return tuple(d.choose.sample([fields(d, 1), fields(d, 2)], 2))


@leaves("pairs.outer", aten.mul.Tensor)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [(fields(d, 1), fields(d, 1)), (d.concat(1, [4], [2, 2]), d.concat(2, [4], [2, 2]))]
    )


@takes("pairs.spelled_outer", aten.einsum.default)
def _(d: Draw) -> Any:
    pair = [d.concat(1, [3], [2, 3]), d.concat(1, [3], [1, 4])]
    return d.choose.choice(["bhd,bmd->bhmd", "bhd, bmd -> bhmd", "bhd,bmd->bdhm"]), pair


@leaves("pairs.spelled_outer", aten.einsum.default)
def _(d: Draw) -> Any:  # a letter is summed; one side is no concatenation
    pair = [d.concat(1, [3], [2, 3]), d.concat(1, [3], [1, 4])]
    return d.choose.choice([("bhd,bmd->bhm", pair), ("bhd,bmd->bhmd", [pair[0], d.cand(5, 3)])])


# products with rows of both sides


@takes("indexed.product_of_rows", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.concat(1, [3]), d.cand(3, 2)),
            (d.cand(2, 3), d.concat(2, [3])),
            (d.concat(1, [3]), Sum(d.user(3, 2), d.cand(3, 2), Rows())),
            (d.concat(2, [2, 3]), d.cand(2, 3, 2)),
        ]
    )


@leaves("indexed.product_of_rows", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [(d.concat(1, [3]), d.user(3, 2)), (d.concat(2, [3], [2, 2]), d.cand(4, 2))]
    )


@takes("indexed.product_over_rows", aten.matmul.default)
def _(d: Draw) -> Any:
    x, y = d.concat(1, [3]), d.concat(2, [3])
    return d.choose.choice([(d.cand(2, size_of(x, 1)), x), (y, d.cand(size_of(y, 2), 2))])


@leaves("indexed.product_over_rows", aten.matmul.default)
def _(d: Draw) -> Any:
    return d.cand(2, 3), d.concat(2, [3])


# reductions, picks


for _name, _op in (
    ("amax", aten.amax.default), ("amin", aten.amin.default), ("logsumexp", aten.logsumexp.default),
):  # fmt: skip

    @takes(f"reduce.{_name}_", _op)
    def _(d: Draw) -> Any:
        x = d.concat(1, [d.size()])
        return x, d.choose.choice([[1], [1, 2], [-2]]), d.choose.random() < 0.5

    @leaves(f"reduce.{_name}_", _op)
    def _(d: Draw) -> Any:
        return d.concat(1, [2]), d.choose.choice([[2], [0, 1]])


for _name in ("max", "min"):
    _op = getattr(aten, _name).dim

    @takes(f"reduce.{_name}_and_places", _op)
    def _(d: Draw) -> Any:
        return d.concat(1, [d.size()]), d.choose.choice([1, -2]), d.choose.random() < 0.5

    @leaves(f"reduce.{_name}_and_places", _op)
    def _(d: Draw) -> Any:
        return d.concat(1, [2]), 2


@takes("picks.gather", aten.gather.default)
def _(d: Draw) -> Any:
    x = d.user(5, 3)
    picks = Cand(torch.randint(0, 5, (d.num_candidates, 2, 1), generator=d.generator), Rows())
    wide = Cand(picks.tensor.expand(-1, -1, 3), Rows(), spread=picks)
    other = Cand(torch.randint(0, 3, (d.num_candidates, 4, 2), generator=d.generator), Rows())
    flat = Cand(torch.randint(0, 4, (d.num_candidates, 6), generator=d.generator), Rows())
    return d.choose.choice([(x, 1, picks), (x, 1, wide), (x, -1, other), (d.user(4), 1, flat)])


@leaves("picks.gather", aten.gather.default)
def _(d: Draw) -> Any:
    picks = User(torch.randint(0, 5, (d.num_users, 2), generator=d.generator), Rows())
    return d.choose.choice([(d.user(5), 1, picks), (d.cand(5), 1, picks)])
