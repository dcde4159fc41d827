# SPDX-License-Identifier: Apache-2.0
"""The way of a call into a transformed module, as code written for its inputs.

A small model takes a tenth of a millisecond: a loop over the inputs that checks them and picks the
form would be a tenth of that. Written out, with the example's sizes as numbers, it costs as much as
repeating the users' rows by hand does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ikbo.transform.capture import Captured
from ikbo.transform.direct import FlatModule, is_plain
from ikbo.transform.packed import Layout

# What a call raises whose arguments are no such containers, or whose leaves are no tensors.
MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError)

# Takes the module, its positional and its keyword arguments.
Entry = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def entry(
    captured: Captured,
    unmodified: nn.Module | ExportedProgram,
    structure: pytree.TreeSpec,
    examples: Sequence[Any],
    limits: tuple[int, int],
    pays_from: Sequence[tuple[int, int]],
) -> Entry:
    """A function that checks a call's arguments, and runs the form that is the faster one.

    It calls `refuse(args, kwargs)` of the module where these are not as the examples,
    `run_transformed(leaves)` where the transformed form is the faster one, and else `unmodified`,
    the users' rows repeated.

    Args:
        captured: the unmodified model.
        unmodified: the same as the caller gave it.
        structure, examples: of the module's arguments, `(args, kwargs)`; the index is the last.
        limits: (max_users, max_candidates).
        pays_from: pairs (U, B) as `Spec.pays_from` has them; none if the transformed form always
            is the faster one.
    """
    constants: dict[str, Any] = {
        "structure": structure, "inputs": captured.structure, "unmodified": unmodified,
        "pytree": pytree, "Tensor": Tensor, "cat": torch.cat, "misfits": MISFITS,
    }  # fmt: skip
    names = [f"x{i}" for i in range(len(examples))]
    sides = [*captured.flat_roles, "candidate"]
    users, candidates = (f"s{sides.index(side)}[0]" for side in ("user", "candidate"))
    fits = [f"0 < {users} <= {limits[0]}", f"0 < {candidates} <= {limits[1]}"]
    shapes = []
    for i, (example, side) in enumerate(zip(examples, sides, strict=True)):
        constants |= {f"example{i}": example}
        if isinstance(example, Tensor):
            constants |= {f"dtype{i}": example.dtype, f"device{i}": example.device}
            shapes.append(f"s{i} = x{i}.shape")
            fits += [f"x{i}.dtype is dtype{i}", f"x{i}.device == device{i}"]
            fits += [f"len(s{i}) == {example.ndim}"]
            fits += [f"s{i}[{d}] == {n}" for d, n in enumerate(example.shape) if d]
            fits += [f"s{i}[0] == {users if side == 'user' else candidates}"]
        else:
            fits += [f"not isinstance(x{i}, Tensor)", f"x{i} == example{i}"]
    choice = []
    if pays_from:
        choice = [
            f"if {candidates} < ({_first(users, pays_from)}):",
            f"    {_unmodified(captured, constants)}",
        ]
    lines = [
        "try:",
        *(f"    {line}" for line in [*_unpacked(structure, names), *shapes]),
        f"    fits = {' and '.join(fits)}",
        "except misfits:",
        "    fits = False",
        "if not fits:",
        "    return module.refuse(args, kwargs)",
        *choice,
        f"return module.run_transformed(({', '.join(names)},))",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def call(module, args, kwargs):\n{body}\n", constants)
    return constants["call"]


def _unpacked(structure: pytree.TreeSpec, names: Sequence[str]) -> list[str]:
    """Lines that name the leaves of `(args, kwargs)`, or raise one of the misfits."""
    if not is_plain(structure):
        return [f"{', '.join(names)}, = module.flatten(args, kwargs)"]
    rest = iter(names)

    def lines(spec: pytree.TreeSpec, value: str) -> Iterator[str]:
        if spec.is_leaf():
            yield f"{next(rest)} = {value}"
            return
        keys = spec.context if spec.type is dict else range(spec.num_children)
        is_other = f"type({value}) is not {spec.type.__name__} or len({value}) != {len(keys)}"
        yield f"if {is_other}: raise TypeError"
        for key, child in zip(keys, spec.children(), strict=True):
            yield from lines(child, f"{value}[{key!r}]")

    args, kwargs = structure.children()
    return [*lines(args, "args"), *lines(kwargs, "kwargs")]


def _unmodified(captured: Captured, constants: dict[str, Any]) -> str:
    """The line that calls the unmodified model, users repeated; adds to `constants`."""
    index = f"x{len(captured.flat_roles)}"
    rows = (
        f"x{i}.index_select(0, {index})" if role == "user" else f"x{i}"
        for i, role in enumerate(captured.flat_roles)
    )
    inputs = [_joined(captured, layout, rows, constants) for layout in captured.layouts]
    if isinstance(constants["unmodified"], ExportedProgram):
        program = constants["unmodified"]
        constants |= {"unmodified": FlatModule(program).forward}
        constants |= {"results": program.call_spec.out_spec}
        call = f"unmodified({', '.join(inputs)})"
        is_nested = is_plain(program.call_spec.out_spec)
        return f"return {call if is_nested else f'pytree.tree_unflatten({call}, results)'}"
    if not is_plain(captured.structure):
        return (
            f"args, kwargs = pytree.tree_unflatten([{', '.join(inputs)}], inputs); "
            "return unmodified(*args, **kwargs)"
        )
    args, kwargs = captured.structure.children()
    rest = iter(inputs)
    return f"return unmodified(*{_written(args, rest)}, **{_written(kwargs, rest)})"


def _written(structure: pytree.TreeSpec, leaves: Iterator[str]) -> str:
    """An expression that builds a structure of the next of `leaves`."""
    if structure.is_leaf():
        return next(leaves)
    items = [_written(child, leaves) for child in structure.children()]
    if structure.type is dict:
        pairs = zip(structure.context, items, strict=True)
        return f"{{{', '.join(f'{key!r}: {item}' for key, item in pairs)}}}"
    return (
        f"[{', '.join(items)}]"
        if structure.type is list
        else f"({''.join(f'{x}, ' for x in items)})"
    )


def _joined(
    captured: Captured, layout: Layout, rows: Iterator[str], constants: dict[str, Any]
) -> str:
    """An expression for one input of the unmodified model, of the next of `rows`."""
    if layout.packed is None:
        joined = next(rows)
    else:
        order = f"order{len(constants)}"
        constants[order] = layout.packed.order(captured.device)
        axis = layout.packed.axis
        joined = f"cat(({next(rows)}, {next(rows)}), {axis}).index_select({axis}, {order})"
    return joined if layout.count == 1 else f"{joined}.flatten(0, 1)"


def _first(users: str, pays_from: Sequence[tuple[int, int]]) -> str:
    """An expression for the number of candidates from which on the transformed form pays."""
    steps = [f"{least} if {users} < {end} else " for (_, least), (end, _) in pairwise(pays_from)]
    return f"{''.join(steps)}{pays_from[-1][1]}"
