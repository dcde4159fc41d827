# SPDX-License-Identifier: Apache-2.0
"""Step 6: the transformed program against the unmodified model with users repeated.

Inputs are drawn row by row from the example inputs, user rows and candidate rows separately. The
truth is the unmodified model in fp64; the transformed program may err as much as a small multiple
of what the unmodified model errs in its own type, plus the rounding of one sum of the result's
size. Both are seen over all batches: of a single value they can be small or zero by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ikbo.transform.capture import Captured
from ikbo.transform.errors import TransformError
from ikbo.transform.levels import Levels, composed

MIN_ROWS = 8

# (users, candidates): one of each, one user, one candidate, equal counts, several ratios.
_SIZES = ((1, 1), (1, 7), (5, 1), (4, 4), (3, 11), (8, 40), (2, 64))

# The order of additions differs, which is worth about the error that the model makes anyway.
_ERROR_FACTOR = 4
# Roundings of the output's largest value that are granted where the model happens to be exact.
_FLOOR_EPSILONS = 32


def verify(
    model: nn.Module | ExportedProgram,
    captured: Captured,
    transformed: Callable[..., Any],
    levels: Levels,
) -> None:
    """Compares a transformed model with the model that it came from.

    Args:
        model: the unmodified model.
        captured: its graph, inputs and roles.
        transformed: takes the inputs of each level at its batch, and the indices by keyword.
        levels: users and candidates, or more.

    Errors:
        ValueError: the example inputs have too few distinct rows to tell users apart.
        TransformError: a result differs, naming the case, the output and both values.
    """
    rows = _distinct_rows(captured.flat, levels)
    unmodified = module_of(model)
    exact = in_fp64(unmodified)
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, list[Output]] = {}
    for users, candidates in _SIZES:
        sizes = _sizes(users, candidates, levels.limits)
        links = [_index(*pair, generator).to(captured.device) for pair in pairwise(sizes)]
        at_levels, at_candidates = _draw(captured.flat, levels, rows, sizes, links, generator)
        args, kwargs = captured.nest(at_levels)
        with torch.no_grad():
            got = transformed(*args, **kwargs, **dict(zip(levels.links, links, strict=True)))
            args, kwargs = captured.nest_joined(at_candidates)
            same_type = _run_unmodified(unmodified, args, kwargs, sizes[-1])
            truth = _of_any_batch(exact, args, kwargs, sizes[-1])
        pairs = zip(levels.letters.values(), sizes, strict=True)
        case = ", ".join(f"{letter}={size}" for letter, size in pairs)
        cases[case] = _outputs(got, same_type, truth)
    compare(cases)


def _sizes(users: int, candidates: int, limits: Sequence[int]) -> tuple[int, ...]:
    """Batches of all levels, evenly spaced by ratio, within the limits."""
    steps = len(limits) - 1
    wanted = [round(users * (candidates / users) ** (i / steps)) for i in range(steps + 1)]
    return tuple(min(max(size, 1), limit) for size, limit in zip(wanted, limits, strict=True))


def _distinct_rows(flat: Sequence[Any], levels: Levels) -> dict[str, Tensor]:
    """Per level, the numbers of the example rows that differ from all others there."""
    found = {}
    for level in levels.names:
        tensors = [x for x, at in zip(flat, levels.flat, strict=True) if at == level]
        seen: dict[tuple[bytes, ...], int] = {}
        for row in range(tensors[0].shape[0]):
            seen.setdefault(tuple(_row_bytes(x[row]) for x in tensors), row)
        found[level] = torch.tensor(list(seen.values()))
        if len(seen) < MIN_ROWS:
            raise ValueError(
                f"ikbo.transform: example_inputs must have at least {MIN_ROWS} distinct {level} "
                f"rows, from which the result is verified; got {len(seen)} in "
                f"{tensors[0].shape[0]} rows; take them from real requests of different users"
            )
    return found


def _row_bytes(row: Tensor) -> bytes:
    return row.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _index(num_users: int, num_candidates: int, generator: torch.Generator) -> Tensor:
    """A shuffled, uneven index: the first user has most candidates, the last of several none."""
    weights = torch.arange(num_users, 0, -1, dtype=torch.float) ** 2
    if num_users > 1:
        weights[-1] = 0
    return torch.multinomial(weights, num_candidates, replacement=True, generator=generator).int()


def _draw(
    flat: Sequence[Any],
    levels: Levels,
    rows: dict[str, Tensor],
    sizes: Sequence[int],
    links: Sequence[Tensor],
    generator: torch.Generator,
) -> tuple[list[Any], list[Any]]:
    """Flat inputs with the rows of each level at its batch, and the same repeated at B."""
    chosen = {}
    for level, size in zip(levels.names, sizes, strict=True):
        order = torch.randperm(len(rows[level]), generator=generator)
        chosen[level] = rows[level][order.repeat(-(-size // len(order)))[:size]]
    last = len(levels.names) - 1
    at_levels, at_candidates = [], []
    for x, at in zip(flat, levels.flat, strict=True):
        if at is None:
            at_levels.append(x)
            at_candidates.append(x)
            continue
        drawn = x[chosen[at].to(x.device)]
        at_levels.append(drawn)
        place = levels.names.index(at)
        repeated = drawn if place == last else drawn[composed(links, last, place).long()]
        at_candidates.append(repeated)
    return at_levels, at_candidates


def module_of(model: nn.Module | ExportedProgram) -> nn.Module:
    """The unmodified model, to be called."""
    if not isinstance(model, ExportedProgram):
        return model
    module = model.module()
    for node in list(module.graph.nodes):  # type: ignore[union-attr]
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)  # type: ignore[operator,union-attr]
    module.recompile()  # type: ignore[operator]
    return module  # type: ignore[return-value]


def _of_any_batch(run: Callable[[Any, Any], Any], args: Any, kwargs: Any, batch: int) -> Any:
    """The results; of one row, which some models cannot take alone, by way of that row twice."""
    try:
        return run(args, kwargs)
    except Exception:
        if batch != 1:
            raise
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: torch.cat([x, x]), (args, kwargs))
    return pytree.tree_map_only(Tensor, lambda x: x[: len(x) // 2], run(args, kwargs))


def _run_unmodified(module: nn.Module, args: Any, kwargs: Any, num_candidates: int) -> Any:
    try:
        return _of_any_batch(lambda a, k: module(*a, **k), args, kwargs, num_candidates)
    except Exception as error:
        raise TransformError(
            f"ikbo.transform: the unmodified model must run on any batch; on {num_candidates} rows "
            f"it raised {type(error).__name__}: {error}"
        ) from error


class _Fp64(TorchDispatchMode):
    """Sends every request for a smaller float type to fp64."""

    _SMALL = (torch.float32, torch.float16, torch.bfloat16)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(x: Any) -> Any:
            return torch.float64 if x in self._SMALL else x

        args, kwargs = pytree.tree_map_only(torch.dtype, widen, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def _default_fp64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_fp64(module: nn.Module) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """A copy that computes in fp64, also where the module asks for a smaller type by name.

    Returns:
        A call that takes the positional and the keyword arguments, in the module's own types.
    """
    double = copy.deepcopy(module).double()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def widen(x: Tensor) -> Tensor:
            return x.double() if x.is_floating_point() else x

        args, kwargs = pytree.tree_map_only(Tensor, widen, (args, kwargs))
        try:
            with _default_fp64(), _Fp64():
                return double(*args, **kwargs)
        except Exception as error:
            raise TransformError(
                "ikbo.transform: the unmodified model must run in fp64, which gives the tolerance "
                f"of the verification; it raised {type(error).__name__}: {error}"
            ) from error

    return run


@dataclass(frozen=True)
class Output:
    """One output of one batch, three times."""

    name: str
    ours: Tensor
    theirs: Tensor  # of the unmodified model in its own type
    exact: Tensor  # of the unmodified model in fp64

    def error_of(self, got: Tensor) -> Tensor:
        """Per element; 0 where the exact value or what was got is not finite."""
        finite = torch.isfinite(self.exact) & torch.isfinite(got)
        return (got.double() - self.exact).abs().where(finite, torch.zeros_like(self.exact))


def _outputs(got: Any, same_type: Any, truth: Any) -> list[Output]:
    paths, _ = pytree.tree_flatten_with_path(got)
    others = (pytree.tree_leaves(same_type), pytree.tree_leaves(truth))
    return [
        Output(f"output {pytree.keystr(path)}" if path else "the output", ours, theirs, exact)
        for (path, ours), theirs, exact in zip(paths, *others, strict=True)
        if isinstance(ours, Tensor)
    ]


def compare(cases: Mapping[str, Sequence[Output]]) -> None:
    """Compares the outputs of every batch; raises TransformError at the first that is wrong."""
    for of_all in zip(*cases.values(), strict=True):
        named = [(f"{x.name} at {case}", x) for case, x in zip(cases, of_all, strict=True)]
        for what, output in named:
            _check_type(what, output.ours, output.theirs)
        is_float = of_all[0].ours.is_floating_point()
        limit = _limit(of_all) if is_float else 0.0
        for what, output in named:
            if is_float:
                _check_floats(what, output, limit)
            else:
                _check(what, output.ours != output.theirs, output.ours, output.theirs)


def _check_type(what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise TransformError(
            f"ikbo.transform: {what} is {ours.dtype} {list(ours.shape)} instead of {theirs.dtype} "
            f"{list(theirs.shape)}"
        )


def _limit(of_all: Sequence[Output]) -> float:
    """The error granted to one output, from what is seen of it in all batches."""
    theirs = max(_largest(output.error_of(output.theirs)) for output in of_all)
    scale = max(_largest(x.exact.where(torch.isfinite(x.exact), 0)) for x in of_all)
    return _ERROR_FACTOR * theirs + _FLOOR_EPSILONS * torch.finfo(of_all[0].ours.dtype).eps * scale


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _check_floats(what: str, output: Output, limit: float) -> None:
    ours, exact = output.ours, output.exact
    same = torch.where(torch.isfinite(exact), torch.isfinite(ours), ours.double() == exact)
    both_nan = torch.isnan(ours) & torch.isnan(exact)
    _check(what, ~(same | both_nan), ours, exact)
    _check(f"{what} (allowed error {limit:.3g})", output.error_of(ours) > limit, ours, exact)


def _check(what: str, wrong: Tensor, ours: Tensor, expected: Tensor) -> None:
    if not wrong.any():
        return
    where = wrong.nonzero()[0].tolist()
    raise TransformError(
        f"ikbo.transform: {what} differs from the unmodified model with users repeated, first at "
        f"{where}: got {ours[tuple(where)].item()}, expected {expected[tuple(where)].item()}; "
        "the rewrite is wrong for this model: please report it"
    )
