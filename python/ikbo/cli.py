# SPDX-License-Identifier: Apache-2.0
"""The command line `ikbo`: transform, explain, package and sign a model; calibrate a machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikbo._cli_costs import add_calibrate, add_cost_options, ratio_of, run_calibrate
from ikbo._cli_package import add_package_options, both_forms_of, roles_of, spelled_out
from ikbo._cli_signing import add_signing
from ikbo._factory import UsageError, load

_MODEL_HELP = """\
MODEL is MODULE:FUNCTION or FILE.py:FUNCTION. The function takes no arguments and returns
(model, example_inputs): an nn.Module in eval mode, and its inputs as a tuple or as a dict by
parameter name. Modules are looked for in the current folder first.

Inputs are named by the model's parameters; an input nested in a dict by its path, features.age;
columns of a packed input as Python writes them, x[:, 3:7], or by names that --columns gives, x.age.
"""
_TRANSFORM_HELP = (
    "Every example input has the candidates as dimension 0, the user's rows repeated. At least 8\n"
    "distinct user rows and 8 distinct candidate rows: the result is verified on them.\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0 when done, 1 on failure; exits with 2 on bad usage."""
    options = _parser().parse_args(spelled_out(sys.argv[1:] if arguments is None else arguments))
    try:
        options.run(options)
    except (UsageError, ValueError, TypeError, RuntimeError, OSError) as error:
        if options.traceback:
            traceback.print_exc()
        print(f"ikbo {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ikbo {options.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ikbo",
        description="User work once per user: transform ranking models, package them for a server.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, text in (
        (
            "transform",
            _transform,
            "rewrite a model for user batch and candidate batch, save the program",
        ),
        ("explain", _explain, "report what transform makes of each operator, and why"),
        ("package", _package, "compile a model into a .pt2 package for ikbo-server"),
    ):
        notes = _MODEL_HELP if name == "package" else _MODEL_HELP + _TRANSFORM_HELP
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=notes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("model", metavar="MODEL", help="what makes the model; see below")
        _add_input_options(command, name)
        command.add_argument(
            "--max-users",
            type=int,
            default=None if name == "package" else 64,
            metavar="N",
            help="largest number of users in a run (default: 64)",
        )
        command.add_argument(
            "--max-candidates",
            type=int,
            default=8192,
            metavar="N",
            help="largest number of candidates in a run (default: 8192)",
        )
        add_cost_options(command)
        _add_traceback(command)
        if name == "package":
            add_package_options(command)
        else:
            _add_output(command, name)
    _add_report(commands)
    add_calibrate(commands, lambda options: run_calibrate(options, _Progress()))
    add_signing(commands)
    return parser


def _add_report(commands: Any) -> None:
    text = "draw a compilation spec as one HTML page"
    command = commands.add_parser("report", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=_report)
    command.add_argument(
        "spec",
        metavar="SPEC",
        help="a package of a transformed model, or what explain --json wrote",
    )
    command.add_argument("-o", "--output", metavar="FILE.html", required=True, help="the page")
    _add_traceback(command)


def _add_traceback(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )


def _add_input_options(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument(
        "--request-only",
        metavar="NAMES",
        required=name != "package",
        help="comma-separated names of the inputs that all candidates of a request share",
    )
    command.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="NAME=COLUMN[:WIDTH],...",
        help="the columns of a packed input in order, each one wide if no width is given; "
        "once per packed input",
    )
    command.add_argument(
        "--row-count",
        action="append",
        default=[],
        metavar="NAME=N",
        help="an input has N rows per candidate, one candidate's after another; once per input",
    )


def _add_output(command: argparse.ArgumentParser, name: str) -> None:
    if name == "transform":
        command.add_argument(
            "-o",
            "--output",
            metavar="FILE.pt2",
            required=True,
            help="where to save the exported program; torch.export.load reads it",
        )
        return
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of a table")
    form.add_argument("--html", action="store_true", help="print a page with the graph's picture")
    command.add_argument("-o", "--output", metavar="FILE", help="write there instead of printing")


class _Progress:
    """Prints each step with the seconds since the start, on stderr."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", file=sys.stderr, flush=True)


def _transformed(options: argparse.Namespace, progress: _Progress) -> Any:
    import ikbo
    from ikbo.transform.packed import columns_of_texts, counts_of_texts, split_commas

    progress(f"loading {options.model}")
    model, example_inputs = load(options.model)
    progress("transforming and verifying")
    return ikbo.transform(
        model,
        example_inputs,
        [name for name in split_commas(options.request_only) if name],
        columns=columns_of_texts(options.columns),
        row_counts=counts_of_texts(options.row_count),
        max_users=options.max_users or 64,
        max_candidates=options.max_candidates,
        ratio=ratio_of(options.ratio),
        device_costs=options.device_costs,
    )


def _transform(options: argparse.Namespace) -> None:
    import torch

    _check_output(options.output)
    progress = _Progress()
    module = _transformed(options, progress)
    torch.export.save(module.exported_program, options.output)
    progress(f"wrote {options.output}")
    print(module.report())


def _check_output(path: str) -> None:
    """Before minutes of work, not after."""
    if not path.endswith(".pt2") or not Path(path).resolve().parent.is_dir():
        raise UsageError(f"--output must end with .pt2, in an existing folder; got {path!r}")


def _explain(options: argparse.Namespace) -> None:
    spec = _transformed(options, _Progress()).spec
    form = spec.to_json if options.json else spec.to_html if options.html else spec.table
    text = form()
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def _report(options: argparse.Namespace) -> None:
    from ikbo._archive import read_manifest
    from ikbo.transform import Spec

    path = Path(options.spec)
    if path.suffix != ".pt2":
        spec = Spec.from_json(path.read_text(encoding="utf-8"))
    elif document := read_manifest(path).spec:
        spec = Spec.from_json(json.dumps(document))
    else:
        raise UsageError(f"{path} has no spec: its model was not made by ikbo.transform")
    Path(options.output).write_text(spec.to_html(), encoding="utf-8")


def _package(options: argparse.Namespace) -> None:
    import ikbo

    if bool(options.request_only) == bool(options.role):
        raise UsageError("give either --request-only or --role for each input")
    _check_output(options.output)
    progress = _Progress()
    if options.request_only:
        source, arguments = _transformed(options, progress), {}
    else:
        progress(f"loading {options.model}")
        source, example_inputs = load(options.model)
        arguments = {
            "example_inputs": example_inputs,
            "roles": roles_of(options.role),
            "max_users": options.max_users,
            "max_candidates": options.max_candidates,
        }
        if options.max_users is None and "user" in arguments["roles"].values():
            arguments["max_users"] = 64
    manifest = ikbo.package(
        source,
        options.output,
        name=options.name,
        version=options.version,
        tolerance=options.tolerance,
        both_forms=both_forms_of(options.both_forms),
        user_stage=options.user_stage,
        progress=progress,
        **arguments,
    )
    size = Path(options.output).stat().st_size
    progress(
        f"wrote {options.output}: {size / 2**20:.1f} MiB, up to {manifest.max_users} users and "
        f"{manifest.max_candidates} candidates, {len(manifest.replay)} replay cases"
    )
