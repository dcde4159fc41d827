# SPDX-License-Identifier: Apache-2.0
"""The nets of `examples/nets`: their forms agree, and what users determine is computed at U."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ikbo
from examples.nets import NETS, Net
from examples.nets.contestants import PIECES, form_of, limits_of, users_at
from examples.nets.net import Config, Inputs, Ranker, Replicated, Split, make_inputs
from ikbo import _inductor
from ikbo._torch_warnings import quiet
from ikbo.transform.capture import Captured, capture
from ikbo.transform.cost import FLOPS
from ikbo.transform.split import factor
from tests.transform.truth import Provenance

aten = torch.ops.aten
LIMITS = (8, 100)
# The small sizes, smaller still: what is tested does not depend on them. The second LCE of
# `late_ranking` has 16 rows or more in each of its parts.
TINY: dict[str, dict[str, Any]] = {
    "early_ranking": {"k_user": 48, "k_cand": 24, "user_layers": (32, 16), "item_layers": (16,)},
    "dlrm_dcn": {"width": 8, "bottom": (16, 8), "cross_rank": 12, "over": (16, 8)},
    "late_ranking": {
        "k_user": 24, "k_cand": 20, "width": 8, "events": 10, "mixed": 40, "queries": 16,
        "second": 4, "profile": 6, "expert": (10, 8),
    },
    "wukong": {"k_user": 14, "k_cand": 6, "width": 8, "layers": 2, "fm": 4, "lcb": 4, "rank": 3,
        "hidden": 16, "head": (8,)},
    "llm_scale": {"width": 16, "layers": 2, "events": 9, "features": 6},
}  # fmt: skip


TINY["late_ranking_narrow"] = TINY["late_ranking"] | {"queries": 8}


def net_of(name: str) -> Net:
    return NETS[name.removesuffix("_narrow")]


def config_of(name: str) -> Config:
    return replace(net_of(name).small, **TINY[name])  # type: ignore[type-var]


class Made:
    """A net in fp64 with its inputs and, of the pass, the captured graph."""

    def __init__(self, name: str) -> None:
        self.config = config_of(name)
        self.plain: Ranker
        self.plain, self.adopted = (net.double() for net in net_of(name).build(self.config))
        self.example = make_inputs(self.config, 16, 16, torch.float64)
        with quiet():
            self.captured: Captured = capture(self.plain, self.example, ["user"])
            self.factored = factor(self.captured, LIMITS)[0]


made = cache(Made)


class Calls(TorchDispatchMode):
    """The arguments of each call of some operators."""

    def __init__(self, *targets: Any) -> None:
        super().__init__()
        self.arguments: dict[Any, list[Any]] = {target: [] for target in targets}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.arguments:
            self.arguments[func].append(args)
        return func(*args, **(kwargs or {}))


def requests(name: str) -> tuple[Inputs, Inputs, Tensor]:
    """Four users with uneven numbers of candidates, one with none, in mixed order."""
    index = torch.tensor([2, 0, 0, 3, 2, 2, 0, 3, 3, 0, 0, 2], dtype=torch.int32)
    return *make_inputs(config_of(name), 4, len(index), torch.float64, seed=5), index


def calls(name: str, *targets: Any) -> list[list[Any]]:
    """The calls that the walked model, which stands for the transformed one, makes of each."""
    user, item, index = requests(name)
    walk = made(name).factored  # outside of the count: making it walks over the model
    with torch.no_grad(), quiet(), Calls(*targets) as seen:
        walk(user, item, cand_to_user=index)
    return list(seen.arguments.values())


def exported_calls(name: str, target: Any) -> list[Any]:
    """The arguments of an operator's calls in the transformed program."""
    user, item, index = requests(name)
    with quiet():
        walk = made(name).factored
        program = torch.export.export(walk, (user, item), {"cand_to_user": index})
    return [node.args for node in program.graph.nodes if node.target is target]


@pytest.mark.parametrize("name", NETS)
def test_forms_agree(name: str) -> None:
    it = made(name)
    user, item, index = requests(name)
    with torch.no_grad(), quiet():
        expected = it.plain({key: x[index.long()] for key, x in user.items()}, item)
        assert expected.std() > 1e-3
        for module in (Replicated(it.plain), Split(it.plain), it.adopted):
            torch.testing.assert_close(module(user, item, index), expected)
        torch.testing.assert_close(it.factored(user, item, cand_to_user=index), expected)


