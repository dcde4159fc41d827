# SPDX-License-Identifier: Apache-2.0
"""Calls of a transformed module: which form runs, however the inputs and results are nested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import ikbo
from ikbo.transform import TransformedModule
from tests.transform.test_cost_model import COSTS

# Both forms have a part of the range.
CHEAP = replace(COSTS, own_op_us=8.0)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Score(nn.Module):
    """A layer over the user's 512 features and the item's 64; counts its calls."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result, self.calls = result, 0
        self.layer = nn.Linear(512 + 64, 256)

    def score(self, user: Tensor, item: Tensor) -> Any:
        self.calls += 1
        return self.result(self.layer(torch.cat([user, item], dim=1)))


class Flat(Score):
    def forward(self, user: Tensor, item: Tensor) -> Any:
        return self.score(user, item)


class Nested(Score):
    def forward(self, given: Any) -> Any:
        user, item = sorted(
            (x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)),
            key=lambda x: -x.shape[1],
        )
        return self.score(user, item)


@dataclass(frozen=True)
class Nest:
    """How a model takes its two tensors and returns its result."""

    kind: type[Score]
    inputs: Callable[[Tensor, Tensor], Any]
    user: str
    result: Callable[[Tensor], Any]


NESTS = {
    "positional": Nest(Flat, lambda u, i: (u, i), "user", lambda x: x),
    "keyword": Nest(Flat, lambda u, i: {"user": u, "item": i}, "user", lambda x: [x]),
    "dict": Nest(
        Nested, lambda u, i: ({"item": i, "user": {"x": u}, "n": 3},), "user.x",
        lambda x: {"a": x[:, :9], "rest": [x[:, 9:]]},
    ),
    "list": Nest(Nested, lambda u, i: ([i, (u, 2.0)],), "1.0", lambda x: (x[:, :9], x[:, 9:])),
    "named tuple": Nest(
        Nested, lambda u, i: (Pair(u, i),), "first", lambda x: Pair(x[:, :9], x[:, 9:])
    ),
}  # fmt: skip


def random(*sizes: int, **options: Any) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, **options)


@cache
def made(nest: str) -> tuple[Score, TransformedModule]:
    torch.manual_seed(0)
    model = NESTS[nest].kind(NESTS[nest].result).double().eval()
    inputs = NESTS[nest].inputs(random(16, 512), random(16, 64))
    return model, ikbo.transform(
        model, inputs, [NESTS[nest].user], max_users=8, max_candidates=512, device_costs=CHEAP
    )


def called(module: nn.Module, nest: str, user: Tensor, item: Tensor, **index: Tensor) -> Any:
    inputs = NESTS[nest].inputs(user, item)
    return module(**inputs, **index) if isinstance(inputs, dict) else module(*inputs, **index)


def index_of(num_users: int, num_candidates: int) -> Tensor:
    return torch.arange(num_candidates, dtype=torch.int32).flip(0) % num_users


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("grad", [False, True])
def test_form_and_result(nest: str, grad: bool) -> None:
    model, fast = made(nest)
    table = dict(fast.spec.pays_from["eager"])
    assert len(table) > 1 and all(1 < least <= 512 for least in table.values())
    for users, least in table.items():
        for candidates, calls in ((least - 1, 1), (least, 0)):
            user, item = random(users, 512), random(candidates, 64)
            index = index_of(users, candidates)
            with torch.set_grad_enabled(grad):
                expected = called(model, nest, user[index], item)
                before = model.calls
                got = called(fast, nest, user, item, cand_to_user=index)
            assert model.calls - before == calls
            torch.testing.assert_close(got, expected)
            assert type(got) is type(expected)


@pytest.mark.parametrize("nest", NESTS)
def test_refused_whichever_form_would_run(nest: str) -> None:
    _, fast = made(nest)
    most = max(least for _, least in fast.spec.pays_from["eager"])
    for candidates in (2, most):
        user, item, index = random(2, 512), random(candidates, 64), index_of(2, candidates)
        for wrong, error in (
            ((user.float(), item, index), ValueError),
            ((user[:, 1:], item, index), ValueError),
            ((user[0], item, index), ValueError),
            ((user, item, index.long()), ValueError),
            ((user, item, index[1:]), ValueError),
            ((user, item[:, None], index), ValueError),
            ((random(9, 512), item, index), ValueError),
            ((user, item, index.to("meta")), ValueError),
            ((user, None, index), TypeError),
            ((user.numpy(), item, index), TypeError),
        ):
            with pytest.raises(error, match="ikbo: a transformed module"):
                called(fast, nest, *wrong[:2], cand_to_user=wrong[2])
        with pytest.raises(TypeError, match="ikbo: a transformed module"):
            called(fast, nest, user, item)
        with pytest.raises(TypeError, match="ikbo: a transformed module"):
            called(fast, nest, user, item, cand_to_user=index, more=index)


def test_what_is_no_tensor_must_be_as_it_was() -> None:
    _, fast = made("dict")
    for number in (4, torch.tensor(3)):
        given = {"item": random(4, 64), "user": {"x": random(1, 512)}, "n": number}
        with pytest.raises(ValueError, match="what is no tensor must be as in the example"):
            fast(given, cand_to_user=index_of(1, 4))


def test_gradients_only_where_they_are_on() -> None:
    model, fast = made("positional")
    user, item = random(2, 512, requires_grad=True), random(400, 64)
    index = index_of(2, 400)
    fast(user, item, cand_to_user=index).sum().backward()
    expected = torch.autograd.grad(model(user[index], item).sum(), user)[0]
    torch.testing.assert_close(user.grad, expected)
    with torch.no_grad():
        out = fast(user, item, cand_to_user=index)
        assert not out.requires_grad and not out.is_inference()
        # A tangent is refused, not lost: no_grad does not turn forward mode off.
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
            fast(forward_ad.make_dual(user, user), item, cand_to_user=index)
