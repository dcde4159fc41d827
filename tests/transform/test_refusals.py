# SPDX-License-Identifier: Apache-2.0
"""What is refused, and that the text says what, where and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import ikbo
from ikbo.transform import TransformedModule, TransformError
from ikbo.transform.capture import capture
from ikbo.transform.levels import two_levels
from ikbo.transform.split import factor
from ikbo.transform.verify import verify
from tests.transform.models import MODELS, rows


class Call(nn.Module):
    """A model that is one function of a user and an item input."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, user: Tensor, item: Tensor) -> Any:
        return self.function(user, item, *self.parts)


def transform(model: nn.Module, inputs: Any = None, users: Any = ("user",), **options: Any) -> Any:
    inputs = (rows(4), rows(4)) if inputs is None else inputs
    return ikbo.transform(model, inputs, users, max_users=8, max_candidates=64, **options)


def write_to_user(user: Tensor, item: Tensor) -> Tensor:
    user.mul_(2)
    return user + item


def branch(user: Tensor, item: Tensor) -> Tensor:
    return torch.cond(item.sum() > 0, lambda x: x + 1, lambda x: x - 1, (user + item,))


def branch_in_python(user: Tensor, item: Tensor) -> Tensor:
    return user + item if item.sum() > 0 else user - item


class Counts(nn.Module):
    """Keeps state in buffers, written in place or replaced."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        if self.in_place:
            self.seen += user.detach().sum(0)
        else:
            self.seen = self.seen + user.detach().sum(0)
        return (user - self.seen) * item


REFUSED = {
    "dropout in training": (
        Call(lambda u, i: functional.dropout(u, 0.5, training=True) + i),
        "draws random numbers.*model.eval.*test_refusals.py:",
    ),
    "random numbers": (Call(lambda u, i: torch.rand_like(u) + i), "draws random numbers"),
    "batch norm in training": (
        Call(lambda u, i, norm: norm(u) + i, nn.BatchNorm1d(4)),
        r"writes to its buffer 'parts.0\..*model.eval\(\)",
    ),
    "noise": (Call(lambda u, i: u + i * torch.bernoulli(torch.sigmoid(i))), "draws random numbers"),
    "a random order": (Call(lambda u, i: u[torch.randperm(u.size(0))] + i), "ikbo.transform"),
    "a buffer updated in place": (Counts(True), "writes to its buffer 'seen'"),
    "a buffer replaced": (Counts(False), "ikbo.transform"),
    "in-place update of an input": (Call(write_to_user), "writes to its input 'user'"),
    "in-place update of a view of an input": (
        Call(lambda u, i: u[:, :2].add_(1).sum(1) + i.sum(1)),
        "writes to its input 'user'",
    ),
    "control flow": (Call(branch), "conditionally or in a loop"),
    "control flow in Python": (
        Call(branch_in_python),
        "could not capture the model.*data-dependent",
    ),
    "a size out of a tensor": (
        Call(lambda u, i: u + i + i[i > 0].sum()),
        "a size that depends on the values of a tensor.*test_refusals.py:",
    ),
    "a number out of a tensor": (Call(lambda u, i: u * i.sum().item()), "ikbo.transform"),
}


# Rows of the batch meet: computed on repeated rows, as the unmodified model does, and said so.
COUPLED = {
    "softmax": lambda u, i: functional.softmax(u, dim=0) * i,
    "log_softmax": lambda u, i: torch.log_softmax(u, dim=0) * i,
    "topk": lambda u, i: torch.topk(u, 1, dim=0).values * i,
    "sort": lambda u, i: torch.sort(u, dim=0).values * i,
    "cumsum": lambda u, i: torch.cumsum(u, dim=0) * i,
    "cummax": lambda u, i: torch.cummax(u, dim=0).values * i,
    "mean": lambda u, i: i - u.mean(dim=0, keepdim=True),
    "var": lambda u, i: i / (u.var(dim=0, keepdim=True) + 1),
    "norm": lambda u, i: i * torch.linalg.vector_norm(u, dim=0, keepdim=True),
    "amax": lambda u, i: i - u.amax(dim=0, keepdim=True),
    "everything": lambda u, i: i * u.sum(),
    "flip": lambda u, i: u.flip(0) * i,
    "roll": lambda u, i: u.roll(1, 0) * i,
    "product": lambda u, i: (u @ u.t()).softmax(-1) @ i,
    "statistics of both": lambda u, i: (x := torch.cat([u, i], 1)) - x.mean(0, keepdim=True),
    "batch norm without running statistics": lambda u, i: (
        functional.batch_norm(u, None, None, training=True) + i
    ),
    "norm by hand": lambda u, i: (x := u * i) / x.std(dim=0, keepdim=True).clamp(min=0.5),
}


@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_meet_stay_together(name: str) -> None:
    model = Call(COUPLED[name]).eval()
    captured = capture(model, (rows(4), rows(4)), ["user"])
    factored, _, _ = factor(captured, (8, 64))
    verify(model, captured, factored, two_levels(captured.flat_roles, (8, 64)))
    assert factored.broadcasts or name == "norm by hand"


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused(name: str) -> None:
    model, text = REFUSED[name]
    with pytest.raises(TransformError, match=f"(?s){text}"):
        transform(model)


@pytest.mark.parametrize(
    ("users", "text"),
    [
        ((), "at least one input name"),
        ("user", "must be a list"),
        (["users"], r"'users', which is no input.*\['user', 'item'\]"),
        (["user", "item"], r"leave at least one input to the candidates.*\['user', 'item'\]"),
    ],
)
def test_request_only_is_checked(users: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transform(MODELS["mlp"]().model, (rows(6), rows(4)), users)


def test_a_container_may_not_be_all_inputs() -> None:
    class Nested(nn.Module):
        def forward(self, features: dict[str, dict[str, Tensor]]) -> Tensor:
            return features["all"]["user"] + features["all"]["item"]

    features = {"all": {"user": rows(4), "item": rows(4)}}
    with pytest.raises(ValueError, match=r"it names all: \['all.user', 'all.item'\]"):
        transform(Nested(), {"features": features}, ["all"])


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((rows(4), rows(4)[:3]), "one batch size.*'item': 3"),
        ((rows(4), torch.tensor(1.0)), "'item' must have the batch as its first axis"),
        ((rows(4)[:1].expand(16, 4), rows(4)), "at least 8 distinct user rows.*got 1 in 16 rows"),
        ((rows(4)[:4], rows(4)[:4]), "at least 8 distinct user rows.*got 4"),
        ((rows(4)[:1], rows(4)[:1]), "must have 2 rows or more.*got 1"),
        ((rows(4)[:0], rows(4)[:0]), "must have 2 rows or more.*got 0"),
        ((rows(4), rows(4).to("meta")), "on one device; got.*'item': 'meta'"),
        ((rows(4), rows(4).to_sparse()), "'item' must be dense.*got torch.sparse_coo"),
    ],
)
def test_example_inputs_are_checked(inputs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        transform(Call(lambda u, i: u + i), inputs)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((rows(4).numpy(), rows(4)), "'user' must be a torch.Tensor; got ndarray; convert"),
        ((rows(4), rows(4).numpy()), "'item' must be a torch.Tensor; got ndarray; convert"),
        ((None, rows(4)), "'user' must be a torch.Tensor; got NoneType"),
        (([1.0, 2.0], rows(4)), "'user.0' must be a torch.Tensor; got float"),
        ((rows(4),), r"must fit model.forward: missing.*'item'.*\['user', 'item'\]"),
        ({"user": rows(4), "items": rows(4)}, "must fit model.forward"),
    ],
)
def test_example_inputs_are_tensors_of_the_model(inputs: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        transform(Call(lambda u, i: u + i), inputs)


@pytest.mark.parametrize("limit", [0, -1, True, 2**31, 1.5])
def test_limits_are_checked(limit: Any) -> None:
    ranker = MODELS["mlp"]()
    with pytest.raises(ValueError, match="max_candidates must be an int in"):
        ikbo.transform(ranker.model, ranker.inputs, ["user"], max_candidates=limit)


def test_other_models_and_inputs_are_no_models() -> None:
    with pytest.raises(TypeError, match="nn.Module or an ExportedProgram; got function"):
        transform(lambda user, item: user + item)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"example_inputs must be a tuple.*got Tensor"):
        transform(MODELS["mlp"]().model, rows(6))


def test_an_input_may_not_be_called_like_the_index() -> None:
    inputs = {"user": rows(4), "item": rows(4), "cand_to_user": rows(1)}

    class Named(nn.Module):
        def forward(self, user: Tensor, item: Tensor, cand_to_user: Tensor) -> Tensor:
            return user + item + cand_to_user

    with pytest.raises(ValueError, match="rename the input"):
        transform(Named(), inputs)


def test_a_program_needs_a_free_batch() -> None:
    ranker = MODELS["mlp"]()
    program = torch.export.export(ranker.model, ranker.inputs)
    with pytest.raises(TransformError, match="one dynamic batch size.*one Dim for all"):
        ikbo.transform(program, ranker.inputs, ["user"])


@pytest.fixture(scope="module")
def mlp() -> TransformedModule:
    """Called with user [2, 6] and item [3, 4]."""
    return transform(MODELS["mlp"]().model, (rows(6), rows(4)))


INDEX = torch.zeros(3, dtype=torch.int32)
USER, ITEM = torch.randn(2, 6), torch.randn(3, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((USER[:, :5], ITEM), {}, ValueError, r"user must have sizes \[U, 6\]; got \[2, 5\]"),
        ((USER, ITEM[0]), {}, ValueError, r"item must have sizes \[B, 4\]; got \[4\]"),
        ((USER, ITEM[:2]), {}, ValueError, r"cand_to_user must have B = 2 rows, as item; got 3"),
        ((USER.repeat(5, 1), ITEM), {}, ValueError, r"user must have at most U = 8 rows.*got 10"),
        ((USER.double(), ITEM), {}, ValueError, "user must have dtype torch.float32.*float64"),
        ((USER, ITEM.to("meta")), {}, ValueError, "item must have device cpu.*got meta"),
        ((USER, ITEM.numpy()), {}, TypeError, "item must be a torch.Tensor; got ndarray"),
        ((USER, ITEM), {"cand_to_user": INDEX.long()}, ValueError, "dtype torch.int32.*int64"),
        ((USER, ITEM), {"cand_to_user": None}, TypeError, "cand_to_user must be.*got NoneType"),
        ((USER, ITEM), {"cand_to_user": ikbo.CandidateIndex.from_counts([3])}, TypeError,
         "cand_to_user must be a torch.Tensor; got CandidateIndex; pass its cand_to_user"),
        ((USER,), {"item": ITEM}, TypeError, "with 2 positional arguments and cand_to_user=; got "
         "1 positional argument and cand_to_user=, item="),
        ((USER, [ITEM]), {}, TypeError, "must have the structure"),
        ((USER, ITEM), {"cand_to_user": INDEX + 2}, RuntimeError, r"\[0, U\) with U = 2; got"),
    ],
)  # fmt: skip
def test_calls_are_checked(
    mlp: TransformedModule,
    args: Any,
    kwargs: Any,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        mlp(*args, **({"cand_to_user": INDEX} | kwargs))


def test_model_that_keeps_tensors_is_left_as_it_was() -> None:
    """A trace leaves tensors without data in the attributes that a model sets when it runs."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: Tensor | None = None

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            self.first, self.last = user + item, user - item
            return self.first * self.last

    model = Keeps()
    for _ in range(2):
        transform(model)
        assert not any(isinstance(x, FakeTensor) for x in (model.first, model.last))
