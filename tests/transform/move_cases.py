# SPDX-License-Identifier: Apache-2.0
"""The cases of the rules that only move data; see `rule_cases`."""

from typing import Any

import torch

from ikbo.transform.forms import BATCH, Cand, Concat, Const, Merged, Rows, Size, Sum, User
from tests.transform.random_forms import Draw
from tests.transform.rule_cases import leaves, reordered, size_of, takes

aten = torch.ops.aten


# slicing


@takes("slicing.slice_", aten.slice.Tensor)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    total = size_of(x, 1)
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
    return x, 1, d.size(-size_of(x, 1), size_of(x, 1) - 1)


@leaves("slicing.select", aten.select.int)
def _(d: Draw) -> Any:
    return d.concat(1, [3]), 2, 0


@takes("slicing.split", aten.split_with_sizes.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [d.size()])
    first = d.size(0, size_of(x, 1) - 1) or 1
    return x, [first, size_of(x, 1) - first], 1


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
def _(d: Draw) -> Any:  # of pieces that lie along another axis
    other = d.choose.choice([d.concat(1, [2], [2, 3]), d.user(5, 2)])
    return [d.concat(1, [1], [3, 2]), other], 2


@leaves("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:
    return [d.merged([2], [2, 1]), d.merged([3], [2, 1])], 1


@leaves("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:  # along the batch
    return [d.user(2), d.cand(2)], 0


@leaves("structural.cat", aten.cat.default)
def _(d: Draw) -> Any:  # promotes types
    return [d.user(2), Cand(d.cand(2).tensor.float(), Rows())], 1


@takes("structural.cat_reordered", aten.cat.default)
def _(d: Draw) -> Any:
    n = d.size()
    parts = [reordered(d, 1, [n]), d.user(d.size(), n), reordered(d, 1, [n]), d.cand(1, n)]
    d.choose.shuffle(parts)
    return parts, d.choose.choice([1, -2])


@leaves("structural.cat_reordered", aten.cat.default)
def _(d: Draw) -> Any:  # along another axis
    return [reordered(d, 1, [2]), d.cand(5, 3)], 2


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
    return reordered(d, 1, [2]), d.choose.choice([[0, 2, 1], [1, 0, 2], [2, 1, 0]])


@takes("structural.permute", aten.permute.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form(d, 3, 2), d.concat(1, [2]), d.concat(2, [3])])
    x = d.choose.choice([x, x, d.merged([3, 2]), Merged(d.batch_inside([3, 2]))])
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


@takes("reshape.unsqueeze", aten.unsqueeze.default)
def _(d: Draw) -> Any:
    x = d.choose.choice(
        [_any_form(d, 3, 2), d.concat(1, [2]), d.concat(2, [3]), d.total(2, rank=3)]
    )
    return x, d.size(-4, 3)


@takes("reshape.squeeze", aten.squeeze.dim)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form(d, 1, 2), d.concat(2, [1]), d.concat(1, [2])])
    return x, d.choose.choice([1, 2, -2])


@takes("reshape.squeeze", aten.squeeze.default)
def _(d: Draw) -> Any:
    # A batch of one row is no axis to drop: graphs are made for any batch.
    d.num_candidates = max(2, d.num_candidates)
    d.index = torch.zeros(d.num_candidates, dtype=torch.int32)
    return (d.choose.choice([d.user(1, 2, 1), d.cand(2, 1), d.concat(1, [1])]),)


@takes("reshape.squeeze", aten.squeeze.dims)
def _(d: Draw) -> Any:
    return d.concat(1, [1, 1]), [2, 3]


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:
    x = d.choose.choice([_any_form_batched(d, 4, 3), d.total(2, kind="lce")])
    if isinstance(x, Sum):
        return x, [BATCH, -1]
    flat = Size(lambda n: 4 * n)
    return x, d.choose.choice(
        [[BATCH, 12], [-1, 3], [flat, 3], [BATCH, 2, 2, 3], [1, BATCH, 4, 3], [-1, 4, 3]]
    )


def _any_form_batched(d: Draw, *shape: int) -> Any:
    return d.choose.choice([d.user(*shape), d.cand(*shape), d.shared(*shape)])


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [3])
    total = size_of(x, 1)
    return x, d.choose.choice(
        [[BATCH, -1], [BATCH, total, 3, 1], [BATCH, 1, total * 3], [-1, total, 3]]
    )


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # merged batches come apart again
    x = d.choose.choice(
        [
            User(d.tensor(d.num_users * 3, 2), Rows(0, 1, 3)),
            User(d.tensor(3 * d.num_users, 2), Rows(0, 3)),
        ]
    )
    return x, [BATCH, 3, 2] if x.rows.inner == 3 else [3, BATCH, 2]


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # the batch takes in the axis of a concatenation
    x = d.concat(1, [2], [2, 3])
    wide, flat = Size(lambda n: 5 * n), Size(lambda n: 10 * n)
    return x, d.choose.choice([[wide, 2], [-1, 2], [flat], [-1], [flat, 1], [1, wide, 1, 2]])


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # and gives it back
    x = d.merged([2], [2, 3])
    return x, d.choose.choice([[BATCH, 5, 2], [-1, 5, 2], [BATCH, -1], [-1], [-1, 1], [-1, 2, 1]])


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # the batch takes in the axis before it, and gives it back
    x = d.batch_inside([2], [2, 3])
    wide, flat = Size(lambda n: 5 * n), Size(lambda n: 10 * n)
    return d.choose.choice(
        [
            (x, d.choose.choice([[wide, 2], [-1, 2], [flat], [1, wide, 2, 1]])),
            (Merged(x), d.choose.choice([[5, BATCH, 2], [5, BATCH, 1, 2], [5, -1], [flat]])),
        ]
    )


