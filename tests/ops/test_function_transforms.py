# SPDX-License-Identifier: Apache-2.0
"""Forward mode and `torch.func` over every operator: the right result, or an error that says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import ikbo
from ikbo.testing.inputs import Case, case, make_inputs

SIZES = {"U": 5, "B": 12}
LCE = {**SIZES, "K_user": 7, "K_cand": 6, "M": 4, "N": 8}
LINEAR = {**SIZES, "K_user": 7, "K_cand": 6, "M": 4}
HEADS = {**SIZES, "Q": 2, "H": 2, "H_kv": 1, "S": 9, "D": 4}


def small(op: str, sizes: dict[str, int], **options: Any) -> Case:
    return case(op, "fp32", "gaps", "contiguous", sizes, **options)


DIFFERENTIABLE = {
    "expand": small("expand", {**SIZES, "K_user": 3}),
    "linear": small("linear", LINEAR, activation="silu"),
    "lce": small("lce", LCE),
    "lce.list": small("lce", LCE, parts=3),
    "bmm": small("bmm", {**SIZES, "P": 4, "R": 6, "N": 8}),
    "target_attention": small("target_attention", HEADS),
    "target_attention.packed": small("target_attention", HEADS, packed=True),
    "self_target_attention": small("self_target_attention", HEADS, is_causal=True),
}
CASES = {
    **DIFFERENTIABLE,
    "linear.prepacked": small("linear", LINEAR),
    "lce.prepacked": small("lce", LCE, parts=3),
}
DIFFERENTIABLE_OP = pytest.mark.parametrize("name", DIFFERENTIABLE)
EVERY_OP = pytest.mark.parametrize("name", CASES)


def call_of(name: str) -> tuple[Callable[..., Tensor], dict[str, Any], str]:
    """The operator's (first) result as a function of its arguments, and the user's argument."""
    this = CASES[name]
    inputs = pytree.tree_map(
        lambda t: t.nan_to_num() if isinstance(t, Tensor) and t.is_floating_point() else t,
        make_inputs(this),
    )
    if name.endswith("prepacked"):
        parts = inputs.get("e_cand", [inputs.get("x_cand")])
        inputs["w_cand"] = ikbo.prepack(inputs["w_cand"], [part.size(1) for part in parts])

    def call(**arguments: Any) -> Tensor:
        out = getattr(ikbo, this.op)(**arguments)
        return out if isinstance(out, Tensor) else out[0]

    return call, inputs, "k" if "k" in inputs else next(iter(inputs))


def of_user(name: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The operator as a function of its user tensor, and that tensor."""
    call, inputs, user = call_of(name)
    return lambda x: call(**{**inputs, user: x}), inputs[user]


def refusal(name: str) -> str:
    op = CASES[name].op
    return f"^ikbo::{op}: forward-mode derivatives are not supported; "


@EVERY_OP
def test_jvp_is_refused(name: str) -> None:
    f, x = of_user(name)
    with pytest.raises(RuntimeError, match=refusal(name)):
        torch.func.jvp(f, (x,), (torch.ones_like(x),))


@EVERY_OP
def test_every_argument_with_a_tangent_is_refused(name: str) -> None:
    call, inputs, _ = call_of(name)
    leaves, spec = pytree.tree_flatten(inputs)
    floats = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point()]
    for i in floats:
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=refusal(name)):
            dual = forward_ad.make_dual(leaves[i], torch.ones_like(leaves[i]))
            call(**pytree.tree_unflatten([*leaves[:i], dual, *leaves[i + 1 :]], spec))


@DIFFERENTIABLE_OP
def test_tangent_of_a_leaf_is_refused(name: str) -> None:
    f, x = of_user(name)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=refusal(name)):
        f(forward_ad.make_dual(x.requires_grad_(), torch.ones_like(x)))


@EVERY_OP
def test_jacfwd_and_compiled_jvp_are_refused(name: str) -> None:
    f, x = of_user(name)
    with pytest.raises(RuntimeError, match=refusal(name)):
        torch.func.jacfwd(f)(x)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, t: torch.func.jvp(f, (x,), (t,))[1], backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="forward-mode derivatives are not supported"):
        compiled(x, torch.ones_like(x))


