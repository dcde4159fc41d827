# SPDX-License-Identifier: Apache-2.0
"""The pass: from an unmodified ranking model to one whose user inputs stay at user batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import nn
from torch.export import ExportedProgram

from ikbo._torch_warnings import quiet
from ikbo.transform.calls import check_call
from ikbo.transform.capture import Captured, capture
from ikbo.transform.chain import transform_chain
from ikbo.transform.chained_module import ChainedModule
from ikbo.transform.errors import TransformError
from ikbo.transform.inputs import INDEX
from ikbo.transform.levels import levels_of, two_levels
from ikbo.transform.spec import Spec
from ikbo.transform.spec_build import build_spec
from ikbo.transform.split import export, factor
from ikbo.transform.verify import verify as _verify

__all__ = [
    "ChainedModule",
    "Spec",
    "TransformError",
    "TransformedModule",
    "explain",
    "transform",
]


class TransformedModule(nn.Module):
    """A model whose user inputs have batch U and whose candidate inputs have batch B.

    It is called as the example inputs were given, positionally or by keyword, with the keyword
    `cand_to_user` (int32 `[B]`, the user row of each candidate) added. In the place of a packed
    input `x` is a dict of its parts, `{"user": [U, ...], "cand": [B, ...]}`, named `x.user` and
    `x.cand`; their columns keep their order (`columns`). Results have batch B. Inputs
    of another structure, type, dtype, device or size raise TypeError or ValueError.

    Attributes:
        exported_program: the program, with the named dimensions U and B.
        roles: input name to "user", "candidate" or "index", in the order of the flat inputs.
        columns: of each part of a packed input, the columns of the unmodified model's input.
        spec: what became of each operator.
        captured: the unmodified model.
    """

    def __init__(
        self,
        program: ExportedProgram,
        roles: Mapping[str, str],
        spec: Spec,
        captured: Captured,
    ) -> None:
        super().__init__()
        self.exported_program = program
        self.roles = dict(roles)
        self.columns = dict(spec.columns)
        self.spec = spec
        self.captured = captured
        self.module = program.module()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except Exception:
            limits = {"U": self.spec.max_users, "B": self.spec.max_candidates}
            check_call(self.exported_program, self.roles, limits, args, kwargs)
            raise

    def report(self) -> str:
        """The spec as a table; see `Spec.table`."""
        return self.spec.table()


@overload
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
) -> TransformedModule: ...


@overload
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Mapping[str, Sequence[str]],
    *,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
) -> ChainedModule: ...


@quiet()
def transform(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
) -> TransformedModule | ChainedModule:
    """Rewrites a model so that everything that depends on the user alone runs once per user.

    `transformed(user[U], cand[B], cand_to_user=i) == model(user[i], cand)`

    Args:
        model: an `nn.Module` in eval mode, or an `ExportedProgram` with one dynamic batch size.
        example_inputs: inputs of the unmodified model, positional (tuple) or by keyword (dict),
            tensors nested as the model takes them. Every tensor has the batch as its first axis
            (see `row_counts`), user rows replicated. At least 8 distinct user rows and 8 distinct
            candidate rows: the result is verified on them.
        request_only: names of the inputs that are the same for all candidates of a request. A
            nested input is named by its path, `features.age`; a container's name stands for all in
            it. Where the only argument is a container, names are its keys. Columns of a packed
            input are named as Python writes them, `x[:, 3:7]` or `x[:, [0, 5:8]]`, or by a name
            that `columns` gives them, `x.age`. At least one input or column, and not all.
            With more than two levels a dict from each level but the candidates, the outermost
            first, to the names of its inputs, `{"user": [...], "vendor": [...]}`; no columns.
        columns: per packed input, what its columns (along its last axis) are called: a list with a
            name for each, or a dict from name to column or `(start, stop)`.
        row_counts: per input that does not have one row per candidate, how many it has, one
            candidate's after another: n for the shape `[n * batch, ...]`. Such an input counts as
            `[batch, n, ...]`, in `request_only` as in the transformed module.
        max_users, max_candidates: largest U and B of a run; `max_candidates` holds for all levels
            but the outermost.

    Returns:
        The transformed module; of a dict with more than one level a `ChainedModule`.

    Errors:
        TypeError, ValueError: an argument is not as described.
        TransformError: the model cannot be split, or the result differs; the text names the
            operator and its source line.

    Cost:
        Two exports, and some runs of the unmodified model on up to 64 rows.

    Notes: weights are copied where they were sliced or folded and shared where not.
    """
    for name, value in (("max_users", max_users), ("max_candidates", max_candidates)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ValueError(f"ikbo.transform: {name} must be an int in 1..2^31-1; got {value!r}")
    limits = (max_users, max_candidates)
    if isinstance(request_only, Mapping):
        return _chain(model, example_inputs, request_only, columns, row_counts, limits)
    captured = capture(model, example_inputs, request_only, columns, row_counts)
    factored, flat, index = factor(captured, limits)
    program = export(captured, factored, flat, index, limits)
    spec = build_spec(captured, program, factored.broadcasts, limits)
    module = TransformedModule(program, captured.roles | {INDEX: "index"}, spec, captured)
    _verify(model, captured, module, two_levels(captured.flat_roles, limits))
    return module


def _chain(
    model: nn.Module | ExportedProgram,
    example_inputs: Any,
    request_only: Mapping[str, Sequence[str]],
    columns: Any,
    row_counts: Mapping[str, int] | None,
    limits: tuple[int, int],
) -> ChainedModule:
    if len(request_only) < 2:
        raise ValueError(
            "ikbo.transform: a dict in request_only must have two levels or more beside the "
            f"candidates; got {list(request_only)}; of one level give the list of its inputs"
        )
    names = [name for inputs in request_only.values() for name in inputs]
    captured = capture(model, example_inputs, names, columns, row_counts)
    if captured.columns:
        raise ValueError(
            "ikbo.transform: with more than two levels an input must be of one level as a whole; "
            f"request_only has columns: {names}"
        )
    levels = levels_of(request_only, captured.names, limits)
    module = transform_chain(captured, levels)
    _verify(model, captured, module, levels)
    return module


def explain(
    model: nn.Module | ExportedProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    request_only: Sequence[str],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    max_users: int = 64,
    max_candidates: int = 8192,
) -> Spec:
    """The compilation spec of a model: what `transform` makes of each operator, and why.

    Takes the arguments of `transform`, raises its errors, and verifies as it does.

    Returns:
        The spec; `table()` is for people, `to_json()` for programs.
    """
    return transform(
        model,
        example_inputs,
        request_only,
        columns=columns,
        row_counts=row_counts,
        max_users=max_users,
        max_candidates=max_candidates,
    ).spec