@leaves("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # two sequences, one after the other
    x = d.batch_inside([2], [2, 3])
    parts = tuple(type(p)(p.tensor[None].repeat(2, 1, 1, 1), Rows(2)) for p in x.parts)
    return Concat(1, parts, Rows(2)), [Size(lambda n: 10 * n), 2]


@leaves("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # half of the batch in each row
    d.num_users, d.num_candidates, d.index = 2, 2, torch.tensor([1, 0], dtype=torch.int32)
    return d.user(4, 3), [2, -1]


@leaves("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # a user's and a candidate's value in one row
    return d.concat(1, [3], [1, 1]), [Size(lambda n: 3 * n), 2]


@leaves("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # pieces of each row of a grid, not of the batch
    return d.concat(2, [2], [1, 1]), [Size(lambda n: 4 * n)]


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # fields of width 2 side by side
    return d.concat(1, [], [4, 2, 6, 2]), [BATCH, -1, 2]


@takes("reshape.view", aten.view.default)
def _(d: Draw) -> Any:  # columns of both sides in turn
    x = d.concat(2, [3], [1, 2])
    return d.choose.choice(
        [(x, [BATCH, -1]), (x, [BATCH, 1, 9]), (d.concat(2, [3, 2], [2, 1]), [BATCH, -1, 2])]
    )


@leaves("reshape.view", aten.view.default)
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
            (d.concat(1, [1], [2, 1]), [-1, 3, 4]),
            (d.concat(2, [1], [1, 2]), [2, BATCH, 4, -1]),
        ]
    )


@leaves("structural.expand", aten.expand.default)
def _(d: Draw) -> Any:  # of nothing but a size that each draw has
    return d.total(3), [BATCH, 3]


@leaves("structural.expand", aten.expand.default)
def _(d: Draw) -> Any:  # every row of the batch again for every row
    return d.const(1, 1), [BATCH, BATCH]


@takes("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [
            (d.const(1, 3), [BATCH, 2]),
            (d.const(3), [BATCH, 1]),
            (d.const(2, 3), [2, 1]),
            (d.const(2, 3), [BATCH, 1]),
            (d.const(2, 3), [2, BATCH]),
        ]
    )


@leaves("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:
    return d.user(3), [1, 2]


@leaves("structural.repeat", aten.repeat.default)
def _(d: Draw) -> Any:  # twice per row of the batch
    return d.const(1, 3), [_TWICE, 1]


@takes("structural.tile", aten.tile.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [(d.const(3), [BATCH, 1]), (d.user(3, 2), [2]), (d.const(2, 3), [BATCH, 1, 1])]
    )


@takes("structural.repeat_interleave", aten.repeat_interleave.self_int)
def _(d: Draw) -> Any:
    return d.choose.choice([(d.const(1, 3), BATCH, 0), (d.const(2, 3), BATCH, -1)])


@leaves("structural.repeat_interleave", aten.repeat_interleave.self_int)
def _(d: Draw) -> Any:
    return d.choose.choice([(d.user(3), 2, 1), (d.const(2, 3), 2, 0), (d.const(1, 3), _TWICE, 0)])


# picks


def _picks(d: Draw, low: int, high: int, *shape: int) -> Const:
    picks = torch.randint(low, high, shape, generator=d.generator)
    return Const(picks if d.size(0, 1) else picks.sort().values)


@takes("picks.index", aten.index.Tensor)
def _(d: Draw) -> Any:
    x, axis = d.choose.choice([(d.concat(1, [2]), 1), (d.concat(2, [3]), 2), (d.concat(1, []), 1)])
    total = size_of(x, axis)
    shape = d.choose.choice([[1], [3], [7], [2, 3]])
    return x, [None] * axis + [_picks(d, -total, total, *shape)]


@leaves("picks.index", aten.index.Tensor)
def _(d: Draw) -> Any:  # numbers per user
    x = d.user(3)
    picks = User((d.tensor(d.num_users, 2) > 0).long(), Rows())
    return d.choose.choice(
        [
            (d.concat(1, [2]), [None, None, _picks(d, 0, 2, 2)]),
            (d.concat(1, [2]), [None, _picks(d, 0, 2, 2), _picks(d, 0, 2, 2)]),
            (x, [None, _picks(d, 0, 3, 2)]),
            (d.const(2, 3), [picks]),
        ]
    )


@takes("picks.index_select", aten.index_select.default)
def _(d: Draw) -> Any:
    x = d.concat(1, [2])
    return x, d.choose.choice([1, -2]), _picks(d, 0, size_of(x, 1), d.size(1, 6))


@leaves("picks.index_select", aten.index_select.default)
def _(d: Draw) -> Any:
    return d.choose.choice(
        [(d.concat(1, [2]), 2, _picks(d, 0, 2, 3)), (d.cand(3), 1, _picks(d, 0, 3, 2))]
    )
