# SPDX-License-Identifier: Apache-2.0
"""`ikbo.package`: from a module to one .pt2 file that the C++ runtime serves without Python."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ikbo import _inductor, _replay
from ikbo._archive import append_to_archive
from ikbo._forms import choose
from ikbo._kernels import ops_of
from ikbo._manifest import MODEL, Manifest, TensorSpec
from ikbo._programs import compile_archive
from ikbo._served import ServedModel, from_module, from_transformed
from ikbo._stages import take_apart
from ikbo._torch_warnings import quiet
from ikbo.transform.break_even import MEASURED
from ikbo.transform.variants import REPLICATED

# What names a model in a server's paths. A client takes the segments "." and ".." out of a path.
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]+")


@quiet()
def package(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    roles: Mapping[str, str] | None = None,
    max_users: int | None = None,
    max_candidates: int | None = None,
    name: str = "model",
    version: str = "1",
    tolerance: float | None = None,
    both_forms: bool | str = False,
    user_stage: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Manifest:
    """Compiles a module ahead of time into a package for `ikbo-server` and `ikbo-replay`.

    The package has two batches: U users, 1..max_users, and B candidates, 1..max_candidates. Its
    device is that of the example inputs; on a GPU the code is for that GPU's compute capability
    alone. It is compiled, run on the replay cases and compared with
    the eager module before `path` appears; on any failure `path` is left as it was.

    Args:
        module: a `TransformedModule` of `ikbo.transform`, or a plain module in eval mode, written
            for two batches (with an index input, int32 `[B]`) or for candidates alone.
        path: the file to write; its name ends with `.pt2`. An existing file is replaced.
        example_inputs: plain modules only. Positional arguments (tuple) or keyword arguments (dict)
            of the module; tensors may be nested in dicts, lists and tuples. Dimension 0 of each is
            its batch, with any number of rows: rows are drawn from them for export and replay, so
            they must be valid together (ids within their tables, lengths within their histories).
        roles: plain modules only. Input name to "user" (`[U, ...]`), "candidate" (`[B, ...]`) or
            "index". A nested input is named by its path, `features.age`, without the first part
            where the container is the only argument.
        max_users: largest U of a run, at most 2^31-1. A transformed module may narrow its range.
            None or 0 for a module without user inputs.
        max_candidates: largest B of a run, likewise.
        name, version: what a server calls the model: letters, digits, `.`, `_`, `-`, but not `.` or
            `..`.
        tolerance: relative tolerance T of the replay cases, against the eager module; an output
            passes when |actual - expected| <= T * (s + |expected|), s the smallest of the outputs'
            largest magnitudes. None: 1024 units of rounding in fp32 and fp64, 8 in 16-bit models.
        both_forms: transformed modules only. Whether batches of so few candidates per user that the
            unmodified model is the faster one are run by that model, its users repeated; the
            package then holds both forms, which share weights. True: where the cost model estimates
            it (`spec.pays_from["package"]`). "measured": where both forms, compiled, were timed in
            turn on this device, with torch's number of threads and rows of the example inputs; one
            form alone where the other one is nowhere faster by more than noise.
        user_stage: whether what is computed of users alone becomes a program of its own, whose
            results `ikbo-server` can keep for a user's next request. A weight that both programs
            read is held by both. Not with a `both_forms` by which the unmodified model runs.
        inductor_options: further options of TorchInductor; they win over ikbo's.
        progress: called with a line of text before each long step.

    Returns:
        The manifest that was written.

    Errors:
        TypeError, ValueError: an argument is not as described, or an output has no batch.
        RuntimeError: the module cannot be exported with two batches, calls an operator that the
            runtime does not have, or the compiled code misses the tolerance.

    Cost:
        Half a minute to some minutes, most of it in the C++ compiler. `both_forms="measured"`
        compiles two or three programs and times them for up to about 25 seconds, with the weights
        of two of them in memory beside the module's.
    """
    target = _check_target(path)
    for argument, value in (("name", name), ("version", version)):
        check_name(argument, value)
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):
        raise ValueError(f"ikbo.package: tolerance must be a number >= 0; got {tolerance!r}")
    report = progress or (lambda _: None)
    served = _served(module, example_inputs, roles, max_users, max_candidates, both_forms)
    options = {**_inductor.compile_options(served.device.type), **(inductor_options or {})}
    with torch.no_grad(), contextlib.ExitStack() as drafts:

        def compiled(form: str, program: ExportedProgram, inputs: Sequence[TensorSpec]) -> Path:
            path = target.with_name(f".{target.stem}.{os.getpid()}.{form.replace(' ', '_')}.pt2")
            drafts.callback(path.unlink, missing_ok=True)
            compile_archive(path, {MODEL: program}, {MODEL: inputs}, options)
            return path

        _check_stages(served, user_stage)
        chosen = choose(served, both_forms, compiled, report)
        served = chosen.served
        _check_stages(served, user_stage)
        programs, stage = {MODEL: chosen.program}, None
        if user_stage:
            report("taking users and candidates apart")
            stages = take_apart(served, chosen.program)
            programs, stage = stages.programs, stages.user_stage
            if stages.shared_bytes:
                report(f"both stages hold the same weights of {stages.shared_bytes} bytes")
        report("computing the replay cases")
        cases = _replay.make_cases(served, chosen.forms, tolerance)
        manifest = Manifest(
            model_name=name,
            model_version=version,
            torch_version=torch.__version__,
            device=served.device.type,
            compute_capability=_compute_capability(served.device),
            inputs=chosen.inputs,
            outputs=chosen.outputs,
            max_users=served.max_users,
            max_candidates=served.max_candidates,
            ops=ops_of(*chosen.forms.values()),
            replay=tuple(case.record for case in cases),
            spec={} if served.spec is None else json.loads(served.spec.to_json()),
            user_stage=stage,
        )
        archive = None if user_stage else chosen.archive
        return _write(target, manifest, archive or programs, cases, options, report)


def _check_stages(served: ServedModel, user_stage: bool) -> None:
    if user_stage and any(variant.form == REPLICATED for variant in served.variants):
        raise ValueError(
            "ikbo.package: user_stage and both_forms must not come together: the unmodified form "
            "has no user stage"
        )


def check_name(argument: str, value: Any) -> None:
    """Raises ValueError where a model cannot be called `value`, the argument `argument`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"ikbo.package: {argument} must be letters, digits, '.', '_' or '-', but not '.' or "
            f"'..'; got {value!r}"
        )