@pytest.mark.parametrize("name", [name for name in NETS if NETS[name].pieces])
def test_decomposed_by_hand_agrees(name: str) -> None:
    """For neighbours, as many for each user."""
    user, item, _ = requests(name)
    index = torch.arange(12, dtype=torch.int32) // 3
    config, plain = config_of(name), made(name).plain
    by_hand = form_of(name, PIECES, config, torch.float64, "cpu")
    by_hand.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected = Replicated(plain)(user, item, index)
        torch.testing.assert_close(by_hand(user, item, index), expected)


def test_transformed() -> None:
    """The whole pass, with its own verification."""
    it = made("early_ranking")
    user, item, index = requests("early_ranking")
    module = ikbo.transform(it.plain, it.example, ["user"], max_users=8, max_candidates=100)
    with torch.no_grad():
        expected = Replicated(it.plain)(user, item, index)
        torch.testing.assert_close(module(user, item, cand_to_user=index), expected)


@pytest.mark.parametrize("name", NETS)
def test_all_products_that_users_determine_are_at_users(name: str) -> None:
    """Of other operators, those behind a ReLU may be constant by chance."""
    captured = made(name).captured
    products = {
        node.name
        for node in captured.program.graph.nodes
        if getattr(node.target, "overloadpacket", None) in FLOPS
    }
    with quiet():
        provenance = Provenance(captured)
    checked = {text.partition(":")[0] for text in provenance.claimed} & products
    assert len(checked) >= len(products) // 2
    texts = provenance.differences()
    assert [text for text in texts if text.partition(":")[0] in products] == []
    assert [text for text in texts if text.endswith("claimed for the user")] == []


def test_wide_parts_of_a_compression_are_read_where_they_lie() -> None:
    ops = torch.ops.ikbo.lce
    [first], [second] = calls("late_ranking", ops.default, ops.list)
    assert first[1].shape[1] == 20
    assert [part.shape[1] for part in second[1]] == [40, 16]


def test_narrow_parts_are_copied_into_one() -> None:
    ops = torch.ops.ikbo.lce
    default, listed = calls("late_ranking_narrow", ops.default, ops.list)
    assert {args[1].shape[1] for args in default} == {20, 40 + 8}
    assert listed == []


def test_causal_rows_of_users_stay_causal() -> None:
    """In the last layer these rows are not read."""
    sdpa = aten.scaled_dot_product_attention.default
    found = exported_calls("llm_scale", sdpa)
    assert [args[3:] for args in found] == [(None, 0.0, True)]


def test_fields_that_the_net_transposes_are_compressed_in_place() -> None:
    """Wukong's first layer: the product whose transpose `bmm` reads, the compression, and the
    residual, which is added to a value of the candidate, are one `ikbo::lce`, as in the adopted
    net."""
    lce = torch.ops.ikbo.lce.default
    found = exported_calls("wukong", lce)
    assert [args[2].meta["val"].shape[0] for args in found] == [3 + 4 + 8]
    [found] = calls("wukong", lce)
    assert [args[2].shape[0] for args in found] == [3 + 4 + 8]


def test_transposed_embeddings_of_users_are_copied_before_a_compression() -> None:
    """The summaries of the history, which kernels for GPUs would read with a stride."""
    with quiet():
        program = torch.export.export(made("late_ranking").adopted, requests("late_ranking"))
    strides = []
    for each in (program, _inductor.lower_operators(program)):
        nodes = [n for n in each.graph.nodes if "ikbo.lce" in str(n.target)]
        strides.append([node.args[0].meta["val"].stride(2) for node in nodes])
    assert strides == [[1, 4], [1, 1]]


def test_limits_hold_every_ratio() -> None:
    config = NETS["late_ranking"].full
    assert [users_at(config, ratio) for ratio in (10, 70, 500)] == [105, 15, 2]
    assert limits_of(config, (10, 70, 500)) == (105, 1050)
