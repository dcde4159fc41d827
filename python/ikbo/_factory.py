# SPDX-License-Identifier: Apache-2.0
"""A model as the command line names it: MODULE:FUNCTION or FILE.py:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """What a user of the command line can put right; printed without a traceback."""


def load(name: str) -> tuple[Any, Any]:
    """(model, example_inputs) that the factory named on the command line returns."""
    place, separator, function = name.rpartition(":")
    if not separator or not place or not function:
        raise UsageError(f"MODEL must be MODULE:FUNCTION or FILE.py:FUNCTION; got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    factory = getattr(_import(place), function, None)
    if not callable(factory):
        raise UsageError(f"MODEL must name a function of {place}; {function!r} is none")
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"{name}() failed: {_last_line(error)}") from error
    if not isinstance(made, tuple) or len(made) != 2:
        raise UsageError(f"{name}() must return (model, example_inputs); got {type(made).__name__}")
    return made


def _import(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        return importlib.import_module(path.stem)
    except Exception as error:
        raise UsageError(f"MODEL {place!r} cannot be imported: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """An error of the user's code, with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename.startswith("<") else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"
