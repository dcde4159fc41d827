# SPDX-License-Identifier: Apache-2.0
"""The pass: from an unmodified ranking model to one whose user inputs stay at user batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ikbo._torch_warnings import quiet
from ikbo.transform import device_costs as _device_costs
from ikbo.transform.capture import Captured, capture
from ikbo.transform.choose import Forms, Range, best_of, pays_from, range_of
from ikbo.transform.device_costs import DeviceCosts
from ikbo.transform.errors import TransformError
from ikbo.transform.inputs import INDEX
from ikbo.transform.interpret import FactoredModel
from ikbo.transform.module import TransformedModule
from ikbo.transform.spec import Spec
from ikbo.transform.spec_build import batch_symbols, build_spec
from ikbo.transform.verify import module_of
from ikbo.transform.verify import verify as _verify

__all__ = ["DeviceCosts", "Spec", "TransformError", "TransformedModule", "explain", "transform"]

# Batch sizes to export with: primes, so that neither is a multiple of the other or of a feature
# size.
_USER_SIZES = (7, 5, 3, 2)
_CANDIDATE_SIZES = (23, 19, 17, 13, 11, 7, 5, 3)


@quiet()
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
    ratio: float | tuple[float, float] | None = None,
    device_costs: DeviceCosts | str | os.PathLike[str] | None = None,
) -> TransformedModule:
    """Rewrites a model so that everything that depends on the user alone runs once per user.

    `transformed(user[U], cand[B], cand_to_user=i) == model(user[i], cand)`

    Args:
        model: an `nn.Module` in eval mode, or an `ExportedProgram` with one dynamic batch size.
        example_inputs: inputs of the unmodified model, positional (tuple) or by keyword (dict),
            tensors nested as the model takes them. Every tensor has the batch as its first axis
            (see `row_counts`), user rows replicated. At least 8 distinct user rows and 8 distinct
            candidate rows: the result is verified on them.
        request_only: names of the inputs that are the same for all candidates of a request. A
            nested input is named by its path, `features.age`; a container's name stands for all in
            it. Where the only argument is a container, names are its keys. Columns of a packed
            input are named as Python writes them, `x[:, 3:7]` or `x[:, [0, 5:8]]`, or by a name
            that `columns` gives them, `x.age`. At least one input or column, and not all.
        columns: per packed input, what its columns (along its last axis) are called: a list with a
            name for each, or a dict from name to column or `(start, stop)`.
        row_counts: per input that does not have one row per candidate, how many it has, one
            candidate's after another: n for the shape `[n * batch, ...]`. Such an input counts as
            `[batch, n, ...]`, in `request_only` as in the transformed module.
        max_users, max_candidates: largest U and B of a run.
        ratio: candidates per user that runs will have, a number or the smallest and the largest; by
            default 10 to max_candidates. What costs more than it saves there is not split.
        device_costs: what work costs on the device: `DeviceCosts`, or a file that `ikbo calibrate`
            wrote; by default those that ikbo ships for the kind of device, and where there are
            none, every split is made.

    Returns:
        The transformed module.

    Errors:
        TypeError, ValueError: an argument is not as described.
        TransformError: the model cannot be split, or the result differs; the text names the
            operator and its source line.

    Cost:
        Two exports, three where a split is left out, and some runs of the unmodified model on up
        to 64 rows.

    Notes: weights are copied where they were sliced or folded and shared where not.
    """
    for name, value in (("max_users", max_users), ("max_candidates", max_candidates)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"ikbo.transform: {name} must be an int in 1..2^31-1; got {value!r}")
    limits = (max_users, max_candidates)
    runs = range_of(ratio, limits)
    captured = capture(model, example_inputs, request_only, columns, row_counts)
    costs = _device_costs.device_costs(device_costs, captured.device.type)
    program, broadcasts = _chosen(captured, limits, costs, runs)
    spec = build_spec(captured, program, broadcasts, limits)
    pays = {
        how: pays_from(Forms(captured, program, costs, in_package=how == "package"), runs)
        for how in ("eager", "package")
    }
    spec = replace(spec, pays_from=pays)
    roles = captured.roles | {INDEX: "index"}
    module = TransformedModule(program, roles, spec, captured.caller_of(module_of(model)))
    _verify(model, captured, module.run_nested, limits)
    return module


def _chosen(
    captured: Captured, limits: tuple[int, int], costs: DeviceCosts, runs: Range
) -> tuple[ExportedProgram, list[tuple[str, str]]]:
    """Steps 2 to 5: the program with the splits that pay, and what had to be broadcast."""
    programs: list[ExportedProgram] = []
    broadcasts, times = [], []
    kept: dict[str, str] = {}
    while len(programs) < 2:
        factored, flat, index = _factor(captured, limits, kept)
        programs.append(_export(captured, factored, flat, index, limits))
        broadcasts.append(factored.broadcasts)
        forms = Forms(captured, programs[-1], costs, in_package=True)
        times.append(forms.transformed)
        kept = forms.losers({name for name, _ in factored.broadcasts}, runs)
        if not kept:
            break
    best = best_of(times, runs.corners())
    return programs[best], broadcasts[best]


def explain(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
    ratio: float | tuple[float, float] | None = None,
    device_costs: DeviceCosts | str | os.PathLike[str] | None = None,
) -> Spec:
    """The compilation spec of a model: what `transform` makes of each operator, and why.

    Takes the arguments of `transform`, raises its errors, and verifies as it does.

    Returns:
        The spec; `table()` is for people, `to_json()` for programs.
    """
    return transform(
        model,
        example_inputs,
        request_only,
        columns=columns,
        row_counts=row_counts,
        max_users=max_users,
        max_candidates=max_candidates,
        ratio=ratio,
        device_costs=device_costs,
    ).spec


def _factor(
    captured: Captured, limits: tuple[int, int], kept: Mapping[str, str] | None = None
) -> tuple[FactoredModel, list[Any], Tensor]:
    """The walked model, with the inputs it was walked and will be exported with."""
    fixed = _feature_sizes(captured)
    num_candidates = _pick(_CANDIDATE_SIZES, limits[1], fixed)
    num_users = _pick(_USER_SIZES, min(limits[0], num_candidates - 1), fixed)
    flat = []
    for x, role in zip(captured.flat, captured.flat_roles, strict=True):
        if role is not None:
            count = num_users if role == "user" else num_candidates
            x = x[torch.arange(count, device=x.device) % x.shape[0]]
        flat.append(x)
    index = torch.arange(num_candidates, dtype=torch.int32, device=captured.device) % num_users
    return FactoredModel(captured, flat, index, kept), flat, index


def _feature_sizes(captured: Captured) -> set[int]:
    values = [node.meta.get("val") for node in captured.program.graph.nodes]
    return {d for v in values if isinstance(v, Tensor) for d in v.shape if isinstance(d, int)}


def _pick(sizes: Sequence[int], limit: int, taken: set[int]) -> int:
    """A size within the range that divides no feature size, so that no shape fits by accident."""
    fitting = [size for size in sizes if size <= limit] or [sizes[-1]]
    return next((s for s in fitting if all(size % s for size in taken)), fitting[0])


def _export(
    captured: Captured,
    factored: FactoredModel,
    flat: list[Any],
    index: Tensor,
    limits: tuple[int, int],
) -> ExportedProgram:
    """Step 5: the walk, written down as a program with the dimensions U and B."""
    # A dimension must allow the size that it is exported with, which is more than one.
    users = Dim("U", min=1, max=max(limits[0], _USER_SIZES[-1]))
    candidates = Dim("B", min=1, max=max(limits[1], _CANDIDATE_SIZES[-1]))
    shapes = ShapesCollection()
    for x, role in zip(flat, captured.flat_roles, strict=True):
        if role is not None:
            shapes[x] = {0: users if role == "user" else candidates}
    shapes[index] = {0: candidates}
    args, kwargs = captured.nest(flat)
    try:
        with torch.no_grad():
            program = torch.export.export(
                factored, args, {**kwargs, INDEX: index}, dynamic_shapes=shapes
            )
        batch_symbols(program, captured)
    except Exception as error:
        raise TransformError(
            f"ikbo.transform: the model needs U and B to have fixed sizes: {error}"
        ) from error
    program.graph_module.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
