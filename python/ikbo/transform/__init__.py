# SPDX-License-Identifier: Apache-2.0
"""The pass: from an unmodified ranking model to one whose user inputs stay at user batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from torch import nn
from torch.export import ExportedProgram

from ikbo._torch_warnings import quiet
from ikbo.transform import device_costs as _device_costs
from ikbo.transform.capture import Captured, capture
from ikbo.transform.chain import transform_chain
from ikbo.transform.chained_module import ChainedModule
from ikbo.transform.choose import Forms, Range, best_of, pays_from, range_of
from ikbo.transform.device_costs import DeviceCosts
from ikbo.transform.errors import TransformError
from ikbo.transform.inputs import INDEX
from ikbo.transform.levels import levels_of, two_levels
from ikbo.transform.module import TransformedModule
from ikbo.transform.spec import Spec
from ikbo.transform.spec_build import build_spec
from ikbo.transform.split import export, factor
from ikbo.transform.verify import verify as _verify

__all__ = [
    "ChainedModule",
    "DeviceCosts",
    "Spec",
    "TransformError",
    "TransformedModule",
    "explain",
    "transform",
]


@overload
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
) -> TransformedModule: ...


@overload
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Mapping[str, Sequence[str]],
    *,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
) -> ChainedModule: ...


@quiet()
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
    ratio: float | tuple[float, float] | None = None,
    device_costs: DeviceCosts | str | os.PathLike[str] | None = None,
) -> TransformedModule | ChainedModule:
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
            With more than two levels a dict from each level but the candidates, the outermost
            first, to the names of its inputs, `{"user": [...], "vendor": [...]}`; no columns.
        columns: per packed input, what its columns (along its last axis) are called: a list with a
            name for each, or a dict from name to column or `(start, stop)`.
        row_counts: per input that does not have one row per candidate, how many it has, one
            candidate's after another: n for the shape `[n * batch, ...]`. Such an input counts as
            `[batch, n, ...]`, in `request_only` as in the transformed module.
        max_users, max_candidates: largest U and B of a run; `max_candidates` holds for all levels
            but the outermost.
        ratio: candidates per user that runs will have, a number or the smallest and the largest; by
            default 10 to max_candidates. What costs more than it saves there is not split.
        device_costs: what work costs on the device: `DeviceCosts`, or a file that `ikbo calibrate`
            wrote; by default those that ikbo ships for the kind of device, and where there are
            none, every split is made. Neither is for more than two levels, where
            every split is made.

    Returns:
        The transformed module; of a dict with more than one level a `ChainedModule`.

    Errors:
        TypeError, ValueError: an argument is not as described.
        TransformError: the model cannot be split, or the result differs; the text names the
            operator and its source line.

    Cost:
        Two exports, and some runs of the unmodified model on up to 64 rows.

    Notes: weights are copied where they were sliced or folded and shared where not.
    """
    for name, value in (("max_users", max_users), ("max_candidates", max_candidates)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"ikbo.transform: {name} must be an int in 1..2^31-1; got {value!r}")
    limits = (max_users, max_candidates)
    if isinstance(request_only, Mapping):
        if ratio is not None or device_costs is not None:
            raise ValueError(
                "ikbo.transform: ratio and device_costs must be left out where request_only has "
                "levels: every split is made"
            )
        return _chain(model, example_inputs, request_only, columns, row_counts, limits)
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
    module = TransformedModule(program, roles, spec, model, captured)
    _verify(model, captured, module.run_nested, two_levels(captured.flat_roles, limits))
    return module


def _chosen(
    captured: Captured, limits: tuple[int, int], costs: DeviceCosts, runs: Range
) -> tuple[ExportedProgram, list[tuple[str, str]]]:
    """Steps 2 to 5: the program with the splits that pay, and what had to be broadcast."""
    programs: list[ExportedProgram] = []
    broadcasts, times = [], []
    kept: dict[str, str] = {}
    while len(programs) < 2:
        factored, flat, index = factor(captured, limits, kept)
        programs.append(export(captured, factored, flat, index, limits))
        broadcasts.append(factored.broadcasts)
        forms = Forms(captured, programs[-1], costs, in_package=True)
        times.append(forms.transformed)
        kept = forms.losers({name for name, _ in factored.broadcasts}, runs)
        if not kept:
            break
    best = best_of(times, runs.corners())
    return programs[best], broadcasts[best]


def _chain(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    request_only: Mapping[str, Sequence[str]],
    columns: Any,
    row_counts: Mapping[str, int] | None,
    limits: tuple[int, int],
) -> ChainedModule:
    if len(request_only) < 2:
        raise ValueError(
            "ikbo.transform: a dict in request_only must have two levels or more beside the "
            f"candidates; got {list(request_only)}; of one level give the list of its inputs"
        )
    names = [name for inputs in request_only.values() for name in inputs]
    captured = capture(model, example_inputs, names, columns, row_counts)
    if captured.columns:
        raise ValueError(
            "ikbo.transform: with more than two levels an input must be of one level as a whole; "
            f"request_only has columns: {names}"
        )
    levels = levels_of(request_only, captured.names, limits)
    module = transform_chain(captured, levels)
    _verify(model, captured, module, levels)
    return module


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
