# SPDX-License-Identifier: Apache-2.0
"""Steps 2 and 5: the model walked over forms, and the walk written down with dimensions U and B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection

from ikbo.transform.capture import Captured
from ikbo.transform.errors import TransformError
from ikbo.transform.inputs import INDEX
from ikbo.transform.interpret import FactoredModel
from ikbo.transform.spec_build import batch_symbols

# Batch sizes to export with: primes, so that neither is a multiple of the other or of a feature
# size.
_USER_SIZES = (7, 5, 3, 2)
_CANDIDATE_SIZES = (23, 19, 17, 13, 11, 7, 5, 3)
SIZES = (29, *_CANDIDATE_SIZES, 2)


def factor(
    captured: Captured,
    limits: tuple[int, int],
    kept: Mapping[str, str] | None = None,
    *,
    keep_users: bool = False,
) -> tuple[FactoredModel, list[Any], Tensor]:
    """The walked model, with the inputs it was walked and will be exported with.

    Args:
        captured: the model's graph.
        limits: (max_users, max_candidates).
        kept: operators that are not split, and why.
        keep_users: whether outputs that users alone determine stay at U.
    """
    fixed = feature_sizes(captured)
    num_candidates = pick(_CANDIDATE_SIZES, limits[1], fixed)
    num_users = pick(_USER_SIZES, min(limits[0], num_candidates - 1), fixed)
    flat = []
    for x, role in zip(captured.flat, captured.flat_roles, strict=True):
        if role is not None:
            count = num_users if role == "user" else num_candidates
            x = x[torch.arange(count, device=x.device) % x.shape[0]]
        flat.append(x)
    index = torch.arange(num_candidates, dtype=torch.int32, device=captured.device) % num_users
    return FactoredModel(captured, flat, index, kept, keep_users=keep_users), flat, index


def feature_sizes(captured: Captured) -> set[int]:
    """The fixed sizes of all values of a model."""
    values = [node.meta.get("val") for node in captured.program.graph.nodes]
    return {d for v in values if isinstance(v, Tensor) for d in v.shape if isinstance(d, int)}


def pick(sizes: Sequence[int], limit: int, taken: set[int]) -> int:
    """A size within the range that divides no feature size, so that no shape fits by accident."""
    fitting = [size for size in sizes if size <= limit] or [sizes[-1]]
    return next((s for s in fitting if all(size % s for size in taken)), fitting[0])


def export(
    captured: Captured,
    factored: FactoredModel,
    flat: list[Any],
    index: Tensor,
    limits: tuple[int, int],
) -> ExportedProgram:
    """The walk, written down as a program with the dimensions U and B.

    Args: as given to and returned by `factor`.

    Errors:
        TransformError: U and B cannot be free.
    """
    # A dimension must allow the size that it is exported with, which is more than one.
    users = Dim("U", min=1, max=max(limits[0], _USER_SIZES[-1]))
    candidates = Dim("B", min=1, max=max(limits[1], _CANDIDATE_SIZES[-1]))
    shapes = ShapesCollection()
    for x, role in zip(flat, captured.flat_roles, strict=True):
        if role is not None:
            shapes[x] = {0: users if role == "user" else candidates}
    shapes[index] = {0: candidates}
    args, kwargs = captured.nest(flat)
    try:
        with torch.no_grad():
            program = torch.export.export(
                factored, args, {**kwargs, INDEX: index}, dynamic_shapes=shapes
            )
        batch_symbols(program, captured)
    except Exception as error:
        raise TransformError(
            f"ikbo.transform: the model needs U and B to have fixed sizes: {error}"
        ) from error
    program.graph_module.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
