# SPDX-License-Identifier: Apache-2.0
"""Step 1: the model as one graph with one batch symbol, and the names and roles of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from ikbo._source_line import source_line
from ikbo.transform import inputs
from ikbo.transform.errors import TransformError
from ikbo.transform.packed import SIDES, Layout, Packed, apart

# The batch of the unmodified model is bounded only by what an index can address.
_MAX_BATCH = 2**31 - 1


@dataclass(frozen=True)
class Captured:
    """The model's graph and what is known about its inputs.

    `program` has one batch symbol (`batch`) and functional ATen operators. `layouts` has one entry
    per flat input of the model; `structure` is the model's. All other fields are those of the
    transformed model, where a packed input is a dict of its parts, and several rows per candidate
    are an axis; `names` has one entry per flat input, None where it is not a tensor.
    """

    program: ExportedProgram
    batch: sympy.Symbol
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str | None, ...]
    roles: dict[str, str]
    layouts: tuple[Layout, ...]
    structure: pytree.TreeSpec
    signature: inspect.Signature

    @property
    def flat(self) -> list[Any]:
        """The example inputs, flat."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.flat if isinstance(x, Tensor))

    @property
    def flat_roles(self) -> list[str | None]:
        return [None if name is None else self.roles[name] for name in self.names]

    @property
    def input_roles(self) -> list[str | None]:
        """The roles of the model's own flat inputs, "mixed" for packed ones."""
        roles, found = iter(self.flat_roles), []
        for layout in self.layouts:
            role = next(roles)
            if layout.packed is not None:
                next(roles)
                role = "mixed"
            found.append(role)
        return found

    def nest(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Flat inputs as positional and keyword arguments."""
        _, spec = pytree.tree_flatten((self.args, self.kwargs))
        return pytree.tree_unflatten(list(flat), spec)

    def nest_joined(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Flat inputs, all with one batch size, as the arguments of the unmodified model."""
        rest = iter(flat)
        joined = [layout.join(rest) for layout in self.layouts]
        return pytree.tree_unflatten(joined, self.structure)

    @property
    def columns(self) -> dict[str, tuple[int, ...]]:
        """The name of each part of a packed input to its columns."""
        names, found = iter(self.names), {}
        for layout in self.layouts:
            if layout.packed is None:
                next(names)
                continue
            for side in SIDES:
                found[str(next(names))] = layout.packed.columns(side)
        return found

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments as flat inputs.

        Errors:
            TypeError: their structure is not that of the example inputs.
        """
        ordered = {name: kwargs[name] for name in self.kwargs if name in kwargs}
        ordered |= {name: value for name, value in kwargs.items() if name not in ordered}
        flat, spec = pytree.tree_flatten((args, ordered))
        _, expected = pytree.tree_flatten((self.args, self.kwargs))
        if spec != expected:
            raise TypeError(
                "ikbo.transform: inputs must have the structure of the example inputs, "
                f"{expected}; got {spec}"
            )
        return flat


def capture(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str],
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
) -> Captured:
    """Exports the model once with one batch symbol, without decomposing its operators."""
    args, kwargs = inputs.unshared(*inputs.split(example_inputs))
    if isinstance(model, ExportedProgram):
        program, signature = model, _program_signature(model)
    elif isinstance(model, nn.Module):
        signature = inspect.signature(model.forward)
        inputs.check_fit(signature, args, kwargs)
    else:
        raise TypeError(
            "ikbo.transform: model must be an nn.Module or an ExportedProgram; "
            f"got {type(model).__name__}"
        )
    named = apart(inputs.named_leaves(signature, args, kwargs), row_counts)
    given = inputs.roles(named, request_only, columns)
    inputs.check_tensors({name: x for name, x in named if isinstance(x, Tensor)})
    counts = [(row_counts or {}).get(name, 1) for name, _ in named]
    if not isinstance(model, ExportedProgram):
        program = _export(model, args, kwargs, counts)
    with torch.no_grad():
        program = program.run_decompositions({})
    _refuse_mutation(program)
    batch = _batch_symbol(program, counts)
    packed = [p if isinstance(p := given.get(name), Packed) else None for name, _ in named]
    layouts = tuple(map(Layout, counts, packed))
    parts, names, roles = split_packed(named, given)
    _, structure = pytree.tree_flatten((args, kwargs))
    args, kwargs = pytree.tree_unflatten(parts, structure)
    return Captured(program, batch, args, kwargs, names, roles, layouts, structure, signature)


def split_packed(
    named: Sequence[tuple[str, Any]], given: Mapping[str, str | Packed]
) -> tuple[list[Any], tuple[str | None, ...], dict[str, str]]:
    """The flat inputs, packed ones as a dict of their parts, and the names and roles of all."""
    values: list[Any] = []
    names: list[str | None] = []
    roles: dict[str, str] = {}
    for name, value in named:
        role = given.get(name) if isinstance(value, Tensor) else None
        if isinstance(role, Packed):
            values.append(role.split(value))
            parts = [f"{name}.{side}" for side in SIDES]
            names += parts
            roles |= dict(zip(parts, ("user", "candidate"), strict=True))
        else:
            values.append(value)
            names.append(name if role is not None else None)
            roles |= {} if role is None else {name: role}
    return values, tuple(names), roles


def _program_signature(program: ExportedProgram) -> inspect.Signature:
    call = program.module_call_graph[0].signature
    names = (call.forward_arg_names if call is not None else None) or []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Sequence[int]
) -> ExportedProgram:
    shapes = ShapesCollection()
    batch = Dim("batch", min=1, max=_MAX_BATCH // max(counts, default=1))
    for leaf, count in zip(pytree.tree_leaves((args, kwargs)), counts, strict=True):
        if isinstance(leaf, Tensor):
            shapes[leaf] = {0: batch if count == 1 else count * batch}
    before = [(child, dict(vars(child))) for child in model.modules()]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused encoder operators of nn.Transformer hide what the rules look for.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), _masks_unread():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise TransformError(
            "ikbo.transform: torch.export could not capture the model with a free batch size: "
            f"{_first_lines(str(error))}"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        _put_back(before)


@contextmanager
def _masks_unread() -> Iterator[None]:
    """Keeps nn.Transformer from reading whether its mask is causal, which no export can follow.

    The answer is a hint beside the mask, which is applied whatever it is.
    """
    layers = torch.nn.modules.transformer
    read = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = read


def _put_back(before: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Takes away what the trace left in attributes that the model sets when it runs."""
    for module, attributes in before:
        for name, value in list(vars(module).items()):
            if isinstance(value, FakeTensor):
                vars(module).pop(name)
                vars(module).update({name: attributes[name]} if name in attributes else {})


def _first_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[:count])


