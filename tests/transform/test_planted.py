# SPDX-License-Identifier: Apache-2.0
"""One wrong rewrite per rule, planted: the verification catches each."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ikbo
from ikbo.transform import TransformError
from ikbo.transform import forms as f
from ikbo.transform.capture import Captured, capture
from ikbo.transform.forms import (
    Cand,
    Concat,
    Const,
    Merged,
    PerBatch,
    Product,
    Sum,
    User,
)
from ikbo.transform.levels import two_levels
from ikbo.transform.pending import Affine, Cross, Joined, Reordered, Scaled
from ikbo.transform.rowwise_table import TABLE
from ikbo.transform.rules import RULES
from ikbo.transform.split import factor
from ikbo.transform.verify import verify
from tests.transform import field_models  # noqa: F401  (adds to the tables)
from tests.transform.mixed_models import MIXED
from tests.transform.models import MODELS, Ranker, padding, rows
from tests.transform.ranking_models import BLOCKS
from tests.transform.test_rules import find, name_of

aten = torch.ops.aten
LIMITS = (8, 64)


@dataclass(frozen=True)
class Planted:
    """A rule, what is done to its result (or to its call), and a model that the rule rewrites."""

    rule: str
    model: str
    wrong: Callable[..., Any]


class Sink(nn.Module):
    """Calls that the other models do not make."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.bag = nn.EmbeddingBag(20, 4, mode="sum")
        self.register_buffer("picks", torch.tensor([5, 0, 6, 1]))

    def forward(self, ids: Tensor, user: Tensor, grid: Tensor, item: Tensor) -> dict[str, Tensor]:
        b = item.size(0)
        x = torch.cat([user, item], dim=1)
        fields = torch.cat([grid, item.view(-1, 2, 2) * 2], dim=1)
        shared = torch.full((b, 4), 0.5) + torch.zeros(b, 4) + torch.ones(b, 4)
        shared = shared + user.new_zeros(b, 4) + user.new_ones(b, 4) + user.new_full((b, 4), 0.25)
        shared = (
            shared + torch.zeros_like(user) + torch.ones_like(user) + torch.full_like(user, 3.0)
        )
        constant = torch.tile(self.bias[:4], (b, 1)) + self.bias[None, 4:].repeat_interleave(b, 0)
        low, high = torch.split(x, [4, 4], dim=1)
        first, *_ = fields.unbind(1)
        return {
            "addmm": torch.addmm(self.bias, x, self.weight),
            "matmul": x @ self.weight,
            "einsum": torch.einsum("bk,km->bm", x, self.weight),
            "bag": self.bag(ids) + item,
            "shared": torch.cat([shared, user], dim=1) * torch.cat([user, item], dim=1),
            "split": low.exp() - high,
            "slice": x[:, 1:3] - item[:, :2],
            "select": fields[:, 0] * item[:, :2] + first.exp(),
            "stack": torch.stack([user, item], dim=1).flatten(1).tanh(),
            "structure": grid.transpose(1, 2).flatten(1).exp() * item,
            "turned": x.t()[:2].t().exp() * 2.0,
            "silu": functional.silu(functional.linear(x, self.weight, self.bias)),
            "hstack": torch.hstack([user, item]).tanh(),
            "repeat": self.bias[None].repeat(b, 1).view(b, 8)[:, :4] * user + item,
            "squeezed": grid.unsqueeze(1).exp().squeeze(1).sin().unflatten(2, (2, 1)).flatten(1)
            * item,
            "expanded": user[:, None].expand(-1, 2, -1).cos().sum(1) * item,
            "places": torch.arange(b)[:, None] * item,
            "copied": user.clone() + item,
            "picked": x[:, self.picks] + x.index_select(1, self.picks),
            "tiled": constant * user - item,
            "merged": fields.reshape(-1, 2).exp().view(b, -1, 2).sin().mean(1, keepdim=True)
            + item[:, None, :2],
            "averaged": fields.mean(1),
            "sum": fields.sum(1),
        }


def sink() -> Ranker:
    torch.manual_seed(1)
    ids = (torch.arange(16)[:, None] + torch.arange(3)) % 20
    inputs = (ids, rows(4), rows(2, 2), rows(4))
    return Ranker(Sink().eval(), inputs, ("ids", "user", "grid"))


class OneHead(nn.Module):
    def forward(self, keys: Tensor, mask: Tensor, item: Tensor) -> Tensor:
        low = torch.where(mask, 0.0, float("-inf"))[:, None, None, :]
        full = functional.scaled_dot_product_attention(
            item[:, None, None], keys[:, None], keys[:, None], low
        )
        return full[:, 0, 0]


