# SPDX-License-Identifier: Apache-2.0
"""Step 4: which splits pay over the range of batches, and from which batch on.

A split is judged where it is at its worst and at its best: at the corners of the range. Of two
forms the one with the smaller regret is taken, how many times slower than with the better one the
model is at the corner where it compares worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from ikbo.transform import cost, estimate
from ikbo.transform.capture import Captured
from ikbo.transform.cost import Formula
from ikbo.transform.device_costs import DeviceCosts
from ikbo.transform.estimate import Piece
from ikbo.transform.spec_build import batch_symbols, by_origin, is_operator

Sizes = tuple[int, int]
Time = Callable[[int, int], float]

# The transformed form is taken where its time is at most this share of the other's: estimates of
# eager calls on small batches err by so much (bench/results/cost_model-cpu.json).
_SURE = 0.85

# The smallest number of candidates per user that is expected where the caller gives none.
_USUAL_RATIO = 10

# Operators that put values side by side: what a split of their reader leaves out.
_JOINS = ("cat", "stack", "hstack", "concat")


@dataclass(frozen=True)
class Range:
    """Runs that the decision is made for: candidates per user, largest U and B."""

    ratio: tuple[float, float]
    max_users: int
    max_candidates: int

    def corners(self) -> list[Sizes]:
        """(U, B) at the smallest and largest ratio, with one user and with as many as may be."""
        found = []
        for ratio in self.ratio:
            most = max(1, min(self.max_users, int(self.max_candidates / max(ratio, 1))))
            for users in (1, most):
                candidates = max(1, min(self.max_candidates, round(users * ratio)))
                found.append((users, candidates))
        return list(dict.fromkeys(found))


def range_of(ratio: Any, limits: tuple[int, int]) -> Range:
    """The range for a `ratio` as the user gives it: a number, (smallest, largest), or None.

    Errors:
        TypeError, ValueError: it is none of these, or cannot be within the limits.
    """
    if ratio is None:
        ratio = (min(_USUAL_RATIO, limits[1]), limits[1])
    pair = tuple(ratio) if isinstance(ratio, tuple | list) else (ratio, ratio)
    if len(pair) != 2 or not all(isinstance(r, int | float) and r is not True for r in pair):
        raise TypeError(
            "ikbo.transform: ratio must be a number of candidates per user, or the smallest and "
            f"the largest; got {ratio!r}"
        )
    if not 0 < pair[0] <= pair[1] <= limits[1]:
        raise ValueError(
            "ikbo.transform: ratio must be in order, above 0 and at most max_candidates, "
            f"{limits[1]}; got {ratio!r}"
        )
    return Range(pair, *limits)


def regrets(times: Sequence[Time], corners: Iterable[Sizes]) -> list[float]:
    """Of each form, how many times slower than the best of them it is, where that is worst."""
    worst = [1.0] * len(times)
    for corner in corners:
        at = [time(*corner) for time in times]
        best = min(at)
        if best > 0:
            worst = [max(w, t / best) for w, t in zip(worst, at, strict=True)]
    return worst


def best_of(times: Sequence[Time], corners: Iterable[Sizes]) -> int:
    """The form with the smallest regret; of equal ones the first."""
    found = regrets(times, corners)
    return found.index(min(found))


class Forms:
    """The times of the unmodified and of one transformed form of a model.

    Args:
        captured: the unmodified model.
        program: the transformed one.
        costs: of the device.
        in_package: as compiled code, or else eager.
    """

    def __init__(
        self, captured: Captured, program: ExportedProgram, costs: DeviceCosts, *, in_package: bool
    ) -> None:
        users, candidates = batch_symbols(program, captured)
        self._captured, self._costs, self._in_package = captured, costs, in_package
        names, before = {users: "U", candidates: "B"}, {captured.batch: "B"}
        self.before = {
            node.name: self._pieces(node, before)
            for node in captured.program.graph.nodes
            if is_operator(node)
        }
        emitted = by_origin(program)
        self.after = {
            name: [piece for node in nodes for piece in self._pieces(node, names)]
            for name, nodes in emitted.items()
        }
        self._at_users = {
            name for name, nodes in emitted.items() if nodes and _symbols(nodes[-1]) == {users}
        }

    def _pieces(self, node: Node, symbols: dict[Any, str]) -> list[Piece]:
        return estimate.pieces_of(node, symbols, self._costs, in_package=self._in_package)

    def _repeated(self, written: Formula) -> Piece:
        return estimate.repeated(written, self._costs, in_package=self._in_package)

    def transformed(self, num_users: int, num_candidates: int) -> float:
        """Seconds of the transformed model."""
        return sum(estimate.total(p, num_users, num_candidates) for p in self.after.values())

    def unmodified(self, num_users: int, num_candidates: int) -> float:
        """Seconds of the unmodified model, its users repeated for each candidate before."""
        sizes = (num_users, num_candidates)
        captured = self._captured
        repeats = [
            self._repeated(Formula({(0, 1): float(x[0].nbytes)}))
            for x, role in zip(captured.flat, captured.flat_roles, strict=True)
            if role == "user"
        ]
        model = sum(estimate.total(pieces, *sizes) for pieces in self.before.values())
        return model + estimate.total(repeats, *sizes)

    def losers(self, blocked: set[str], runs: Range) -> dict[str, str]:
        """Operators of which the split does not pay: name to why.

        Regret is that of the whole model: what a small operator loses on few candidates, many times
        its own time, may be little beside what the split saves on many.

        Args:
            blocked: operators that are not split anyway.
            runs: the range.
        """
        found: dict[str, str] = {}
        corners = runs.corners()
        whole = {corner: self.transformed(*corner) for corner in corners}
        for node in self._captured.program.graph.nodes:
            pieces = self.after.get(node.name)
            if not pieces or node.name in blocked or node.name not in self.before:
                continue
            group = [node.name, *self._joined_to(node)]
            kept = [p for name in group for p in self.before[name]] + self._inputs_of(node)
            split, unsplit = partial(estimate.total, pieces), partial(estimate.total, kept)
            if all(math.isclose(split(*c), unsplit(*c)) for c in corners):
                continue
            other = {c: whole[c] - split(*c) + unsplit(*c) for c in corners}
            models = [lambda *c: whole[c], lambda *c, other=other: other[c]]
            if best_of(models, corners) == 1:
                found |= dict.fromkeys(group, _reason(split, unsplit, corners))
        return found

    def _joined_to(self, node: Node) -> list[str]:
        """Layers over the same features that are done by this one's product (A20)."""
        if not _has_product(self.after[node.name]):
            return []
        readers = [reader for x in node.all_input_nodes for reader in _readers(_source(x))]
        return [
            other.name
            for other in dict.fromkeys(readers)
            if other is not node
            and other.target == node.target
            and not _has_product(self.after.get(other.name, ()))
        ]

    def _inputs_of(self, node: Node) -> list[Piece]:
        """What makes the operands at B, if the split leaves it out: joins, and users repeated."""
        found: list[Piece] = []
        waiting = list(node.all_input_nodes)
        seen: set[str] = set()
        while waiting:
            operand = waiting.pop()
            if operand.name in seen or operand.name not in self.before:
                continue
            seen.add(operand.name)
            if operand.target._opname in _JOINS:
                if not self.after.get(operand.name):
                    found += self.before[operand.name]
            elif operand.name in self._at_users:
                written = cost.bytes_of(operand.meta["val"], {self._captured.batch: "B"})
                found.append(self._repeated(written))
            elif not self.before[operand.name] or operand.target.is_view:
                waiting += operand.all_input_nodes
        return found


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _source(node: Node) -> Node:
    """What a view is a view of."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> Iterator[Node]:
    """The operators that read a value or views of it."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _symbols(node: Node) -> set[Any]:
    """The batches in the result of a call."""
    value = node.meta.get("val")
    sizes: Any = value.shape if isinstance(value, Tensor) else ()
    return {s for d in sizes if isinstance(d, torch.SymInt) for s in d.node.expr.free_symbols}


