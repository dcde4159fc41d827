# SPDX-License-Identifier: Apache-2.0
"""The table of row-wise operators: whatever it claims of an axis is true.

For each operator, every way in which its tensors may share an axis is asked. Where the table claims
that positions of that axis are treated alone, choosing positions before and after must give the
same.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo.transform.rowwise import _POINTWISE, is_pointwise, result_axis
from ikbo.transform.rowwise_table import TABLE, Axis

aten = torch.ops.aten
N = 3  # every axis of a float operand: operands may then share any of them


def t(*shape: int) -> Tensor:
    return torch.randn(shape or (N, N, N), dtype=torch.float64)


def ints(*shape: int) -> Tensor:
    return torch.randint(0, N, shape or (N, N, N))


def weights(gates: int) -> list[Tensor]:
    return [t(gates * N, N), t(gates * N, N), t(gates * N), t(gates * N)]


# Per operator, calls as (args, kwargs).
CALLS: dict[Any, list[Callable[[], Any]]] = {}


def calls(*targets: Any) -> Any:
    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        for target in targets:
            CALLS.setdefault(target, []).append(make)
        return make

    return add


def over_dims(*more: Any) -> list[Callable[[], Any]]:
    return [lambda d=d: ((t(), d, *more), {}) for d in (0, 1, -1)]


for _op in (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.logsumexp.default, aten.any.dims, aten.all.dims, aten.linalg_vector_norm.default,
):  # fmt: skip
    leading = (2,) if _op is aten.linalg_vector_norm.default else ()
    CALLS[_op] = [
        lambda d=d, k=k, leading=leading: ((t(), *leading, d, k), {})
        for d in ([0], [1], [-1], [0, 2])
        for k in (False, True)
    ]
for _op in (
    aten.any.dim, aten.all.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int,
    aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default,
):  # fmt: skip
    CALLS[_op] = over_dims(False) + over_dims(True)
for _op in (
    aten.count_nonzero.default, aten.softmax.int, aten.log_softmax.int, aten.cumsum.default,
    aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.sort.default,
    aten.argsort.default, aten.unbind.int,
):  # fmt: skip
    CALLS[_op] = over_dims()
for _op in (aten._softmax.default, aten._log_softmax.default):
    CALLS[_op] = over_dims(False)
for _op in (aten.var.correction, aten.std.correction):
    CALLS[_op] = [lambda d=d: ((t(), [d]), {"correction": 1}) for d in (0, 1, 2)]
for _op in (aten.var.dim, aten.std.dim):
    CALLS[_op] = [lambda d=d: ((t(), [d], False), {}) for d in (0, 1, 2)]
CALLS[aten.norm.ScalarOpt_dim] = [lambda d=d: ((t(), 2, [d]), {}) for d in (0, 1, 2)]
CALLS[aten.glu.default] = [lambda d=d: ((t(4, 4, 4), d), {}) for d in (0, 1, -1)]
CALLS[aten.topk.default] = [lambda d=d: ((t(), 2, d), {}) for d in (0, 1, -1)]
CALLS[aten.flip.default] = [lambda d=d: ((t(), d), {}) for d in ([0], [1, 2])]
CALLS[aten.roll.default] = [lambda d=d: ((t(), [1], d), {}) for d in ([0], [2])]
CALLS[aten.select.int] = over_dims(0)
CALLS[aten.slice.Tensor] = over_dims(0, 2)
CALLS[aten.split.Tensor] = [lambda d=d: ((t(), 2, d), {}) for d in (0, 1, -1)]
CALLS[aten.split_with_sizes.default] = [lambda d=d: ((t(), [1, 2], d), {}) for d in (0, 1, -1)]
CALLS[aten.index_select.default] = [lambda d=d: ((t(), d, ints(N)), {}) for d in (0, 1, 2)]
CALLS[aten.gather.default] = [lambda d=d: ((t(), d, ints()), {}) for d in (0, 1, 2)]
CALLS[aten.scatter.value] = [lambda d=d: ((t(), d, ints(), 1.0), {}) for d in (0, 1, 2)]
CALLS[aten.scatter.src] = [
    lambda d=d: ((t(), d, torch.argsort(t(), d), t()), {}) for d in (0, 1, 2)
]
CALLS[aten.unfold.default] = over_dims(2, 1)
CALLS[aten.cosine_similarity.default] = [lambda d=d: ((t(), t(), d), {}) for d in (0, 1, -1)]


@calls(aten.tril.default, aten.triu.default)
def _() -> Any:
    return (t(),), {}


@calls(aten.layer_norm.default, aten.native_layer_norm.default)
def _() -> Any:
    return (t(), [N], t(N), t(N), 1e-5), {}


@calls(aten.layer_norm.default)
def _() -> Any:
    return (t(), [N, N], None, None, 1e-5), {}


@calls(aten.rms_norm.default)
def _() -> Any:
    return (t(), [N], t(N), 1e-5), {}


@calls(aten.group_norm.default)
def _() -> Any:
    return (t(), N, t(N), t(N), 1e-5), {}


@calls(aten._native_batch_norm_legit_no_training.default)
def _() -> Any:
    return (t(), t(N), t(N), t(N), t(N).abs(), 0.1, 1e-5), {}


@calls(aten.linear.default)
def _() -> Any:
    return (t(), t(N, N), t(N)), {}


@calls(aten.linear.default)
def _() -> Any:
    return (t(N, N), t(N, N), None), {}


for _shapes in (
    [(3, 3, 3), (3, 3, 3)],
    [(3, 3, 3), (3, 3)],
    [(3, 3), (3, 3, 3)],
    [(3, 3, 3), (3,)],
    [(3, 3), (3, 3)],
):

    @calls(aten.matmul.default)
    def _(shapes: Any = _shapes) -> Any:
        return tuple(t(*shape) for shape in shapes), {}


@calls(aten.mm.default)
def _() -> Any:
    return (t(N, N), t(N, N)), {}


@calls(aten.bmm.default)
def _() -> Any:
    return (t(), t()), {}


@calls(aten.baddbmm.default)
def _() -> Any:
    return (t(), t(), t()), {}


@calls(aten.addmm.default)
def _() -> Any:
    return (t(N), t(N, N), t(N, N)), {}


@calls(aten.addmm.default)
def _() -> Any:
    return (t(N, N), t(N, N), t(N, N)), {}


for _equation in ("bij,bjk->bik", "bij,jk->kbi", "bij,bij->b", "ij,bj->bi", "bii,bi->bi"):

    @calls(aten.einsum.default)
    def _(equation: str = _equation) -> Any:
        operands = [t(*[N] * len(term)) for term in equation.split("->")[0].split(",")]
        return (equation, operands), {}


@calls(aten.scaled_dot_product_attention.default)
def _() -> Any:
    return (t(N, N, N, N), t(N, N, N, N), t(N, N, N, N), torch.rand(N, N, N, N) < 0.7), {}


@calls(aten.scaled_dot_product_attention.default)
def _() -> Any:
    return (t(), t(), t(), None, 0.0, True), {}


@calls(aten.scaled_dot_product_attention.default)
def _() -> Any:
    return (t(), t(), t()), {}


@calls(aten.conv1d.default)
def _() -> Any:
    return (t(), t(N, N, 2), t(N)), {}


@calls(aten.conv2d.default)
def _() -> Any:
    return (t(N, N, N, N), t(N, N, 2, 2), t(N)), {}


@calls(aten.max_pool1d.default, aten.avg_pool1d.default)
def _() -> Any:
    return (t(), [2]), {}


@calls(aten.adaptive_avg_pool1d.default)
def _() -> Any:
    return (t(), [1]), {}


@calls(aten.embedding.default)
def _() -> Any:
    return (t(N, N), ints(N, N)), {}


@calls(aten.one_hot.default)
def _() -> Any:
    return (ints(N, N), N), {}


@calls(aten.bucketize.Tensor)
def _() -> Any:
    return (t(), torch.sort(t(N)).values), {}


@calls(aten.searchsorted.Tensor)
def _() -> Any:
    return (torch.sort(t(N)).values, t()), {}


@calls(aten.isin.Tensor_Tensor)
def _() -> Any:
    return (ints(), ints(2)), {}


@calls(aten.prelu.default)
def _() -> Any:
    return (t(), t(N)), {}


@calls(aten.gru.input)
def _() -> Any:
    return (t(), t(1, N, N), weights(3), True, 1, 0.0, False, False, True), {}


@calls(aten.rnn_tanh.input, aten.rnn_relu.input)
def _() -> Any:
    return (t(), t(1, N, N), weights(1), True, 1, 0.0, False, False, False), {}


@calls(aten.lstm.input)
def _() -> Any:
    return (t(), [t(1, N, N), t(1, N, N)], weights(4), True, 1, 0.0, False, False, True), {}


@calls(aten.index.Tensor)
def _() -> Any:
    return (t(), [None, ints(2, N)]), {}


@calls(aten.index.Tensor)
def _() -> Any:
    return (t(), [ints(N)]), {}


@calls(aten.index.Tensor)
def _() -> Any:
    return (t(), [None, ints(2), ints(2)]), {}


@calls(aten.index.Tensor)
def _() -> Any:
    return (t(), [ints(2), None, ints(2)]), {}


@calls(aten.index.Tensor)
def _() -> Any:
    return (t(), [ints(2), ints(2)]), {}


@calls(aten.cat.default)
def _() -> Any:
    return ([t(), t()], 1), {}


@calls(aten.pad.default)
def _() -> Any:
    return (t(), [1, 1]), {}


@calls(aten.repeat.default)
def _() -> Any:
    return (t(), [2, 1, 2, 1]), {}


@calls(aten.repeat_interleave.self_int)
def _() -> Any:
    return (t(), 2, 1), {}


for _op in _POINTWISE:
    _second = [a.type for a in _op._schema.arguments[1:2] if not a.kwarg_only]
    _mode = {"rounding_mode": "floor"} if "mode" in _op._overloadname else {}
    if not _second:
        CALLS[_op] = [lambda: ((t(),), {})]
    elif str(_second[0]) == "Tensor":
        CALLS[_op] = [lambda mode=_mode: ((t(), t(N, N)), mode)]
    else:
        CALLS[_op] = [lambda: ((t(), 2), {})]
for _op in (aten.__and__.Tensor, aten.__or__.Tensor):
    CALLS[_op] = [lambda: ((t() > 0, t(N, N) > 0), {}), lambda: ((ints(), ints(N)), {})]
for _op in (aten.__and__.Scalar, aten.__or__.Scalar):
    CALLS[_op] = [lambda: ((ints(), 1), {})]
CALLS[aten.floor_divide.default] = [lambda: ((t(), t(N, N)), {})]
CALLS[aten.type_as.default] = [lambda: ((t(), t()), {})]
CALLS[aten.rsub.Tensor] = [lambda: ((t(), t(N)), {})]
CALLS[aten.floor_divide.Scalar] = [lambda: ((t(), 2), {})]
CALLS[aten.masked_fill.Tensor] = [lambda: ((t(), t(N, N) > 0, t(1)[0]), {})]
CALLS[aten.where.Scalar] = [lambda: ((t() > 0, 1.0, 2.0), {})]
CALLS[aten.where.ScalarOther] = [lambda: ((t() > 0, t(N, N), 2.0), {})]
CALLS[aten.where.ScalarSelf] = [lambda: ((t() > 0, 2.0, t(N)), {})]
CALLS[aten.add.Tensor] = [lambda: ((t(), t(N, N)), {}), lambda: ((t(N), t(N, 1, N)), {})]


def claims(target: Any, args: Any, kwargs: Any) -> Any:
    """Every choice of an axis (or none) per tensor, with the axis that the table claims."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    options = [[None, *range(leaves[i].ndim)] for i in tensors]
    for axes in itertools.product(*options):
        chosen = {i: a for i, a in zip(tensors, axes, strict=True) if a is not None}
        sizes = {leaves[i].shape[a] for i, a in chosen.items()}
        # Operands share a whole axis, long enough to choose from.
        if len(sizes) != 1 or min(sizes) < N:
            continue
        shown = [
            Axis(leaf.ndim, chosen.get(i)) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(leaves)
        ]
        shown_args, shown_kwargs = pytree.tree_unflatten(shown, spec)
        axis = result_axis(target, shown_args, shown_kwargs)
        if axis is not None:
            yield leaves, spec, chosen, axis


