# SPDX-License-Identifier: Apache-2.0
"""Finds and loads libikbo_ops.so, which registers the operators with PyTorch."""

import os
from pathlib import Path

import torch

_NAME = "libikbo_ops.so"
_BUILD_PRESETS = ("sm90", "cpu")


def ops_library_path() -> Path:
    """Path of the operator library.

    The environment variable ``IKBO_OPS_LIBRARY`` if it is set, else the copy inside the package,
    else the one built in this checkout (``build/sm90``, then ``build/cpu``).

    Errors:
        RuntimeError: no such file; the text lists the paths tried.
    """
    configured = os.environ.get("IKBO_OPS_LIBRARY")
    package = Path(__file__).resolve().parent
    repository = package.parent.parent
    candidates = (
        [Path(configured)]
        if configured
        else [
            package / "lib" / _NAME,
            *(repository / "build" / preset / "lib" / _NAME for preset in _BUILD_PRESETS),
        ]
    )
    for path in candidates:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in candidates)
    raise RuntimeError(
        f"ikbo: the operator library {_NAME} must exist; tried {tried}; build it with "
        "`cmake --preset cpu && cmake --build build/cpu`, or set IKBO_OPS_LIBRARY to its path"
    )


def load() -> None:
    """Loads the operator library into this process, once."""
    torch.ops.load_library(str(ops_library_path()))
