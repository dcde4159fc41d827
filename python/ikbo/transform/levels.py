# SPDX-License-Identifier: Apache-2.0
"""The levels of a request, user > vendor > candidate say, and the indices between neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from ikbo.transform.inputs import INDEX

CANDIDATE = "candidate"


@dataclass(frozen=True)
class Levels:
    """Which level each input is of; each level has a batch, and an index into the one around it.

    Attributes:
        names: of the levels, the outermost first, the candidates last.
        flat: of each flat input its level's name; None where it is no tensor.
        limits: the largest batch of each level.
    """

    names: tuple[str, ...]
    flat: tuple[str | None, ...]
    limits: tuple[int, ...]

    @property
    def links(self) -> tuple[str, ...]:
        """The names of the indices, the outermost first: link i leads from level i + 1 to i."""
        return tuple(
            f"{'cand' if inner == CANDIDATE else inner}_to_{outer}"
            for outer, inner in pairwise(self.names)
        )

    @property
    def letters(self) -> dict[str, str]:
        """What the batch of each level is called in a program: U, the level's name, B."""
        first, *middle, last = self.names
        return {first: "U", **{name: name for name in middle}, last: "B"}

    def outer(self) -> Levels:
        """Without the candidates: the last of the other levels takes their place."""
        return replace(self, names=self.names[:-1], limits=self.limits[:-1])


def two_levels(flat_roles: Sequence[str | None], limits: tuple[int, int]) -> Levels:
    """Users and candidates."""
    levels = Levels(("user", CANDIDATE), tuple(flat_roles), limits)
    assert levels.links == (INDEX,)
    return levels


def levels_of(
    request_only: Mapping[str, Sequence[str]],
    names: Sequence[str | None],
    limits: tuple[int, int],
) -> Levels:
    """The levels that a chain in `request_only` names.

    Args:
        request_only: level to the names of its inputs, the outermost first.
        names: of the flat inputs.
        limits: the largest batch of the outermost level, and of all others.

    Errors:
        ValueError: an input is of two levels, or a level has none, or no good name.
    """
    for level in request_only:
        if not isinstance(level, str) or not level.isidentifier() or level in (CANDIDATE, "cand"):
            raise ValueError(
                "ikbo.transform: a level in request_only must be named by a word that is not "
                f"'candidate' or 'cand', the innermost; got {level!r}"
            )
    found: dict[str, str] = {}
    for level, inputs in request_only.items():
        own = [
            name
            for name in names
            if name is not None
            and any(name == wanted or name.startswith(f"{wanted}.") for wanted in inputs)
        ]
        taken = {name: found[name] for name in own if name in found}
        if taken or not own:
            what = f"has input {taken} already elsewhere" if taken else f"has none: {list(inputs)}"
            raise ValueError(
                "ikbo.transform: each level in request_only must have inputs of its own; "
                f"{level!r} {what}"
            )
        found |= dict.fromkeys(own, level)
    flat = tuple(None if name is None else found.get(name, CANDIDATE) for name in names)
    return Levels((*request_only, CANDIDATE), flat, (limits[0], *[limits[1]] * len(request_only)))


def composed(links: Sequence[Tensor], inner: int, outer: int) -> Tensor:
    """The index that leads from one level to one further out."""
    index = links[inner - 1]
    for link in reversed(links[outer : inner - 1]):
        index = link.index_select(0, index)
    return index
