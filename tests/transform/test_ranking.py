# SPDX-License-Identifier: Apache-2.0
"""Every rewrite on blocks of public models: where the work goes, near misses, results in fp64."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ikbo
from ikbo._torch_warnings import quiet
from ikbo.transform.capture import Captured, capture
from ikbo.transform.cost import COUNTER_FORMULAS
from ikbo.transform.forms import Merged, Sum, User
from ikbo.transform.interpret import FactoredModel
from ikbo.transform.pending import Reordered
from ikbo.transform.split import factor
from tests.transform import field_models  # noqa: F401  (adds to the tables)
from tests.transform.random_forms import assert_same
from tests.transform.ranking_models import BLOCKS, NEAR_MISSES, Block

LIMITS = (16, 1200)
# One of each kind of pending value: an export takes longer than all else here.
EXPORTED = ("A12-attention_mlp_of_merged_rows",)


class Made:
    """A block, its graph, and the walked model that stands for the transformed one."""

    def __init__(self, name: str) -> None:
        self.block: Block = (BLOCKS | NEAR_MISSES)[name]()
        with quiet():
            self.captured: Captured = capture(self.block.model, self.block.inputs, self.block.users)
            self.factored: FactoredModel
            self.factored, self.flat, self.index = factor(self.captured, LIMITS)

    def run(self, num_users: int, index: Tensor, *, transformed: bool) -> Any:
        """The results of the walked or of the unmodified model, on rows of the example inputs."""
        at_users, at_candidates = [], []
        for x, role in zip(self.captured.flat, self.captured.flat_roles, strict=True):
            rows = torch.arange(num_users if role == "user" else len(index)) * 7 % len(x)
            at_users.append(x[rows])
            at_candidates.append(x[rows][index.long()] if role == "user" else x[rows])
        with quiet(), torch.no_grad():
            if transformed:
                args, kwargs = self.captured.nest(at_users)
                return self.factored(*args, **kwargs, cand_to_user=index)
            args, kwargs = self.captured.nest_joined(at_candidates)
            return self.block.model(*args, **kwargs)


made = cache(Made)


def index_of(ratio: int) -> Tensor:
    """Shuffled and uneven: the first users have most candidates, the last of several none."""
    counts = torch.tensor([2 * ratio, ratio, max(1, ratio // 2), 1, 0], dtype=torch.int64)
    index = torch.arange(5).repeat_interleave(counts)
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(1))].int()


@pytest.mark.parametrize("ratio", [1, 3, 70])
@pytest.mark.parametrize("name", BLOCKS | NEAR_MISSES)
def test_results(name: str, ratio: int) -> None:
    for num_users, index in ((5, index_of(ratio)), (1, torch.zeros(ratio, dtype=torch.int32))):
        got, want = (made(name).run(num_users, index, transformed=t) for t in (True, False))
        pytree.tree_map(assert_same, got, want)


@pytest.fixture(autouse=True)
def _counted_attention() -> Iterator[None]:
    """The fused operator of `nn.MultiheadAttention` has no formula of FLOPs."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def flops_per_candidate(name: str, *, transformed: bool) -> float:
    totals = []
    for num_candidates in (10, 30):
        index = torch.zeros(num_candidates, dtype=torch.int32)
        with FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS) as counter:
            made(name).run(1, index, transformed=transformed)
        totals.append(counter.get_total_flops())
    return (totals[1] - totals[0]) / 20


def _holds_user(form: Any) -> bool:
    """Whether a value, or a part of it, is computed for users alone."""
    if isinstance(form, tuple):
        return any(map(_holds_user, form))
    if isinstance(form, Sum):
        return True
    if isinstance(form, Merged | Reordered):
        return _holds_user(form.x)
    return isinstance(form, User) or any(map(_holds_user, getattr(form, "parts", ())))


@pytest.mark.parametrize("name", BLOCKS)
def test_where_the_work_goes(name: str) -> None:
    it = made(name)
    assert flops_per_candidate(name, transformed=True) == it.block.flops
    assert flops_per_candidate(name, transformed=False) >= it.block.flops
    with quiet(), torch.no_grad():
        values = it.factored.walk(it.flat, it.index).values
    for op in it.block.at_users:
        found = [form for node, form in values.items() if str(node.target) == op]
        assert any(map(_holds_user, found)), f"{op}: {found}"


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_left_alone(name: str) -> None:
    for transformed in (True, False) if not made(name).block.at_users else (True,):
        assert flops_per_candidate(name, transformed=transformed) == made(name).block.flops


class _Calls(TorchDispatchMode):
    """The shapes of the user weights of each `ikbo::linear` and `ikbo::lce`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.ikbo.linear.default, torch.ops.ikbo.lce.default):
            self.weights.append(list(args[2].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("mixture_of_experts", [[3 * 5, 6], [2 * 3, 6]]),
        ("compressions_of_the_same_fields", [[3 + 3 + 5, 4]]),
    ],
)
def test_layers_over_the_same_features_are_one_product(name: str, weights: list[list[int]]) -> None:
    with _Calls() as calls:
        made(f"A20-{name}").run(1, torch.zeros(3, dtype=torch.int32), transformed=True)
    assert calls.weights == weights


@pytest.mark.parametrize("name", EXPORTED)
def test_program(name: str) -> None:
    """The whole transformation, its program verified; its spec has the same figure."""
    block = BLOCKS[name]()
    spec = ikbo.explain(block.model, block.inputs, block.users, max_users=8, max_candidates=128)
    left = spec.total("flops_after", 1, 101) - spec.total("flops_after", 1, 1)
    assert left == 100 * block.flops
