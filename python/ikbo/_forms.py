# SPDX-License-Identifier: Apache-2.0
"""Which forms of a model a package holds, and the program that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.export import ExportedProgram

from ikbo import _inductor, _measured
from ikbo._manifest import USER, TensorSpec
from ikbo._programs import export, input_specs, output_specs
from ikbo._served import ServedModel
from ikbo._value_ranges import ValueRange, both_ranges, bound_values
from ikbo.transform.break_even import MEASURED, NOISE, Timing, measured_pays_from
from ikbo.transform.variants import REPLICATED, TRANSFORMED, BothForms, variants_of

_BOTH = "both forms"

# Compiles a program, called so, into an archive of its own.
Compile = Callable[[str, ExportedProgram, Sequence[TensorSpec]], Path]


@dataclass(frozen=True)
class Chosen:
    """What is to be packaged.

    `forms` are the lowered programs that run over some part of the range, by form; `program` is
    what is compiled, and `archive` has it where it was compiled to be timed.
    """

    served: ServedModel
    forms: Mapping[str, ExportedProgram]
    program: ExportedProgram
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    archive: Path | None


def choose(
    served: ServedModel, both_forms: bool | str, compiled: Compile, report: Callable[[str], None]
) -> Chosen:
    """Exports the forms of a served model, and measures them where that is asked for.

    Args:
        both_forms: as `ikbo.package` takes it.
        compiled: compiles what is timed.
        report: called with a line of text before each long step.
    """
    report("exporting with batches U and B")
    traced = export(served, served.module)
    forms = {TRANSFORMED: _inductor.lowered(traced, served.device)}
    if served.replicated is not None:
        report("exporting the replicated form")
        replicated = export(served, served.replicated)
        forms[REPLICATED] = _inductor.lowered(replicated, served.device)
    ranges = {form: bound_values(program) for form, program in forms.items()}
    archives: dict[str, Path] = {}
    if both_forms == MEASURED:
        served, archives = _measure(served, forms, compiled, report)
    used = {variant.form for variant in served.variants} or {TRANSFORMED}
    forms = {form: program for form, program in forms.items() if form in used}
    program, name = _joined(served, forms)
    common = _ranges_of([ranges[form] for form in forms])
    return Chosen(
        served,
        forms,
        program,
        input_specs(served, next(iter(forms.values())), common),
        output_specs(served, traced),
        archives.get(name),
    )


def _joined(
    served: ServedModel, forms: Mapping[str, ExportedProgram]
) -> tuple[ExportedProgram, str]:
    """The one form, or both as branches of one program, with its name."""
    if len(forms) == 1:
        ((name, program),) = forms.items()
        return program, name
    user = list(served.roles.values()).index(USER)
    both = BothForms(forms[TRANSFORMED], forms[REPLICATED], served.variants, user)
    return export(served, both), _BOTH


def _ranges_of(ranges: Sequence[dict[str, ValueRange]]) -> dict[str, ValueRange]:
    return ranges[0] if len(ranges) == 1 else both_ranges(*ranges)


def _measure(
    served: ServedModel,
    forms: Mapping[str, ExportedProgram],
    compiled: Compile,
    report: Callable[[str], None],
) -> tuple[ServedModel, dict[str, Path]]:
    """Times the forms, and both in one where each is the faster one somewhere.

    Both are kept where the transformed form is slower when it is timed once more, too, and both in
    one are less slow on average, which chance changes less than the worst.

    Returns:
        The served model with the variants that were found, and the archives that were compiled.
    """
    archives: dict[str, Path] = {}

    def add(name: str, program: ExportedProgram) -> Path:
        report(f"compiling {name} to time it (half a minute or more)")
        archives[name] = compiled(name, program, input_specs(served, program, {}))
        return archives[name]

    for form, program in forms.items():
        add(form, program)

    def timed(name: str, step: str, of: Callable[[_measured.Timer], Any]) -> Any:
        with _measured.alone():
            report(step)
            return of(_measured.Contest(served, archives[name], archives[REPLICATED]))

    def again(name: str, step: str) -> list[float]:
        return timed(name, step, lambda timer: _measured.timed_again(timer, timings))

    limits = (served.max_users, served.max_candidates)
    timings = timed(
        TRANSFORMED,
        "timing both forms (up to 20 seconds)",
        lambda timer: _measured.measured(timer, *limits),
    )
    decided = _with_timings(served, timings, measured_pays_from(timings, _limits(served)))
    if len({variant.form for variant in decided.variants}) == 2:
        split = again(TRANSFORMED, "timing again where the transformed form was slowest")
        is_worth = max(split) > 1 + NOISE
        if is_worth:
            add(_BOTH, _joined(decided, forms)[0])
            choice = again(_BOTH, "timing the choice between both forms")
            is_worth = fmean(split) > fmean(choice) + NOISE / 2
        if not is_worth:
            decided = _with_timings(served, timings, ((1, 1),))
    forms_left = dict.fromkeys(variant.form for variant in decided.variants)
    report(f"measured: {' and '.join(forms_left)}")
    return decided, archives


def _limits(served: ServedModel) -> tuple[int, int]:
    return served.spec.max_users, served.spec.max_candidates


def _with_timings(
    served: ServedModel, timings: tuple[Timing, ...], pays: tuple[tuple[int, int], ...]
) -> ServedModel:
    """The served model with the variants of these pairs, which the timings gave."""
    spec = replace(
        served.spec,
        variants=variants_of(pays, _limits(served)),
        pays_from={**served.spec.pays_from, "package": pays},
        measured=timings,
    )
    return replace(served, spec=spec)
