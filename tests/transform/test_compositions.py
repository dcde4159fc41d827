# SPDX-License-Identifier: Apache-2.0
"""Random compositions of three rewrites keep the meaning, in fp64: what one leaves factored, the
next one consumes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.forms import BATCH, Const
from ikbo.transform.rules import RULES
from ikbo.transform.walk import Walk
from tests.transform.random_forms import Draw, assert_same
from tests.transform.test_rules import name_of

aten = torch.ops.aten
DRAWS = 8


@dataclass(frozen=True)
class Value:
    """A form, and the tensor that the unmodified operators make."""

    form: Any
    tensor: Tensor


class Run:
    """Applies operators to forms and to what they mean."""

    def __init__(self, seed: str) -> None:
        self.draw = Draw(seed)
        # A batch of one row leaves sizes of 1 that a model's graph, made for any batch, has not.
        self.draw.num_candidates = max(2, self.draw.num_candidates)
        self.draw.index = torch.arange(self.draw.num_candidates, dtype=torch.int32)
        self.draw.index %= self.draw.num_users
        self.walk: Walk = self.draw.walk()

    def value(self, form: Any) -> Value:
        return Value(form, self.draw.meaning(form))

    def weight(self, *shape: int) -> Value:
        drawn = self.draw.tensor(*shape)
        return self.value(self.walk.fold(lambda: drawn, "weight"))

    def __call__(self, target: Any, *args: Any) -> Any:
        forms = f.map_leaves(lambda x: x.form if isinstance(x, Value) else x, args)
        forms, tensors = self.walk.apply(target, *forms), self.plain(target, *args)
        if isinstance(tensors, tuple | list):
            return [Value(*pair) for pair in zip(forms, tensors, strict=True)]
        return Value(forms, tensors)

    def plain(self, target: Any, *args: Any) -> Any:
        """What the operator makes of the tensors."""
        tensors = f.map_leaves(
            lambda x: x.tensor if isinstance(x, Value) else self.draw.meaning(x), args
        )
        return (aten.reshape.default if target is aten.view.default else target)(*tensors)

    def linear(self, x: Value, m: int) -> Value:
        bias = self.draw.choose.choice([None, self.weight(m)])
        return self(aten.linear.default, x, self.weight(m, x.tensor.shape[-1]), bias)

    def flat(self, x: Value) -> Value:
        return self(aten.view.default, x, [BATCH, -1])

    def rows(self, x: Value) -> Value:
        """A vector as rows of two, or of one."""
        return self(aten.view.default, x, [BATCH, -1, 2 - x.tensor.shape[1] % 2])


# From [B, F, D] to another such value, each one rewrite.
STEPS: dict[str, Callable[[Run, Value], Value]] = {}


def step(make: Callable[[Run, Value], Value]) -> Callable[[Run, Value], Value]:
    STEPS[make.__name__] = make
    return make


@step
def layer(run: Run, x: Value) -> Value:
    return run(aten.relu.default, run.linear(x, 3))


@step
def field_compression(run: Run, x: Value) -> Value:
    turned = run(aten.transpose.int, x, 1, 2)
    return run(aten.transpose.int, run.linear(turned, 2), 1, 2)


@step
def gates(run: Run, x: Value) -> Value:
    x = run.flat(x)
    vector = run.weight(x.tensor.shape[1])
    return run.rows(run.linear(run(aten.add.Tensor, run(aten.mul.Tensor, x, vector), 0.5), 4))


@step
def norm(run: Run, x: Value) -> Value:
    x = run.flat(x)
    k = x.tensor.shape[1]
    y = run(aten.layer_norm.default, x, [k], run.weight(k), run.weight(k))
    return run.rows(run.linear(y, 4))


@step
def root_mean_square(run: Run, x: Value) -> Value:
    x = run.flat(x)
    y = run(aten.rms_norm.default, x, [x.tensor.shape[1]], run.weight(x.tensor.shape[1]), 1e-3)
    return run.rows(run.linear(run(aten.mul.Tensor, y, run.weight(x.tensor.shape[1])), 4))


@step
def factorisation(run: Run, x: Value) -> Value:
    total = run(aten.sum.dim_IntList, x, [1], True)
    squares = run(aten.sum.dim_IntList, run(aten.mul.Tensor, x, x), [1], True)
    return run(aten.sub.Tensor, run(aten.mul.Tensor, total, total), squares)


@step
def dot_products(run: Run, x: Value) -> Value:
    products = run(aten.bmm.default, x, run(aten.transpose.int, x, 1, 2))
    count = x.tensor.shape[1]
    rows, columns = torch.tril_indices(count, count)
    picks = [run.value(Const(i)) for i in (rows, columns)]
    if run.draw.choose.random() < 0.5:
        return run.rows(run(aten.index.Tensor, products, [None, *picks]))
    return run.rows(run.flat(products))


@step
def rows_times_own_product(run: Run, x: Value) -> Value:
    turned = run(aten.permute.default, x, [0, 2, 1])
    mixed = run(aten.matmul.default, turned, run.weight(x.tensor.shape[1], 2))
    return run(aten.bmm.default, x, mixed)


@step
def pairs_in_a_loop(run: Run, x: Value) -> Value:
    fields = run(aten.split.Tensor, x, 1, 1)
    width, w = x.tensor.shape[2], run.weight(x.tensor.shape[2], x.tensor.shape[2])
    some = fields[: max(2, 8 // width)]
    pairs = [(a, b) for i, a in enumerate(some) for b in some[i:]]
    products = [run(aten.mul.Tensor, run(aten.linear.default, a, w), b) for a, b in pairs[:5]]
    return run(aten.cat.default, products, 1)


@step
def cross_of_vectors(run: Run, x: Value) -> Value:
    x0 = x = run.flat(x)
    for _ in range(2):
        gain = run.linear(x, 1)
        gained = run(aten.mul.Tensor, x0, gain)
        x = run(aten.add.Tensor, run(aten.add.Tensor, gained, run.weight(x.tensor.shape[1])), x)
    return run.rows(run.linear(run(aten.cat.default, [x, gain], 1), 4))


@step
def cross_of_matrices(run: Run, x: Value) -> Value:
    x = run.flat(x)
    return run.rows(run(aten.mul.Tensor, x, run.linear(x, x.tensor.shape[1])))


@step
def outer_products(run: Run, x: Value) -> Value:
    count = x.tensor.shape[1]
    outer = run(aten.einsum.default, "bhd,bmd->bhmd", [x, x])
    outer = run(aten.view.default, outer, [BATCH, count * count, x.tensor.shape[2]])
    return run(aten.conv1d.default, outer, run.weight(3, count * count, 1))


@step
def attention_mlp(run: Run, x: Value) -> Value:
    count = x.tensor.shape[1]
    query = run(aten.slice.Tensor, x, 1, count - 1, count)
    rows = min(2, count)
    keys = run(aten.slice.Tensor, x, 1, 0, rows)
    query = run(aten.expand.default, query, [-1, rows, -1])
    features = [query, keys, run(aten.sub.Tensor, query, keys), run(aten.mul.Tensor, query, keys)]
    run.draw.choose.shuffle(features)
    scores = run.linear(
        run(aten.sigmoid.default, run.linear(run(aten.cat.default, features, -1), 2)), 1
    )
    weighted = run(aten.mul.Tensor, scores, keys)
    pooled = run(aten.sum.dim_IntList, weighted, [1], True)
    return run(aten.cat.default, [pooled, query], 1)


@step
def attention(run: Run, x: Value) -> Value:
    last = run(aten.slice.Tensor, x, 1, x.tensor.shape[1] - 1, x.tensor.shape[1])
    scores = run(aten.matmul.default, last, run(aten.transpose.int, x, 1, 2))
    pooled = run(aten.matmul.default, run(aten.tanh.default, scores), x)
    return run(aten.cat.default, [pooled, last], 1)


@step
def causal_attention(run: Run, x: Value) -> Value:
    y = run(aten.unsqueeze.default, x, 1)
    out = run(aten.scaled_dot_product_attention.default, y, y, y, None, 0.0, True)
    return run(aten.add.Tensor, run(aten.squeeze.dim, out, 1), x)


@step
def pools(run: Run, x: Value) -> Value:
    every = [
        run(aten.mean.dim, x, [1]), run(aten.amax.default, x, [1]), run(aten.amin.default, x, [1]),
        run(aten.logsumexp.default, x, [1]), run(aten.max.dim, x, 1)[0],
    ]  # fmt: skip
    return run(aten.stack.default, every, 1)


@step
def experts(run: Run, x: Value) -> Value:
    x = run.flat(x)
    return run(aten.stack.default, [run(aten.relu.default, run.linear(x, 3)) for _ in range(3)], 1)


@step
def best_rows(run: Run, x: Value) -> Value:
    scores = run(aten.sum.dim_IntList, x, [2])
    places = run(aten.topk.default, scores, 1, 1)[1]
    places = run(
        aten.expand.default, run(aten.unsqueeze.default, places, 2), [-1, -1, x.tensor.shape[2]]
    )
    return run(aten.gather.default, x, 1, places)


@step
def elementwise(run: Run, x: Value) -> Value:
    y = run(aten.tanh.default, x)
    return run(aten.cat.default, [y, run(aten.neg.default, x)], 1)


def grown(run: Run, x: Value) -> Value:
    """The value, alone or among features of both sides."""
    d, (_, count, width) = run.draw, x.tensor.shape
    fresh = [run.value(kind(2, width)) for kind in (d.user, d.cand)]
    beside = [run.value(kind(count, 1)) for kind in (d.user, d.cand)]
    choice = d.choose.random()
    if choice < 0.4:
        return run(aten.cat.default, [fresh[0], x, fresh[1]], 1)
    return run(aten.cat.default, [beside[0], x, beside[1]], 2) if choice < 0.6 else x


def composed(name: str, number: int) -> tuple[Run, Value]:
    """The step, among two others."""
    run = Run(f"compositions/{name}/{number}")
    choose = run.draw.choose
    names = [name, *choose.choices(list(STEPS), k=2)]
    choose.shuffle(names)
    x = run.value(run.draw.concat(1, [3], choose.choice([[2, 2], [3, 1], [1, 3]])))
    for each in names:
        x = STEPS[each](run, grown(run, x))
        x = run(aten.slice.Tensor, x, 1, 0, 6)
        x = run(aten.tanh.default, x) if x.tensor.abs().max() > 1e3 else x
    return run, x


@pytest.mark.parametrize("name", STEPS)
def test_compositions_of_three(name: str) -> None:
    for number in range(DRAWS):
        run, x = composed(name, number)
        assert_same(run.walk.materialise(x.form), x.tensor)


# Families of which each rule is reached by some composition, and what needs another operator.
REACHED = ("affine", "crosses", "gains", "indexed", "norms", "pairs", "reduce")
ELSEWHERE = {
    "affine.batch_norm", "affine.divide", "affine.subtract", "gains.outer_gain", "indexed.spelled",
    "reduce.embedding_bag", "reduce.min_and_places",
}  # fmt: skip


def test_compositions_reach_every_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()

    def noted(rule: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = rule(*args, **kwargs)
            if result is not None:
                used.add(name_of(rule))
            return result

        return call

    names = {name_of(rule) for rules in RULES.values() for rule in rules}
    for target, rules in RULES.items():
        monkeypatch.setitem(RULES, target, [noted(rule) for rule in rules])
    for name in STEPS:
        for number in range(DRAWS):
            composed(name, number)
    assert {n for n in names if n.split(".")[0] in REACHED} - used == ELSEWHERE
