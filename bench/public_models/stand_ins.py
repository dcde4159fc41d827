# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that the libraries import for training alone.

Importing deepctr_torch or torch_rechub brings in scikit-learn, pandas and requests, 300 MB and a
call over the network, of which no `forward` uses anything. A stand-in can be imported; whatever is
taken from it raises when it is called. It takes the package's place where that is installed too, so
that the libraries are the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

UNUSED = ("pandas", "requests", "sklearn", "sklearn.metrics", "sklearn.preprocessing")


class StandIn(ModuleType):
    """A module that has every name; what it gives cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> Any:
            raise ImportError(f"{self.__name__}.{name} was called, but only a stand-in is there")

        return absent


@contextmanager
def stand_ins(names: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Within it, imports of packages that are not imported yet find stand-ins."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: StandIn(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