def _compute_capability(device: torch.device) -> int | None:
    """90 for 9.0; None on the CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _check_target(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"ikbo.package: path must be a str or a path; got {type(path).__name__}")
    target = Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"ikbo.package: path must end with .pt2; got {str(path)!r}")
    if not target.parent.is_dir():
        raise ValueError(
            f"ikbo.package: path must be in an existing folder; {str(target.parent)!r} is none"
        )
    if target.is_dir():
        raise ValueError(f"ikbo.package: path must be a file; {str(target)!r} is a folder")
    return target


def _served(
    module: nn.Module,
    example_inputs: Any,
    roles: Mapping[str, str] | None,
    max_users: int | None,
    max_candidates: int | None,
    both_forms: bool | str,
) -> ServedModel:
    if not isinstance(module, nn.Module):
        raise TypeError(f"ikbo.package: module must be an nn.Module; got {type(module).__name__}")
    from ikbo.transform import ChainedModule, TransformedModule

    if not isinstance(both_forms, bool) and both_forms != MEASURED:
        raise ValueError(
            f'ikbo.package: both_forms must be False, True or "{MEASURED}"; got {both_forms!r}'
        )
    if isinstance(module, ChainedModule):
        raise ValueError(
            "ikbo.package: a package has two batches, users and candidates; the module has the "
            f"levels {list(module.levels)}: transform the model with a list in request_only"
        )
    if not isinstance(module, TransformedModule):
        if both_forms is not False:
            raise ValueError("ikbo.package: both_forms is for transformed modules; got a plain one")
        return from_module(module, example_inputs, roles, max_users, max_candidates)
    if example_inputs is not None or roles is not None:
        raise ValueError(
            "ikbo.package: example_inputs and roles must be left out for a transformed module, "
            "which knows its own"
        )
    return from_transformed(module, max_users, max_candidates, both_forms)


def _write(
    target: Path,
    manifest: Manifest,
    made_of: Path | Mapping[str, ExportedProgram],
    cases: Sequence[_replay.Case],
    options: Mapping[str, Any],
    report: Callable[[str], None],
) -> Manifest:
    """Writes a file beside `target`, checks it, renames it: `target` is whole or untouched.

    Args:
        made_of: an archive of the compiled program, which becomes the file, or what to compile.

    Returns the manifest with the digests of what was written.
    """
    draft = target.with_name(f".{target.stem}.{os.getpid()}.pt2")
    try:
        if isinstance(made_of, Path):
            os.replace(made_of, draft)
        else:
            report("compiling (half a minute or more)")
            compile_archive(draft, made_of, manifest.program_inputs, options)
        report("running the compiled package on the replay cases")
        _replay.check(draft, manifest, cases)
        manifest = append_to_archive(draft, manifest, _replay.entries(cases))
        os.replace(draft, target)
        return manifest
    finally:
        draft.unlink(missing_ok=True)
