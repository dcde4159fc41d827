# SPDX-License-Identifier: Apache-2.0
"""Whole models: the results, the batch of each operator, the figures of the spec, the graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import ikbo
from ikbo import _inductor
from ikbo._kernels import kernels_at
from ikbo.transform import Spec, TransformedModule
from ikbo.transform.cost import COUNTER_FORMULAS
from tests.transform.models import MODELS, Ranker, rows

USERS, CANDIDATES = 6, 50


class Transformed:
    """A model, what became of it, and one request of several users."""

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker
        self.module: TransformedModule = ikbo.transform(
            ranker.model, ranker.inputs, ranker.users, max_users=8, max_candidates=100
        )
        generator = torch.Generator().manual_seed(3)
        # The last user has no candidate.
        self.index = torch.randint(USERS - 1, (CANDIDATES,), generator=generator, dtype=torch.int32)
        roles = iter(self.module.roles.values())

        def at_users(x: Tensor) -> Tensor:
            is_user = next(roles) == "user"
            return x[:USERS] if is_user else x[torch.arange(CANDIDATES) % len(x)]

        self.inputs = pytree.tree_map(at_users, ranker.inputs)
        leaves, spec = pytree.tree_flatten(self.inputs)
        repeated = [
            x[self.index.long()] if role == "user" else x
            for x, role in zip(leaves, self.module.roles.values(), strict=False)
        ]
        self.repeated = pytree.tree_unflatten(repeated, spec)

    def run(self, module: Any, inputs: Any, **index: Any) -> Any:
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        with torch.no_grad():
            return module(*args, **kwargs, **index)

    def flops(self, before: bool) -> int:
        # The fused encoder operators of torch have no formula.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS) as counter:
                if before:
                    self.run(self.ranker.model, self.repeated)
                else:
                    self.run(self.module, self.inputs, cand_to_user=self.index)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        return counter.get_total_flops()


@pytest.fixture(scope="module", params=MODELS)
def transformed(request: pytest.FixtureRequest) -> Transformed:
    return Transformed(MODELS[request.param]())


def test_results(transformed: Transformed) -> None:
    got = transformed.run(transformed.module, transformed.inputs, cand_to_user=transformed.index)
    want = transformed.run(transformed.ranker.model, transformed.repeated)
    torch.testing.assert_close(got, want)


def test_flops_agree_with_the_counter(transformed: Transformed) -> None:
    spec = transformed.module.spec
    for before in (True, False):
        field = "flops_before" if before else "flops_after"
        expected = spec.total(field, USERS, CANDIDATES)
        assert transformed.flops(before) == pytest.approx(expected, rel=0.01)


def test_spec_is_a_document(transformed: Transformed) -> None:
    spec = transformed.module.spec
    assert Spec.from_json(spec.to_json()) == spec
    table = spec.at(USERS, CANDIDATES).table()
    for row in spec.rows:
        if row.is_product:
            assert row.name in table
    assert ".py:" in table
    assert spec.total("bytes_after", 4, 256) > 0


def test_kernels_cover_the_range(transformed: Transformed) -> None:
    for row in transformed.module.spec.rows:
        for op in {kernel.op for kernel in row.kernels}:
            covered = sum(
                (k.users[1] - k.users[0] + 1) * (k.candidates[1] - k.candidates[0] + 1)
                for k in row.kernels
                if k.op == op
            )
            assert covered == 8 * 100


def test_kernels_are_those_of_the_package(transformed: Transformed) -> None:
    program = transformed.module.exported_program
    inputs = [x for x in pytree.tree_leaves(transformed.inputs) if isinstance(x, Tensor)]
    lowered = _inductor.lower_operators(program)
    run = kernels_at(lowered, [*inputs, transformed.index])
    planned = [
        (k.op.removeprefix("ikbo::"), k.kernel)
        for row in transformed.module.spec.rows
        for k in row.kernels
        if k.users[0] <= USERS <= k.users[1]
        and k.candidates[0] <= CANDIDATES <= k.candidates[1]
        and not k.kernel.startswith("torch: ")
    ]
    assert sorted(planned) == sorted((k.op, k.kernel) for k in run)


def batches(module: TransformedModule, op: str) -> list[str]:
    return [row.batch for row in module.spec.rows if row.op == op]


def get(name: str) -> TransformedModule:
    ranker = MODELS[name]()
    return ikbo.transform(
        ranker.model, ranker.inputs, ranker.users, max_users=8, max_candidates=100
    )


def called(module: TransformedModule) -> list[str]:
    return [str(n.target) for n in module.exported_program.graph.nodes if n.op == "call_function"]


def test_user_work_is_at_user_batch() -> None:
    module = get("attention")
    assert batches(module, "aten.layer_norm.default") == ["U", "U"]
    assert batches(module, "aten.scaled_dot_product_attention.default") == ["U", "U+B", "U+B"]
    assert called(module).count("ikbo.target_attention.default") == 2
    assert "ikbo.expand.default" not in called(module)


def test_compressions_of_the_same_fields_are_one_operator() -> None:
    module = get("lce")
    assert called(module).count("ikbo.lce.default") == 1
    assert not any("permute" in name or "transpose" in name for name in called(module))


def test_norms_and_gates_are_folded() -> None:
    module = get("norms")
    assert called(module) == ["ikbo.linear.default", "ikbo.linear.default"]
    assert set(module.exported_program.state_dict).isdisjoint({"before_running_mean", "gate"})


def test_coupled_rows_are_reported() -> None:
    module = get("coupled")
    blocked = [why for row in module.spec.rows for why in row.blocked]
    assert any("aten.softmax.int is not known to treat each row" in why for why in blocked)


GOLDEN = """\
linear = ikbo.linear.default(user, item, first_weight_user, first_weight_cand, first_bias, \
cand_to_user, relu)
linear_1 = aten.linear.default(linear, last_weight, last_bias)
squeeze = aten.squeeze.dim(linear_1, 1)
return squeeze"""


def test_graph_text() -> None:
    lines = []
    for node in get("mlp").exported_program.graph.nodes:
        arguments = ", ".join(str(a).removeprefix("b_") for a in node.args)
        if node.op == "call_function":
            lines.append(f"{node.name} = {node.target}({arguments})")
        elif node.op == "output":
            lines.append(f"return {node.args[0][0]}")
    assert "\n".join(lines) == GOLDEN


def test_exported_program_and_keywords() -> None:
    ranker = MODELS["cross"]()
    batch = torch.export.Dim("batch", min=1, max=4096)
    shapes = {name: {0: batch} for name in ranker.inputs}
    program = torch.export.export(ranker.model, (), ranker.inputs, dynamic_shapes=shapes)
    module = ikbo.transform(program, ranker.inputs, ["user"], max_users=4, max_candidates=64)
    assert module.roles == {"user": "user", "item": "candidate", "cand_to_user": "index"}
    index = torch.tensor([1, 0, 1], dtype=torch.int32)
    user, item = ranker.inputs["user"][:2], ranker.inputs["item"][:3]
    want = ranker.model(user[index.long()], item)
    torch.testing.assert_close(module(item=item, user=user, cand_to_user=index), want)


def test_inputs_in_another_order_and_constants() -> None:
    class Weighted(torch.nn.Module):
        def forward(self, user: Tensor, item: Tensor, scale: float, extra: Tensor | None) -> Tensor:
            return (user * item * scale).sum(-1) if extra is None else extra

    inputs = {"item": rows(4), "extra": None, "user": rows(4), "scale": 0.5}
    module = ikbo.transform(Weighted().eval(), inputs, ["user"], max_users=4, max_candidates=64)
    assert module.roles == {"item": "candidate", "user": "user", "cand_to_user": "index"}
    index = torch.tensor([2, 0, 0, 2, 1], dtype=torch.int32)
    user, item = inputs["user"][:3], inputs["item"][:5]
    got = module(user=user, scale=0.5, item=item, extra=None, cand_to_user=index)
    torch.testing.assert_close(got, (user[index.long()] * item * 0.5).sum(-1))


def test_one_tensor_for_two_inputs() -> None:
    class Product(torch.nn.Module):
        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return user.tanh() * item

    both = rows(4)
    module = ikbo.transform(Product().eval(), (both, both), ["user"], max_users=4)
    index = torch.tensor([1, 0, 1], dtype=torch.int32)
    want = both[:2].tanh()[index.long()] * both[3:6]
    torch.testing.assert_close(module(both[:2], both[3:6], cand_to_user=index), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types(dtype: torch.dtype) -> None:
    ranker = MODELS["norms"]()
    inputs = tuple(x.to(dtype) for x in ranker.inputs)
    module = ikbo.transform(ranker.model.to(dtype), inputs, ["user"], max_users=4)
    assert called(module) == ["ikbo.linear.default", "ikbo.linear.default"]


def test_one_user_and_one_candidate() -> None:
    ranker = MODELS["tokens"]()
    module = ikbo.transform(ranker.model, ranker.inputs, ["user"], max_users=1, max_candidates=1)
    one = pytree.tree_map(lambda x: x[:1], ranker.inputs)
    got = module(*one, cand_to_user=torch.zeros(1, dtype=torch.int32))
    torch.testing.assert_close(got, ranker.model(*one))


def test_names_of_nested_inputs() -> None:
    assert list(get("tokens").roles) == ["user.tokens", "item.0", "cand_to_user"]


def test_explain_is_the_spec() -> None:
    ranker = MODELS["mlp"]()
    spec = ikbo.explain(ranker.model, ranker.inputs, ["user"], max_users=8, max_candidates=100)
    assert spec == get("mlp").spec
