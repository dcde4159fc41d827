# SPDX-License-Identifier: Apache-2.0
"""ikbo: in-kernel broadcast optimisation for recommendation ranking.

``import ikbo`` loads the operator library and nothing else that is heavy; ``transform``,
``explain``, ``package``, ``nn``, ``legacy``, ``CandidateIndex`` and ``split_by_key`` are imported
when first used.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from ikbo import _load

_load.load()

# Not before the operators are there.
from ikbo.ops import (  # noqa: E402
    bmm,
    expand,
    lce,
    linear,
    prepack,
    self_target_attention,
    target_attention,
)

if TYPE_CHECKING:
    from ikbo import legacy, nn
    from ikbo.candidate_index import CandidateIndex
    from ikbo.keyed import split_by_key
    from ikbo.package import package
    from ikbo.transform import explain, transform

__all__ = [
    "CandidateIndex",
    "bmm",
    "expand",
    "explain",
    "lce",
    "legacy",
    "linear",
    "nn",
    "package",
    "prepack",
    "self_target_attention",
    "split_by_key",
    "target_attention",
    "transform",
]

_LAZY = {
    "CandidateIndex": "ikbo.candidate_index",
    "explain": "ikbo.transform",
    "package": "ikbo.package",
    "split_by_key": "ikbo.keyed",
    "transform": "ikbo.transform",
}


def __getattr__(name: str) -> Any:
    if name in ("legacy", "nn"):
        return importlib.import_module(f"ikbo.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ikbo' has no attribute {name!r}")


class _Package(types.ModuleType):
    """Lets the functions ``transform`` and ``package`` win over the submodules of the same name.

    The import system assigns a submodule to its parent's attribute once it is loaded; here that
    attribute becomes the submodule's function, so that ``ikbo.transform(...)`` works whatever was
    imported before. ``from ikbo.transform import x`` finds the submodule in ``sys.modules``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and name in ("transform", "package"):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
