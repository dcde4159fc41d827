# SPDX-License-Identifier: Apache-2.0
"""The packed weights of `ikbo.nn`: same results, plain state dicts, never an outdated weight."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ikbo import CandidateIndex, nn

INDEX = CandidateIndex.from_cand_to_user([2, 0, 2, 1, 0, 2, 0])
E_CAND = torch.randn(7, 6, 8, generator=torch.Generator().manual_seed(0))
E_USER = torch.randn(3, 5, 8)
INPUTS: dict[str, tuple[Any, ...]] = {
    "linear": (torch.randn(3, 5), E_CAND[:, 0, :6], INDEX),
    "compression": (E_USER, E_CAND, INDEX),
    "parts": (E_USER, [E_CAND[:, :2], E_CAND[:, 2:]], INDEX),
}
Model = nn.Linear | nn.LinearCompression


def make(kind: str) -> Model:
    if kind == "linear":
        return nn.Linear(5, 6, 4, activation="gelu").eval()
    return nn.LinearCompression(5, 6, 4).eval()


def prepack(module: Model, kind: str) -> Model:
    if isinstance(module, nn.LinearCompression) and kind == "parts":
        return module.prepack([2, 4])
    return module.prepack()


@pytest.fixture(params=INPUTS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def module(kind: str) -> Model:
    torch.manual_seed(1)
    return prepack(make(kind), kind)


def plain_result(module: Model, kind: str) -> Tensor:
    """What a module with the same weights computes without packing."""
    plain = make(kind).to(module.weight.dtype)
    plain.load_state_dict(module.state_dict())
    return plain(*INPUTS[kind])


@torch.no_grad()
def test_results_are_the_same(module: Model, kind: str) -> None:
    torch.testing.assert_close(module(*INPUTS[kind]), plain_result(module, kind))


@torch.no_grad()
def test_the_packed_weight_is_used(module: Model, kind: str) -> None:
    assert module.w_cand_packed is not None
    module.w_cand_packed.zero_()
    with pytest.raises(RuntimeError, match="w_cand_packed must be packed for"):
        module(*INPUTS[kind])


def test_a_list_gives_what_its_concatenation_gives() -> None:
    module = nn.LinearCompression(5, 6, 4)
    whole, parts = module(*INPUTS["compression"]), module(*INPUTS["parts"])
    torch.testing.assert_close(whole, parts)


def test_state_dict_has_the_plain_names(module: Model, kind: str) -> None:
    assert list(module.state_dict()) == ["weight", "bias"]
    plain = torch.nn.Linear(11, 4)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight, module.weight)


def step(module: Model, kind: str) -> None:
    module(*INPUTS[kind]).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def in_training(module: Model, kind: str) -> None:
    module.train()
    step(module, kind)
    module.eval()


def load(module: Model, kind: str) -> None:
    module.load_state_dict(make(kind).state_dict())


def assign(module: Model, kind: str) -> None:
    module.load_state_dict(make(kind).state_dict(), assign=True)


def replace(module: Model, kind: str) -> None:
    module.weight = torch.nn.Parameter(torch.randn(4, 11))


@pytest.mark.parametrize("change", [step, in_training, load, assign, replace])
def test_a_changed_weight_is_seen(
    module: Model, kind: str, change: Callable[[Model, str], None]
) -> None:
    with torch.no_grad():
        before = module(*INPUTS[kind])
    change(module, kind)
    with torch.no_grad():
        after = module(*INPUTS[kind])
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, plain_result(module, kind))


def test_training_drops_it(module: Model, kind: str) -> None:
    module.train()
    assert module.w_cand_packed is None


def test_gradients_are_those_of_the_plain_weight(module: Model, kind: str) -> None:
    plain = make(kind)
    plain.load_state_dict(module.state_dict())
    for this in (module, plain):
        this(*INPUTS[kind]).square().sum().backward()
    assert plain.weight.grad is not None
    assert torch.equal(module.weight.grad, plain.weight.grad)


@torch.no_grad()
def test_another_dtype_packs_again(module: Model, kind: str) -> None:
    module.double()
    user, cand, index = INPUTS[kind]
    wide = [part.double() for part in cand] if kind == "parts" else cand.double()
    result = module(user.double(), wide, index)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.float(), plain_result(module.float(), kind))


def test_moving_packs_for_the_device(module: Model, kind: str) -> None:
    on_cpu = module.w_cand_packed
    assert on_cpu is not None
    moved = module.to("meta").w_cand_packed
    assert moved is not None
    assert moved.device.type == "meta"
    assert moved.shape != on_cpu.shape


@torch.no_grad()
@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies_work(module: Model, kind: str, duplicate: str) -> None:
    if duplicate == "deepcopy":
        twin = copy.deepcopy(module)
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(*INPUTS[kind]), module(*INPUTS[kind]))
    twin.weight.add_(1)
    assert not torch.allclose(twin(*INPUTS[kind]), module(*INPUTS[kind]))


class _ByTensors(torch.nn.Module):
    """The module on what an exported program takes."""

    def __init__(self, module: Model, kind: str) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, user: Tensor, cand: Tensor, cand_to_user: Tensor) -> Tensor:
        if self.kind == "parts":
            return self.module(user, [cand[:, :2], cand[:, 2:]], cand_to_user)
        return self.module(user, cand, cand_to_user)


def by_tensors(kind: str) -> tuple[Tensor, ...]:
    user, cand, index = INPUTS[kind]
    return user, E_CAND if kind == "parts" else cand, index.cand_to_user


@torch.no_grad()
def test_export_keeps_the_packed_weight(module: Model, kind: str) -> None:
    users, candidates = torch.export.Dim("U", max=64), torch.export.Dim("B", max=4096)
    program = torch.export.export(
        _ByTensors(module, kind),
        by_tensors(kind),
        dynamic_shapes=({0: users}, {0: candidates}, {0: candidates}),
    )
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    name = "linear" if kind == "linear" else "lce"
    assert getattr(torch.ops.ikbo, name).prepacked in called
    result = program.module()(*by_tensors(kind))
    torch.testing.assert_close(result, plain_result(module, kind))


@torch.no_grad()
def test_compile_uses_the_packed_weight(module: Model, kind: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_ByTensors(module, kind), backend="aot_eager", fullgraph=True)
    want = plain_result(module, kind)
    torch.testing.assert_close(compiled(*by_tensors(kind)), want)
    load(module, kind)
    after = plain_result(module, kind)
    assert not torch.allclose(after, want)
    torch.testing.assert_close(compiled(*by_tensors(kind)), after)