def check(target: Any, leaves: Any, spec: Any, chosen: Any, axis: Any) -> bool:
    rows = torch.tensor([2, 0, 2, 1, 1])
    picked = [x.index_select(chosen[i], rows) if i in chosen else x for i, x in enumerate(leaves)]
    results = []
    for operands in (leaves, picked):
        args, kwargs = pytree.tree_unflatten(operands, spec)
        try:
            out = target(*args, **kwargs)
        except RuntimeError as error:
            # An operand without the axis has a size that meets it: no such model can be exported.
            assert operands is picked and "size" in str(error)
            return False
        results.append(out if isinstance(out, tuple | list) else (out,))
    axes = axis if isinstance(axis, tuple) else (axis,) * len(results[0])
    assert len(axes) == len(results[0])
    for whole, part, a in zip(*results, axes, strict=True):
        if a is not None:
            torch.testing.assert_close(whole.index_select(a, rows), part, rtol=1e-9, atol=1e-9)
    return True


@pytest.mark.parametrize("target", sorted(CALLS, key=str), ids=str)
def test_claims_are_true(target: Any) -> None:
    torch.manual_seed(0)
    checked = 0
    for make in CALLS[target]:
        args, kwargs = make()
        checked += sum(check(target, *claim) for claim in claims(target, args, kwargs))
    assert checked > 0, "no axis of this operator is treated row by row"


def test_every_entry_is_checked() -> None:
    assert set(TABLE) | _POINTWISE <= set(CALLS)


def test_random_operators_are_not_row_wise() -> None:
    assert not is_pointwise(aten.bernoulli.default)
    assert not is_pointwise(aten.rand_like.default)
