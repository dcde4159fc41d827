# SPDX-License-Identifier: Apache-2.0
"""A served model as programs with the batches U and B, and what these take and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ikbo import _inductor
from ikbo._manifest import CANDIDATE, DTYPE_NAMES, INDEX, USER, TensorSpec
from ikbo._served import ServedModel
from ikbo._value_ranges import ValueRange


def export(served: ServedModel, module: nn.Module) -> ExportedProgram:
    """The program of a module over the served model's flat inputs."""
    num_users, num_candidates = served.export_sizes()
    index = torch.arange(num_candidates, dtype=torch.int32) % num_users
    inputs = served.make_inputs(num_users, index, seed=0)
    return export_over(served, module, inputs, list(served.roles.values()))


def export_over(
    served: ServedModel, module: nn.Module, inputs: Sequence[Tensor], roles: Sequence[str]
) -> ExportedProgram:
    """The program of a module over flat inputs of these roles, with the named dimensions U and B.

    Args:
        module: takes the inputs as one list of arguments, `*tensors`.
    """
    dims = {
        USER: Dim("U", min=1, max=max(served.max_users, 2)),
        CANDIDATE: Dim("B", min=1, max=max(served.max_candidates, 2)),
    }
    shapes = tuple({0: dims.get(role, dims[CANDIDATE])} for role in roles)
    try:
        program = torch.export.export(
            module,
            tuple(inputs),
            dynamic_shapes=(shapes,),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    except Exception as error:
        raise RuntimeError(
            f"ikbo.package: torch.export of {type(served.module.inner).__name__} with batches U "
            f"and B failed: {error}"
        ) from error
    _inductor.own_storage(program)
    return program


def input_specs(
    served: ServedModel, program: ExportedProgram, ranges: Mapping[str, ValueRange]
) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name,
            DTYPE_NAMES[x.dtype],
            (-1, *x.shape[1:]),
            served.roles[name],
            ranges.get(node) if served.roles[name] != INDEX else None,
        )
        for (name, x), node in zip(
            served.examples.items(), program.graph_signature.user_inputs, strict=True
        )
    )


def output_specs(served: ServedModel, program: ExportedProgram) -> tuple[TensorSpec, ...]:
    """Names and roles of the outputs; the batch of each is read off its symbolic shape."""
    with torch.no_grad():
        names = served.output_names(
            served.make_inputs(1, torch.zeros(1, dtype=torch.int32), seed=0)
        )
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    batch = {
        str(values[node].shape[0]): USER if role == USER else CANDIDATE
        for node, role in zip(
            program.graph_signature.user_inputs, served.roles.values(), strict=True
        )
    }
    specs = []
    for output, node in zip(names, program.graph_signature.user_outputs, strict=True):
        value = values[node]
        rows = str(value.shape[0]) if value.dim() else "none"
        if rows not in batch or not all(isinstance(size, int) for size in value.shape[1:]):
            raise ValueError(
                f"ikbo.package: output {output} must have shape [U, ...] or [B, ...] with fixed "
                f"sizes after the batch; got {[str(size) for size in value.shape]}"
            )
        specs.append(
            TensorSpec(output, DTYPE_NAMES[value.dtype], (-1, *value.shape[1:]), batch[rows])
        )
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError(f"ikbo.package: output names must be unique; got {names}")
    return tuple(specs)


def compile_archive(
    path: Path,
    programs: Mapping[str, ExportedProgram],
    inputs: Mapping[str, Sequence[TensorSpec]],
    options: Mapping[str, Any],
) -> None:
    """Compiles programs into an archive; the code says what the runtime holds the manifest against.

    Args:
        programs: by the name of their folder in the archive.
        inputs: of each of them.
        options: of Inductor.
    """
    given = options.get("aot_inductor.metadata", {})
    metadata = {
        name: {**given, "ikbo.inputs": "\n".join(spec.layout() for spec in inputs[name])}
        for name in programs
    }
    with open(path, "w+b") as file:
        _inductor.compile_to(
            {
                name: (program, {**options, "aot_inductor.metadata": metadata[name]})
                for name, program in programs.items()
            },
            file,
        )