def one_head() -> Ranker:
    torch.manual_seed(2)
    return Ranker(OneHead().eval(), (rows(6, 8), padding(), rows(8)), ("keys", "mask"))


@cache
def captured(name: str) -> tuple[Any, Captured]:
    if name in BLOCKS:
        block = BLOCKS[name]()
        return block, capture(block.model, block.inputs, block.users)
    make = {"sink": sink, "one_head": one_head}.get(name) or (MODELS | MIXED)[name]
    ranker = make()
    return ranker, capture(ranker.model, ranker.inputs, ranker.users)


def run(name: str) -> None:
    """Transforms up to the export and verifies."""
    ranker, graph = captured(name)
    factored, _, _ = factor(graph, LIMITS)
    verify(ranker.model, graph, factored, two_levels(graph.flat_roles, LIMITS))


# What is done to a result


def after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Changes what a rule returns, where the rule applies."""

    def wrap(rule: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(walk: Any, *args: Any, **kwargs: Any) -> Any:
            result = rule(walk, *args, **kwargs)
            return None if result is None else change(result)

        return wrong

    return wrap


def before(change: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Changes the arguments that a rule is called with."""

    def wrap(rule: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(walk: Any, *args: Any, **kwargs: Any) -> Any:
            return rule(walk, *change(*args), **kwargs)

        return wrong

    return wrap


def other_users(form: Any) -> Any:
    """Every user gets another user's row."""
    if isinstance(form, tuple):
        return tuple(other_users(x) for x in form)
    if isinstance(form, User):
        return User(form.tensor.roll(1, form.rows.axis), form.rows)
    if isinstance(form, Concat):
        return replace(form, parts=tuple(other_users(x) for x in form.parts))
    if isinstance(form, Sum):
        user = form.user
        moved = (
            replace(user, x=other_users(user.x)) if isinstance(user, Product) else other_users(user)
        )
        return replace(form, user=moved)
    return form


def doubled(form: Any) -> Any:
    if isinstance(form, Const | User | Cand):
        return replace(
            form,
            tensor=form.tensor * 2,
            **({} if isinstance(form, Const) else {"base": None, "dims": None}),
        )
    if isinstance(form, Concat):
        return replace(form, parts=tuple(doubled(x) for x in form.parts))
    return form


def turned(form: Any) -> Any:
    """The elements of each row in another order."""
    if isinstance(form, Merged):
        return Merged(turned(form.x))
    if isinstance(form, Concat):
        return replace(form, parts=tuple(turned(x) for x in form.parts))
    if not isinstance(form, User | Cand) or form.tensor.ndim < 2:
        return form
    axes = [a for a in range(form.tensor.ndim) if a != form.rows.axis]
    return type(form)(form.tensor.flip(axes), form.rows)


def without_bias(form: Sum) -> Sum:
    return replace(form, user=replace(form.user, bias=None))


def half_normed(results: Any) -> Any:
    form = results[0]
    wrong = replace(form, scale=None) if isinstance(form, Affine) else without_bias(form)
    return (wrong, *results[1:])


def transposed_weight(a: Any, b: Any) -> tuple[Any, Any]:
    return (a, Const(b.tensor.t())) if isinstance(b, Const) else (a, b)


def without_summand(_: Any) -> Any:
    return lambda walk, c, a, b: walk.apply(aten.mm.default, a, b)


def number(value: Any, change: Callable[[float], float]) -> Any:
    return change(value) if isinstance(value, float) else value


def next_range(
    x: Any, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> tuple[Any, ...]:
    is_inner = dim == 1 and start == 1
    return x, dim, start + is_inner, end + is_inner, step


def swapped_parts(form: Any) -> Any:
    """Parts of equal shape change places."""
    widths = {f.width(part, form.axis) for part in form.parts}
    return replace(form, parts=form.parts[::-1]) if len(widths) == 1 else form


def rolled(form: Const) -> Const:
    return replace(form, tensor=form.tensor.roll(1))


def unseen(form: Any) -> Any:
    """Nobody is said to see a candidate's key."""
    return replace(form, dead=torch.ones_like(form.dead)) if isinstance(form, Cand) else form


def inverted_keep(form: User) -> User:
    return replace(form, keep=replace(form.keep, tensor=~form.keep.tensor))


def later(form: PerBatch) -> PerBatch:
    return PerBatch(lambda n: form.make(n) + 1)


def negated_user(form: Sum) -> Sum:
    user = form.user
    if isinstance(user, User):
        return replace(form, user=User(-user.tensor, user.rows))
    return form


def added(form: Sum) -> Sum:
    """The sum instead of the difference."""
    terms = {"user": form.user, "cand": form.cand}
    return replace(form, **{side: t.minus or t for side, t in terms.items()})


def of_other_users(form: Cross) -> Cross:
    return replace(form, user=other_users(form.user))


def first_part_twice(form: Joined) -> Joined:
    return replace(form, parts=(form.parts[0], form.parts[0], *form.parts[2:]))


def without_gain(form: Scaled) -> Scaled:
    return replace(form, gain=Cand(torch.ones_like(form.gain.tensor), form.rows))


def turned_order(form: Reordered) -> Reordered:
    return replace(form, order=form.order[::-1])


def other_places(forms: tuple[Any, Any]) -> tuple[Any, Any]:
    return forms[0], Cand(forms[1].tensor + 1, forms[1].rows)


def doubled_first(forms: tuple[Any, Any]) -> tuple[Any, Any]:
    return doubled(forms[0]), forms[1]


VECTORS, NORMS = "A9-cross_network_of_vectors", "A4-norms_before_layers"
ROWS_OF_A_HISTORY = "A12-attention_mlp_of_many_rows"
POOLING = "A13-pooling_in_three_spellings"

PLANTED = [
    Planted("linear.linear", "mlp", after(without_bias)),
    Planted("linear.linear", "tokens", after(other_users)),
    Planted("linear.matmul", "sink", before(transposed_weight)),
    Planted("linear.addmm", "sink", without_summand),
    Planted("linear.einsum", "sink", before(lambda e, x: (e.replace("km", "mk"), x))),
    Planted("linear.conv", "lce", before(lambda x, w, b=None, *o: (x, w, None, *o))),
    Planted("linear.activate_relu", "mlp", after(doubled)),
    Planted("linear.activate_gelu", "norms", after(doubled)),
    Planted("linear.activate_sigmoid", "norms", after(doubled)),
    Planted("linear.activate_silu", "sink", after(doubled)),
    Planted("affine.batch_norm", "norms", after(half_normed)),
    Planted("affine.scale", "norms", after(lambda x: replace(x, scale=None))),
    Planted("affine.divide", "norms", before(lambda x, y: (x, number(y, lambda n: 1 / n)))),
    Planted("affine.shift", "norms", before(lambda x, y: (x, number(y, operator.neg)))),
    Planted("affine.subtract", "norms", before(lambda x, y: (x, number(y, operator.neg)))),
    Planted("affine.add", "gates", after(negated_user)),
    Planted("attention.sdpa", "attention", before(lambda q, k, v, *_: (q, k, v))),
    Planted("attention.additive_mask", "attention", after(inverted_keep)),
    Planted("attention.additive_where", "one_head", after(inverted_keep)),
    Planted("masked.joint_mask", "causal_attention_with_padding", after(unseen)),
    Planted("masked.masked_sdpa", "causal_mask", after(other_users)),
    Planted("masked.joint_sdpa", "causal_mask", before(lambda q, k, v, *m: (q, v, k, *m))),
    Planted(
        "chains.scores", "causal_pointwise_attention", before(lambda q, k: (other_users(q), k))
    ),
    Planted(
        "chains.biased_scores",
        "causal_attention_with_weights",
        before(lambda c, q, k: (c, other_users(q), k)),
    ),
    Planted("chains.spelled_product", "causal_pointwise_attention", after(other_users)),
    Planted("chains.attended", "causal_attention_with_weights", after(other_users)),
    Planted("linear.tensordot", VECTORS, after(doubled)),
    Planted("gains.gain", "A9-cross_network_of_linear_layers", after(without_gain)),
    Planted("gains.outer_gain", VECTORS, after(without_gain)),
    Planted("gains.scale", "A4-norm_spelled_out", after(without_gain)),
    Planted("gains.add", VECTORS, after(lambda x: replace(x, shift=None))),
    Planted("gains.linear", VECTORS, after(doubled)),
    Planted("gains.rms_norm", NORMS, after(without_gain)),
    Planted("norms.layer_norm", NORMS, after(lambda x: replace(x, eps=1.0))),
    Planted("norms.linear", NORMS, before(lambda x, w, b=None: (x, w, None))),
    Planted("pairs.dots", "A6-dot_interaction", after(turned_order)),
    Planted("structural.cat_reordered", "A6-dot_interaction", after(turned_order)),
    Planted("pairs.all_pairs", "A6-inner_products_of_pairs", after(turned_order)),
    Planted("pairs.outer", "A11-compressed_interaction", before(lambda x, y: (x, doubled(y)))),
    Planted(
        "pairs.spelled_outer",
        "A11-compressed_interaction",
        before(lambda e, x: (e, [x[0], doubled(x[1])])),
    ),
    Planted("indexed.product_of_rows", "A7-factorisation_block", after(doubled)),
    Planted("indexed.product_over_rows", "A13-attention_over_both_sides", after(doubled)),
    *[
        Planted(f"reduce.{name}_", "A19-pools_over_both_sides", after(doubled))
        for name in ("amax", "amin", "logsumexp")
    ],
    Planted("reduce.max_and_places", "A19-pools_over_both_sides", after(other_places)),
    Planted("reduce.min_and_places", "A19-pools_over_both_sides", after(doubled_first)),
    Planted("picks.gather", "A21-search_in_a_long_history", after(doubled)),
    Planted("dead_rows.attention", "A16-last_row_of_an_encoder", after(doubled)),
    Planted("dead_rows.product", "A16-last_row_of_spelled_attention", after(doubled)),
    Planted(
        "dead_rows.masked_product",
        "A16-last_row_of_padded_multihead_attention_with_weights",
        after(doubled),
    ),
    Planted("affine.difference", ROWS_OF_A_HISTORY, after(added)),
    Planted("crosses.cross", ROWS_OF_A_HISTORY, after(of_other_users)),
    Planted("crosses.contract", POOLING, after(doubled)),
    Planted("crosses.cat", ROWS_OF_A_HISTORY, after(first_part_twice)),
    Planted("crosses.linear", ROWS_OF_A_HISTORY, before(lambda x, w, b=None: (x, w, None))),
    Planted("indexed.product", POOLING, after(doubled)),
    Planted("indexed.spelled", POOLING, after(doubled)),
    Planted("reduce.sum_", "sink", after(other_users)),
    Planted("reduce.mean", "sink", after(other_users)),
    Planted("reduce.embedding_bag", "sink", after(lambda x: (other_users(x[0]), None, None, None))),
    Planted("picks.index", "sink", before(lambda x, i: (x, [*i[:-1], rolled(i[-1])]))),
    Planted("picks.index_select", "sink", before(lambda x, d, i: (x, d, rolled(i)))),
    Planted("structural.tile", "sink", after(doubled)),
    Planted("structural.repeat_interleave", "sink", after(doubled)),
    Planted("slicing.slice_", "sink", before(next_range)),
    Planted("slicing.select", "sink", before(lambda x, d, i: (x, d, i - 1))),
    Planted("slicing.split", "sink", after(lambda x: x[::-1])),
    Planted("slicing.unbind", "sink", after(lambda x: x[::-1])),
    *[
        Planted(f"slicing.{name}", "sink", after(doubled))
        for name in ("full", "ones", "new_ones", "new_full", "ones_like", "full_like")
    ],
    *[
        Planted(f"slicing.{name}", "sink", after(lambda x: replace(x, tensor=x.tensor + 1)))
        for name in ("zeros", "new_zeros", "zeros_like")
    ],
    Planted("slicing.arange", "coupled", after(later)),
    Planted("structural.cat", "sink", after(swapped_parts)),
    Planted("structural.hstack", "sink", before(lambda x: (x[::-1],))),
    Planted("structural.stack", "sink", before(lambda x, d=0: (x[::-1], d))),
    Planted("structural.identity", "sink", after(doubled)),
    Planted("structural.repeat", "sink", after(doubled)),
    *[
        Planted(f"structural.{name}", "sink", after(turned))
        for name in ("permute", "transpose", "t", "expand")
    ],
    *[
        Planted(f"reshape.{name}", "sink", after(turned))
        for name in ("unsqueeze", "squeeze", "view")
    ],
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({case.model for case in PLANTED}))
def test_nothing_is_wrong_without_them(name: str) -> None:
    run(name)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case.rule}-{case.model}")
def test_planted_rule_is_caught(case: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, rules in RULES.items():
        wrong = [case.wrong(rule) if name_of(rule) == case.rule else rule for rule in rules]
        monkeypatch.setitem(RULES, target, wrong)
    with pytest.raises(TransformError, match="differs from the unmodified model"):
        run(case.model)


def test_every_rule_is_planted() -> None:
    registered = {name_of(rule) for rules in RULES.values() for rule in rules}
    assert {case.rule for case in PLANTED} == registered


@pytest.mark.parametrize("op", [aten.softmax.int, aten.cumsum.default, aten.mean.dim])
def test_planted_row_wise_claim_is_caught(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, op, lambda x, *args, **kwargs: x.axis)
    if op is aten.mean.dim:
        monkeypatch.setitem(TABLE, op, lambda x, dim, keepdim=False: x.axis if keepdim else None)
    with pytest.raises(TransformError):
        run("coupled")


def test_transform_itself_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = find("linear.linear", aten.linear.default)
    monkeypatch.setitem(RULES, aten.linear.default, [after(without_bias)(rule)])
    ranker = MODELS["mlp"]()
    with pytest.raises(TransformError, match="the output at U=1, B=1"):
        ikbo.transform(ranker.model, ranker.inputs, ["user"], max_users=8, max_candidates=64)