@EVERY_OP
def test_other_tangents_are_no_matter(name: str) -> None:
    """Under forward mode, of what the operator does not depend on."""
    f, x = of_user(name)
    want = f(x)
    one = torch.tensor(1.0)
    out, tangent = torch.func.jvp(lambda scale: f(x) * scale, (one,), (one,))
    assert torch.equal(out, want)
    assert torch.equal(tangent, want)


def test_tangent_of_a_weight_to_pack_is_refused() -> None:
    w = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="ikbo::prepack: forward-mode derivatives"):
        torch.func.jvp(lambda w: ikbo.prepack(w, [6]), (w,), (torch.ones_like(w),))


@DIFFERENTIABLE_OP
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_reverse_mode_of_torch_func_is_refused(name: str, transform: Any) -> None:
    f, x = of_user(name)
    text = f"^ikbo::{CASES[name].op}: gradients by torch.func .* are not supported; .*autograd.grad"
    with pytest.raises(RuntimeError, match=text):
        transform(lambda x: f(x).sum())(x)


@EVERY_OP
def test_vmap_is_a_loop(name: str) -> None:
    f, x = of_user(name)
    xs = torch.stack([x, 2 * x, -x], dim=1)
    want = torch.stack([f(x) for x in xs.unbind(1)])
    assert torch.equal(torch.func.vmap(f, in_dims=1)(xs), want)


def test_vmap_over_nothing_is_refused() -> None:
    f, x = of_user("expand")
    with pytest.raises(RuntimeError, match="ikbo::expand: the batch of torch.func.vmap must have"):
        torch.func.vmap(f)(x.new_empty(0, *x.shape))


@EVERY_OP
def test_vmap_over_all_arguments(name: str) -> None:
    call, inputs, _ = call_of(name)
    leaves, spec = pytree.tree_flatten(inputs)
    tensors = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]

    def f(*batch: Tensor) -> Tensor:
        other = list(leaves)
        for i, t in zip(tensors, batch, strict=True):
            other[i] = t
        return call(**pytree.tree_unflatten(other, spec))

    batch = [torch.stack([leaves[i], leaves[i].flip(0)]) for i in tensors]
    ordered = inputs.get("w_cand" if name.endswith("prepacked") else "user_offsets")
    # Two of what means something in its own order alone.
    batch = [t[[0, 0]] if leaves[i] is ordered else t for i, t in zip(tensors, batch, strict=True)]
    rows = zip(*batch, strict=True)
    # A packed weight begins at an aligned address, which a row of a batch may not. Others are taken
    # where they lie: some GEMMs sum in another order at another address.
    want = torch.stack([f(*(t.clone() if t.dtype == torch.uint8 else t for t in r)) for r in rows])
    assert torch.equal(torch.func.vmap(f)(*batch), want)


@DIFFERENTIABLE_OP
def test_gradient_through_vmap(name: str) -> None:
    f, x = of_user(name)
    xs = torch.stack([x, 2 * x]).requires_grad_()
    (got,) = torch.autograd.grad(torch.func.vmap(f)(xs).square().sum(), xs)
    (want,) = torch.autograd.grad(torch.stack([f(x) for x in xs]).square().sum(), xs)
    torch.testing.assert_close(got, want)


@DIFFERENTIABLE_OP
def test_batched_gradients(name: str) -> None:
    f, x = of_user(name)
    out = f(x.requires_grad_())
    grads = torch.stack([torch.ones_like(out), out.detach()])
    (got,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    want = torch.stack([torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in grads])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (ikbo.nn.Linear(3, 2, 4, activation="relu"), ((5, 3), (12, 2))),
        (ikbo.nn.LinearCompression(3, 2, 4), ((5, 3, 8), (12, 2, 8))),
        (ikbo.nn.TargetAttention(8, 2), ((12, 8), (5, 6, 8))),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, torch.nn.Module) else "",
)
def test_functional_call(module: torch.nn.Module, inputs: Any) -> None:
    index = torch.arange(12, dtype=torch.int32) % 5
    arguments = (*(torch.randn(size) for size in inputs), index)
    parameters = {name: 2 * p.detach() for name, p in module.named_parameters()}
    got = torch.func.functional_call(module, parameters, arguments)
    module.load_state_dict(parameters)
    assert torch.equal(got, module(*arguments))