def _has_product(pieces: Iterable[Piece]) -> bool:
    return any(piece.flops.terms for piece in pieces)


def _reason(split: Time, kept: Time, corners: Sequence[Sizes]) -> str:
    users, candidates = max(corners, key=lambda c: split(*c) / max(kept(*c), 1e-12))
    return (
        "kept at B: the split would cost more, "
        f"{split(users, candidates) * 1e6:.3g} us against {kept(users, candidates) * 1e6:.3g} us "
        f"at U={users}, B={candidates}"
    )


def pays_from(forms: Forms, runs: Range) -> tuple[Sizes, ...]:
    """From how many candidates on the transformed form is the faster one.

    Returns:
        Pairs (U, B) in order of U: with U users or more, up to the next pair's, from B candidates
        on; B is more than `max_candidates` where it never is.
    """
    found: list[Sizes] = []
    users = 1
    while users <= runs.max_users:
        first = _first(users, forms, runs.max_candidates)
        if not found or found[-1][1] != first:
            found.append((users, first))
        users *= 2
    return tuple(found)


def _first(users: int, forms: Forms, limit: int) -> int:
    def pays(candidates: int) -> bool:
        return forms.transformed(users, candidates) <= _SURE * forms.unmodified(users, candidates)

    low, high = 1, limit + 1
    while low < high:
        middle = (low + high) // 2
        if pays(middle):
            high = middle
        else:
            low = middle + 1
    return low
