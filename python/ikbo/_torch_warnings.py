# SPDX-License-Identifier: Apache-2.0
"""Warnings by which torch speaks of its own code, kept from the users of `ikbo`'s calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

# (category, start of the text, module that it is said to come from)
_OF_TORCH: tuple[tuple[type[Warning], str, str], ...] = (
    # torch.export copies its own tree specs.
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)` is deprecated", r"copyreg$"),
    # TorchInductor imports modules of torch that are written so.
    (DeprecationWarning, r"`torch\.jit\.script_method` is deprecated", r"torch\.jit\."),
    # torch.nn's recurrent layers keep their weights in a list as well.
    (UserWarning, r"The tensor attributes? (self\.([\w.]+\.)?_flat_weights\[\d+\](, )?)+ w", ""),
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences these and no other warnings; also a decorator. Not for several threads at once."""
    with warnings.catch_warnings():
        for category, text, module in _OF_TORCH:
            warnings.filterwarnings("ignore", text, category, module)
        yield
