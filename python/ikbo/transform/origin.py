# SPDX-License-Identifier: Apache-2.0
"""Which node of the model's graph a node of the new graph comes from."""

from __future__ import annotations

from typing import Any

from torch.fx import traceback as fx_traceback

# Where a node of the new graph says it.
ORIGIN = "ikbo_origin"


def at_origin(node: str) -> Any:
    """Marks what is computed inside as coming from a node of the model's graph."""
    return fx_traceback.annotate({ORIGIN: node})
