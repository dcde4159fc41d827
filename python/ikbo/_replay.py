# SPDX-License-Identifier: Apache-2.0
"""Replay cases: inputs and expected outputs that travel in a package, to check it anywhere."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ikbo._archive import Staged
from ikbo._kernels import kernels_at
from ikbo._manifest import COMPOSITE, Manifest, ReplayCase
from ikbo._served import ServedModel


@dataclass(frozen=True)
class Case:
    """A replay case with its tensors."""

    record: ReplayCase
    inputs: Sequence[Tensor]
    expected: Sequence[Tensor]


def make_cases(
    served: ServedModel, forms: Mapping[str, ExportedProgram], tolerance: float | None
) -> tuple[Case, ...]:
    """Runs the eager module on several batches; expected outputs are its.

    Args:
        forms: name of a form to its lowered program; without variants there is one.
        tolerance: relative; None for one from the dtypes.
    """

    def program_for(num_users: int, num_candidates: int) -> ExportedProgram:
        own = [v.form for v in served.variants if v.holds(num_users, num_candidates)]
        return forms[own[0]] if own else next(iter(forms.values()))

    drawn = []
    for name, cand_to_user, num_users in _batches(served):
        inputs = served.make_inputs(num_users, cand_to_user, zlib.crc32(name.encode()))
        drawn.append((name, num_users, cand_to_user.numel(), inputs, served.module(*inputs)))
    outputs = [x for *_, expected in drawn for x in expected]
    rtol = tolerance_of(served, outputs) if tolerance is None else tolerance
    scales = [
        max(float(x.abs().max()) for x in cases)
        for cases in zip(*(expected for *_, expected in drawn), strict=True)
        if cases[0].is_floating_point()
    ]
    atol = rtol * min(scales, default=0.0)
    return tuple(
        Case(
            ReplayCase(
                id=name,
                num_users=num_users if served.max_users else 0,
                num_candidates=num_candidates,
                inputs=tuple(f"replay/{name}/input_{i}.bin" for i in range(len(inputs))),
                outputs=tuple(f"replay/{name}/output_{i}.bin" for i in range(len(expected))),
                atol=atol,
                rtol=rtol,
                kernels=tuple(
                    run
                    for run in kernels_at(program_for(num_users, num_candidates), inputs)
                    if run.kernel != COMPOSITE
                ),
            ),
            inputs,
            expected,
        )
        for name, num_users, num_candidates, inputs, expected in drawn
    )


def _batches(served: ServedModel) -> list[tuple[str, Tensor, int]]:
    """(id, cand_to_user, U) of each case, within the package's range; of variants the first run."""
    max_users, max_candidates = served.max_users, served.max_candidates
    cases: dict[str, tuple[int, int, Callable[[Tensor, int], Tensor]]] = {
        "one_candidate": (1, 1, lambda b, users: b * 0),
        "one_user": (1, 7, lambda b, users: b * 0),
        "shuffled": (4, 13, lambda b, users: b % users),
        "uneven": (3, 29, lambda b, users: (users - 1 - b).clamp(min=0)),
        "idle_users": (7, 37, lambda b, users: b % users // 2 * 2),
    }
    if len(served.variants) > 1:
        for i, variant in enumerate(served.variants):
            sizes = (variant.users[0], variant.candidates[0])
            if sizes[0] <= max_users and sizes[1] <= max_candidates:
                cases[f"variant_{i}"] = (*sizes, lambda b, users: b % users)
    batches = []
    for name, (num_users, num_candidates, pick) in cases.items():
        users = min(num_users, max(max_users, 1))
        order = torch.randperm(
            min(num_candidates, max_candidates), generator=torch.Generator().manual_seed(users)
        )
        batches.append((name, pick(order, users).to(torch.int32), users))
    return batches


def tolerance_of(served: ServedModel, outputs: Sequence[Tensor]) -> float:
    """Relative tolerance for the rounding of a model's coarsest floating dtype."""
    tensors = [*served.module.parameters(), *served.module.buffers(), *outputs]
    dtypes = {x.dtype for x in tensors if x.is_floating_point()} or {torch.float32}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return torch.finfo(coarsest).eps * (1024 if coarsest.itemsize >= 4 else 8)


def check(path: str | os.PathLike[str], manifest: Manifest, cases: Sequence[Case]) -> None:
    """Runs a compiled package on every case. Raises RuntimeError where it leaves the tolerance.

    One in two stages runs with the user stage for all users at once and for each of them alone.
    """
    if manifest.user_stage is None:
        runs = [torch._inductor.aoti_load_package(os.fspath(path))]
    else:
        runs = [Staged(path, manifest), Staged(path, manifest, alone=True)]
    for run, case in itertools.product(runs, cases):
        for i, (actual, expected) in enumerate(zip(run(*case.inputs), case.expected, strict=True)):
            _compare(case.record, i, actual, expected)


def _compare(record: ReplayCase, output: int, actual: Tensor, expected: Tensor) -> None:
    if torch.allclose(actual, expected, rtol=record.rtol, atol=record.atol, equal_nan=True):
        return
    error = (actual.double() - expected.double()).abs()
    raise RuntimeError(
        f"ikbo.package: output {output} of the compiled package must be within atol "
        f"{record.atol:.3g} + rtol {record.rtol:.3g} of the eager module in replay case "
        f"{record.id}; the largest difference is {float(error.max()):.3g}; pass tolerance= if the "
        "model's rounding explains it"
    )


def entries(cases: Sequence[Case]) -> Mapping[str, Tensor]:
    """Entry name to tensor, for the archive."""
    return {
        name: tensor
        for case in cases
        for names, tensors in (
            (case.record.inputs, case.inputs),
            (case.record.outputs, case.expected),
        )
        for name, tensor in zip(names, tensors, strict=True)
    }
