# SPDX-License-Identifier: Apache-2.0
"""Results of operators, as forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ikbo.transform import forms as f
from ikbo.transform.errors import TransformError
from ikbo.transform.forms import Concat


def wrapped(kind: Callable[[Tensor, Any], Any], out: Any, where: Any) -> Any:
    """What an operator returned, a tensor or several, as forms of a kind."""
    if isinstance(out, Tensor):
        return kind(out, where)
    if not isinstance(out, tuple | list):
        raise TransformError(
            f"ikbo.transform: an operator returns a {type(out).__name__} read from a tensor; the "
            "pass needs tensors only: keep the value in a tensor"
        )
    rows = where if isinstance(where, tuple) else (where,) * len(out)
    return tuple(kind(t, r) for t, r in zip(out, rows, strict=True))


class View(NamedTuple):
    """An operator with its arguments, as text, and what it views."""

    form: Concat
    what: str


def view_of(target: Any, args: Any, kwargs: Any) -> View | None:
    """What an operator views of which concatenation; None where it does anything else.

    The same view of the same concatenation can be the same form. Views cost nothing, but what
    becomes of one, as its parts side by side, is then computed once.
    """
    leaves = f.leaves((args, kwargs))
    x = leaves[0] if leaves else None
    # A size would be known by its address alone.
    if not isinstance(x, Concat) or not all(y is None or isinstance(y, int) for y in leaves[1:]):
        return None
    schema = target._schema
    if schema.is_mutable or not any(result.alias_info for result in schema.returns):
        return None
    return View(x, f"{target} {f.map_leaves(lambda y: None if y is x else y, (args, kwargs))}")
