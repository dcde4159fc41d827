# SPDX-License-Identifier: Apache-2.0
"""Which form of a model runs over which part of the range, and both forms in one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ikbo.transform.capture import Captured

TRANSFORMED, REPLICATED = FORMS = ("transformed", "replicated")

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Variant:
    """A form of a model over a part of the range; bounds are inclusive."""

    form: str
    users: Bounds
    candidates: Bounds

    def holds(self, num_users: int, num_candidates: int) -> bool:
        """Whether a run of these sizes is of this part."""
        return (
            self.users[0] <= num_users <= self.users[1]
            and self.candidates[0] <= num_candidates <= self.candidates[1]
        )


def variants_of(
    pays_from: Sequence[tuple[int, int]], limits: tuple[int, int]
) -> tuple[Variant, ...]:
    """The parts of the range of which either form is the faster one.

    Args:
        pays_from: pairs (U, B) in order of U, the first with U = 1: with U users or more, up to the
            next pair's, the transformed form is the faster one from B candidates on.
        limits: (max_users, max_candidates).

    Returns:
        Disjoint parts that cover the range.
    """
    if not pays_from or pays_from[0][0] != 1:
        raise ValueError(f"ikbo.transform: pays_from must begin with 1 user; got {pays_from!r}")
    found: list[Variant] = []
    steps = [step for step in pays_from if step[0] <= limits[0]]
    for (users, first), (end, _) in pairwise([*steps, (limits[0] + 1, 0)]):
        inside = (users, end - 1)
        if first > 1:
            found.append(Variant(REPLICATED, inside, (1, min(first - 1, limits[1]))))
        if first <= limits[1]:
            found.append(Variant(TRANSFORMED, inside, (max(first, 1), limits[1])))
    return tuple(found)


class ReplicatedModule(nn.Module):
    """The unmodified model behind flat inputs of U and B rows and the index, the last of them.

    Returns its output tensors flat and contiguous.
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.inner = captured.program.module(check_guards=False)
        self._captured = captured

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        captured = self._captured
        rest, index = iter(tensors[:-1]), tensors[-1]
        flat = []
        for x, role in zip(captured.flat, captured.flat_roles, strict=True):
            if role is not None:
                x = next(rest)
            # Not by index_select: all values of `expand`'s result are the input's, which thus has a
            # range where they are row numbers, instead of these being clamped.
            flat.append(torch.ops.ikbo.expand(x, index) if role == "user" else x)
        args, kwargs = captured.nest_joined(flat)
        outputs = pytree.tree_leaves(self.inner(*args, **kwargs))
        return tuple(x.contiguous() for x in outputs)


class BothForms(nn.Module):
    """Two programs with the same inputs and outputs; the sizes decide which one runs.

    Weights that both use are held once.

    Args:
        transformed, replicated: over flat inputs, the last of which is the index.
        variants: as `variants_of` gives them.
        user: the position of a user input.

    Attributes:
        has_choice: whether each of them runs over some part of the range.
    """

    def __init__(
        self,
        transformed: ExportedProgram,
        replicated: ExportedProgram,
        variants: Sequence[Variant],
        user: int,
    ) -> None:
        super().__init__()
        self.transformed = transformed.module(check_guards=False)
        self.replicated = replicated.module(check_guards=False)
        _share(self.transformed, self.replicated)
        self.has_choice = {variant.form for variant in variants} == set(FORMS)
        self._user = user
        self._steps: dict[int, int] = {}
        for variant in variants:
            low, high = variant.candidates
            first = low if variant.form == TRANSFORMED else high + 1
            self._steps.setdefault(variant.users[0], first)

    def _first(self, num_users: Any) -> Any:
        """The first number of candidates at which the transformed form runs.

        In arithmetic: Inductor takes a comparison for a condition, but none of several joined.
        """
        steps = list(self._steps.items())
        first: Any = steps[0][1]
        for (_, before), (users, candidates) in pairwise(steps):
            is_there = torch.sym_min(torch.sym_max(num_users - (users - 1), 0), 1)
            first = first + (candidates - before) * is_there
        return first

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        num_users, num_candidates = tensors[self._user].shape[0], tensors[-1].shape[0]
        return torch.cond(
            num_candidates >= self._first(num_users),
            lambda *x: _own(self.transformed(*x)),
            lambda *x: _own(self.replicated(*x)),
            tensors,
        )


def _own(outputs: Any) -> tuple[Tensor, ...]:
    """Outputs that are no inputs, which a branch may not return."""
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in outputs)


def _share(kept: nn.Module, other: nn.Module) -> None:
    """Makes tensors of `other` that lie in the same memory as one of `kept` that one."""

    def key(x: Tensor) -> Any:
        return x.data_ptr(), x.dtype, tuple(x.shape), tuple(x.stride())

    held = {key(x): x for x in [*kept.parameters(), *kept.buffers()]}
    for module in other.modules():
        for name, x in [*module.named_parameters(recurse=False), *module.named_buffers("", False)]:
            same = held.get(key(x))
            if same is not None:
                delattr(module, name)
                if isinstance(same, nn.Parameter):
                    module.register_parameter(name, same)
                else:
                    module.register_buffer(name, same)
