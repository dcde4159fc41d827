# SPDX-License-Identifier: Apache-2.0
"""A PrivateUse1 device written in Python that records which PyTorch operators ran on it.

Its tensors keep their data in a CPU tensor; one fallback for the dispatch key runs every operator
on those. PyTorch registers the device for the whole process, so a test runs this as a program:
standard input holds case ids, one a line; standard output gets one JSON object a line with ``id``,
``error`` (null, or how the result differs from the reference), ``forward`` and ``backward``: the
calls of each in order, as [operator, sizes of its result]. Views are left out.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import ikbo
from ikbo import reference
from ikbo.testing.compare import COMPOSITE_ROUNDINGS, check_against_reference
from ikbo.testing.inputs import SHAPES, Case, generator_of, make_inputs

DEVICE = "pydevice"
calls: list[tuple[str, list[int]]] = []


class DeviceTensor(torch.Tensor):
    """A tensor of the device; ``raw`` is the CPU tensor with its data."""

    raw: Tensor


def wrap(raw: Tensor) -> Tensor:
    # Sizes and strides that PyTorch sees are those of a contiguous tensor: keep the data so.
    raw = raw.contiguous()
    tensor = torch._C._acc.create_empty_tensor(raw.shape, raw.dtype)
    tensor.__class__ = DeviceTensor
    tensor.raw = raw
    return tensor


def run_on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback: any operator, its tensors replaced by their data."""
    wrappers: dict[int, Tensor] = {}

    def unwrapped(value: Any) -> Any:
        assert isinstance(value, DeviceTensor) or not isinstance(value, Tensor), f"{op}: not ours"
        if isinstance(value, DeviceTensor):
            wrappers[id(value.raw)] = value
            return value.raw
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else wrap(value)

    args, kwargs = pytree.tree_map(unwrapped, (args, kwargs))
    result = op(*args, **kwargs)
    if not op.is_view:
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                calls.append((op.name(), list(value.shape)))
    return pytree.tree_map(wrapped, result)


def copy_between(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    raw_source = source.raw if isinstance(source, DeviceTensor) else source
    raw_target = target.raw if isinstance(target, DeviceTensor) else target
    raw_target.copy_(raw_source)
    return target


def set_up() -> list[torch.library.Library]:
    """Registers the device; it lives as long as the libraries returned."""
    _setup_privateuseone_for_python_backend(DEVICE)
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(run_on_cpu, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", copy_between, "PrivateUse1")
    # Operators with a C++ kernel for every device that makes or resizes tensors by itself.
    for name in (
        "_unsafe_view", "alias", "detach", "logsumexp", "arange", "arange.start",
        "arange.start_step",
    ):  # fmt: skip
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, functools.partial(run_on_cpu, operator), "PrivateUse1")
    return [fallback, aten]


def masked_inputs(this: Case) -> dict[str, Any]:
    """The case's inputs; with the option ``masks``, lengths and a mask that leave rows no key."""
    inputs = make_inputs(this)
    if inputs.pop("masks", False):
        generator = generator_of(this)
        for name, letter in (("user_lengths", "U"), ("cand_lengths", "B")):
            lengths = torch.randint(this.size("S") + 1, (this.size(letter),), generator=generator)
            lengths[0] = 0
            inputs[name] = lengths.to(torch.int32)
        if this.op == "target_attention":
            mask = torch.rand(this.size("U"), this.size("S"), generator=generator) < 0.7
            inputs["user_mask"] = mask
    return inputs


def on_device(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: wrap(t.clone()), values)


def run(this: Case) -> dict[str, Any]:
    inputs = masked_inputs(this)
    arguments = on_device(inputs)
    calls.clear()
    outputs = getattr(ikbo, this.op)(**arguments)
    forward_calls = list(calls)
    calls.clear()
    error = None
    try:
        result = pytree.tree_map(lambda t: t.raw, outputs)
        definition = getattr(reference, this.op)
        check_against_reference(this, inputs, result, definition, roundings=COMPOSITE_ROUNDINGS)
        if this.dtype == "fp64":
            check_gradients(this, inputs)
    except AssertionError as failure:
        error = str(failure)
    return {"id": this.id, "error": error, "forward": forward_calls, "backward": list(calls)}


def attention_gradients(
    op: str, arguments: dict[str, Any], ones: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Not through autograd, whose way of keeping results loses the tensors' Python side."""
    outputs = getattr(ikbo, op)(**arguments)
    calls.clear()
    backward = getattr(torch.ops.ikbo, f"_{op}_backward")
    overload = backward.packed if "user_offsets" in arguments else backward.default
    names = [argument.name for argument in overload._schema.arguments]
    given = {"is_causal": False, **arguments}
    inputs = [given.get(name) for name in names[len(outputs) : -len(outputs)]]
    return list(overload(*map(ones, outputs), *inputs, *outputs))


def check_gradients(this: Case, inputs: dict[str, Any]) -> None:
    """Gradients on the device equal those of the CPU kernel."""
    names = [name for name in SHAPES[this.op] if inputs[name] is not None]
    finite = pytree.tree_map_only(Tensor, torch.nan_to_num, inputs)

    def gradients(arguments: dict[str, Any], ones: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if this.op in ("target_attention", "self_target_attention"):
            return attention_gradients(this.op, arguments, ones)
        leaves = [t.requires_grad_() for t in pytree.tree_leaves([arguments[n] for n in names])]
        output = getattr(ikbo, this.op)(**arguments)
        calls.clear()
        return list(torch.autograd.grad(output, leaves, ones(output)))

    want = gradients(dict(finite), torch.ones_like)
    got = gradients(on_device(finite), lambda output: wrap(torch.ones_like(output.raw)))
    for i, (device_grad, cpu_grad) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(device_grad.raw, cpu_grad, msg=lambda m, i=i: f"input {i}: {m}")


if __name__ == "__main__":
    libraries = set_up()
    for line in sys.stdin:
        print(json.dumps(run(Case.from_id(line.strip()))), flush=True)
