# SPDX-License-Identifier: Apache-2.0
"""What `ikbo package` takes beside what all commands with a model take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ikbo._factory import UsageError

_BOTH_FORMS = "--both-forms"
# What it may be given to what `ikbo.package` takes.
_FORMS: dict[str, bool | str] = {"estimated": True, "measured": "measured"}


def add_package_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="instead of --request-only, for a model that is already written for two batches, or "
        "for candidates alone: the role of one input, user, candidate or index; once per input",
    )
    command.add_argument(
        _BOTH_FORMS,
        nargs="?",
        choices=list(_FORMS),
        const="estimated",
        metavar="=measured",
        help="let the unmodified model run batches of so few candidates that it is the faster one, "
        "by the cost model's estimate; with =measured as both forms, compiled, are timed here "
        "first, and only one of them is kept if the other one is nowhere faster",
    )
    command.add_argument(
        "--user-stage",
        action="store_true",
        help="compile what depends on the user alone as a stage of its own, whose results a server "
        "can keep for the user's next request",
    )
    command.add_argument("-o", "--output", metavar="FILE.pt2", required=True, help="the package")
    command.add_argument("--name", default="model", help="the model's name (default: model)")
    command.add_argument("--version", default="1", help="the model's version (default: 1)")
    command.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="relative tolerance of the replay cases (default: from the model's dtypes)",
    )


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Arguments in which a bare `--both-forms` does not take what comes behind it for its value."""
    return [f"{_BOTH_FORMS}=estimated" if text == _BOTH_FORMS else text for text in arguments]


def both_forms_of(text: str | None) -> bool | str:
    """What `ikbo.package` takes, of the value of --both-forms."""
    return False if text is None else _FORMS[text]


def roles_of(texts: Sequence[str]) -> dict[str, str]:
    """Input name to role, of the values of --role."""
    roles = {}
    for text in texts:
        name, separator, role = text.partition("=")
        if not separator:
            raise UsageError(f"--role must be NAME=ROLE; got {text!r}")
        roles[name] = role
    return roles
