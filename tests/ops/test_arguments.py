# SPDX-License-Identifier: Apache-2.0
"""What is no dense tensor, or of another type than the schema's, is refused by name."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import ikbo
from ikbo.testing.inputs import make_inputs
from tests.ops.test_function_transforms import CASES

ARGUMENTS = {
    "expand": ("x_user", "cand_to_user"),
    "linear": ("x_user", "x_cand", "w_user", "w_cand", "cand_to_user"),
    "lce": ("e_user", "w_user", "w_cand", "cand_to_user"),
    "lce.list": ("e_user", "w_user", "w_cand", "cand_to_user"),
    "bmm": ("a_user", "b_cand", "cand_to_user"),
    "target_attention": ("q", "k", "v", "cand_to_user"),
    "target_attention.packed": ("q", "k", "v", "cand_to_user"),
    "self_target_attention": ("q_user", "q_cand", "k", "v", "cand_to_user"),
}
EVERY_ARGUMENT = pytest.mark.parametrize(
    ("name", "argument"), [(op, a) for op, names in ARGUMENTS.items() for a in names]
)
OPTIONAL = {
    "linear": ("bias",),
    "lce": ("bias",),
    "target_attention": ("user_lengths", "cand_lengths", "user_mask"),
    "target_attention.packed": ("cand_lengths",),
    "self_target_attention": ("user_lengths", "cand_lengths"),
}


def inputs_of(name: str) -> dict[str, Any]:
    return pytree.tree_map(
        lambda t: t.nan_to_num() if isinstance(t, Tensor) and t.is_floating_point() else t,
        make_inputs(CASES[name]),
    )


def operator_of(name: str) -> Callable[..., Any]:
    return getattr(ikbo, CASES[name].op)


def call(name: str, **changes: Any) -> Any:
    return operator_of(name)(**{**inputs_of(name), **changes})


def refused(name: str, argument: str, text: str) -> Any:
    op = CASES[name].op
    return pytest.raises(TypeError, match=f"^{re.escape(f'ikbo::{op}: {argument} must {text}')}$")


NOT_TENSORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "none": (lambda t: None, "NoneType"),
    "list": (lambda t: t.tolist(), "list; convert it with torch.tensor()"),
    "numpy": (lambda t: t.numpy(), "ndarray; convert it with torch.from_numpy()"),
    "number": (lambda t: 3, "int"),
}


@EVERY_ARGUMENT
@pytest.mark.parametrize("kind", NOT_TENSORS)
@pytest.mark.parametrize("inference", [False, True])
def test_no_tensor(
    name: str, argument: str, kind: str, inference: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    make, got = NOT_TENSORS[kind]
    value = make(inputs_of(name)[argument])
    with torch.inference_mode(inference), refused(name, argument, f"be a torch.Tensor; got {got}"):
        call(name, **{argument: value})
    assert not capfd.readouterr().err


@pytest.mark.parametrize(("name", "argument"), [(op, a) for op, n in OPTIONAL.items() for a in n])
def test_no_optional_tensor(name: str, argument: str) -> None:
    with refused(name, argument, "be a torch.Tensor or None; got float"):
        call(name, **{argument: 0.5})


def test_candidate_index_in_place_of_its_tensor() -> None:
    index = ikbo.CandidateIndex.from_counts([3, 9])
    with refused("expand", "cand_to_user", "be a torch.Tensor; got CandidateIndex; pass its "
                 "cand_to_user"):  # fmt: skip
        call("expand", cand_to_user=index)


@pytest.mark.parametrize(
    ("e_cand", "argument", "text"),
    [
        (None, "e_cand", "be a torch.Tensor or a list of them; got NoneType"),
        (3, "e_cand", "be a torch.Tensor or a list of them; got int"),
        (np.ones((12, 6, 8)), "e_cand", "be a torch.Tensor or a list of them; got ndarray; convert "
         "it with torch.from_numpy()"),
        ([torch.ones(12, 6, 8), None], "e_cand[1]", "be a torch.Tensor; got NoneType"),
        ([np.ones((12, 6, 8))], "e_cand[0]", "be a torch.Tensor; got ndarray; convert it with "
         "torch.from_numpy()"),
    ],
    ids=["none", "number", "numpy", "none in a list", "numpy in a list"],
)  # fmt: skip
def test_candidates_of_lce(e_cand: Any, argument: str, text: str) -> None:
    with refused("lce", argument, text):
        call("lce", e_cand=e_cand)


@pytest.mark.parametrize(
    ("name", "argument", "value", "text"),
    [
        ("linear", "activation", None, "be a str; got NoneType"),
        ("linear", "activation", 3, "be a str; got int"),
        ("bmm", "transpose_a", "yes", "be a bool; got str"),
        ("target_attention", "scale", "1", "be a float or None; got str"),
        ("self_target_attention", "is_causal", "yes", "be a bool; got str"),
    ],
)
def test_option_of_another_type(name: str, argument: str, value: Any, text: str) -> None:
    with refused(name, argument, text):
        call(name, **{argument: value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, [4]), "w_cand must be a torch.Tensor; got NoneType"),
        ((torch.ones(2, 4), 4), "k_cand must be a list of ints; got int"),
        ((torch.ones(2, 4), None), "k_cand must be a list of ints; got NoneType"),
        ((torch.ones(2, 4), [4.0]), "k_cand must be a list of ints; got a list with float"),
        ((torch.ones(2, 4), torch.tensor([4])), "k_cand must be a list of ints; got Tensor"),
        ((torch.ones(2, 4).to_sparse(), [4]), "w_cand must be dense, of layout torch.strided; got "
         "torch.sparse_coo; convert it with .to_dense()"),
    ],
)  # fmt: skip
def test_arguments_of_prepack(arguments: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(f'ikbo::prepack: {text}')}$"):
        ikbo.prepack(*arguments)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "torch.sparse_coo"),
    "csr": (lambda t: t.reshape(t.size(0), -1).to_sparse_csr(), "torch.sparse_csr"),
    "mkldnn": (lambda t: t.float().to_mkldnn(), "torch._mkldnn"),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
        "torch.jagged",
    ),
}


@EVERY_ARGUMENT
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inference", [False, True])
def test_other_layouts(
    name: str, argument: str, layout: str, inference: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    make, got = LAYOUTS[layout]
    value = make(inputs_of(name)[argument])
    text = f"be dense, of layout torch.strided; got {got}; convert it with .to_dense()"
    if layout == "jagged":
        text = text.replace(".to_dense()", ".to_padded_tensor(0)")
    with torch.inference_mode(inference), refused(name, argument, text):
        call(name, **{argument: value})
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Tensor.tolist, "be a torch.Tensor; got list; convert it with torch.tensor()"),
        (Tensor.numpy, "be a torch.Tensor; got ndarray; convert it with torch.from_numpy()"),
        (Tensor.to_sparse, "be dense, of layout torch.strided; got torch.sparse_coo; convert it "
         "with .to_dense()"),
    ],
)  # fmt: skip
def test_offsets_of_packed_histories(make: Callable[[Tensor], Any], text: str) -> None:
    name = "target_attention.packed"
    value = make(inputs_of(name)["user_offsets"])
    with refused(name, "user_offsets", text):
        call(name, user_offsets=value)


def test_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.strided)
    with refused("expand", "x_user", "be dense, of layout torch.strided; got a nested tensor; "
                 "convert it with .to_padded_tensor(0)"):  # fmt: skip
        call("expand", x_user=nested)


@EVERY_ARGUMENT
def test_quantised(name: str, argument: str) -> None:
    quantised = torch.quantize_per_tensor(inputs_of(name)[argument].float(), 0.1, 0, torch.quint8)
    with refused(name, argument, "not be quantised; got torch.quint8; convert it with "
                 ".dequantize()"):  # fmt: skip
        call(name, **{argument: quantised})


def test_operator_without_its_wrapper_refuses_layouts_too() -> None:
    with refused("expand", "x_user", "be dense, of layout torch.strided; got torch.sparse_coo; "
                 "convert it with .to_dense()"):  # fmt: skip
        torch.ops.ikbo.expand(torch.ones(2, 3).to_sparse(), torch.zeros(4, dtype=torch.int32))


def test_compiled_call_is_refused() -> None:
    torch._dynamo.reset()
    nothing: Any = None
    compiled = torch.compile(lambda x: ikbo.expand(x, nothing), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="ikbo::expand: cand_to_user must be a torch.Tensor"):
        compiled(torch.ones(2, 3))


class Wrapper(Tensor):
    """A subclass that changes nothing."""


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Wrapper),
    "expanded": lambda t: t[..., None].expand(*t.shape, 2)[..., 0],
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_kinds_of_tensors_are_taken(name: str, kind: str) -> None:
    inputs = inputs_of(name)
    other = pytree.tree_map_only(Tensor, TENSORS[kind], inputs)
    got, want = call(name, **other), call(name, **inputs)
    for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(name: str, mode: str) -> None:
    inputs = inputs_of(name)
    leaves, spec = pytree.tree_flatten(inputs)
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    operator = operator_of(name)

    def f(*tensors: Tensor) -> Any:
        given = iter(tensors)
        arguments = [next(given) if t else x for x, t in zip(leaves, is_tensor, strict=True)]
        return pytree.tree_leaves(operator(**pytree.tree_unflatten(arguments, spec)))

    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    graph = make_fx(f, tracing_mode=mode)(*tensors)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert any(target.startswith(f"ikbo.{CASES[name].op}") for target in targets)
    for ours, theirs in zip(graph(*tensors), f(*tensors), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("strict", [False, True])
def test_export(name: str, strict: bool) -> None:
    operator = operator_of(name)

    class Model(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return operator(**inputs)

    inputs = inputs_of(name)
    program = torch.export.export(Model(), (), inputs, strict=strict)
    want = pytree.tree_leaves(call(name, **inputs))
    for ours, theirs in zip(pytree.tree_leaves(program.module()(**inputs)), want, strict=True):
        assert torch.equal(ours, theirs)