def _refuse_mutation(program: ExportedProgram) -> None:
    nodes = {node.name: node for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            what = "buffer" if spec.kind is OutputKind.BUFFER_MUTATION else "input"
            raise TransformError(
                f"ikbo.transform: the model writes to its {what} {spec.target!r} "
                f"({source_line(nodes[spec.arg.name])}); a ranking model must not change when it "
                "runs: call model.eval(), or write to a copy"
            )


def _batch_symbol(program: ExportedProgram, counts: Sequence[int]) -> sympy.Symbol:
    found: dict[str, Any] = {}
    nodes = {node.name: node for node in program.graph.nodes}
    for name, count in zip(program.graph_signature.user_inputs, counts, strict=True):
        value = nodes[name].meta.get("val") if isinstance(name, str) and name in nodes else None
        if isinstance(value, Tensor):
            size = value.shape[0]
            rows = size.node.expr if isinstance(size, torch.SymInt) else size
            found[str(name)] = rows if count == 1 else rows / count
            others = [d for d in value.shape[1:] if isinstance(d, torch.SymInt)]
            if others:
                raise TransformError(
                    f"ikbo.transform: only the batch may be dynamic; input {name!r} has the shape "
                    f"{tuple(value.shape)}; export it with its other axes static"
                )
    symbols = set(found.values())
    if len(symbols) != 1 or not isinstance(next(iter(symbols)), sympy.Symbol):
        raise TransformError(
            "ikbo.transform: the first axis of every input must be one dynamic batch size; "
            f"got {found}; export the program with one Dim for all inputs"
        )
    return symbols.pop()
