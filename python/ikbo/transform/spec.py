# SPDX-License-Identifier: Apache-2.0
"""The compilation spec: what becomes of each of the model's operators, and what that saves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ikbo.transform import report
from ikbo.transform.break_even import Timing
from ikbo.transform.cost import Formula
from ikbo.transform.spec_graph import GraphNode
from ikbo.transform.variants import TRANSFORMED, Variant

# Of the document that `Spec.to_json` writes; `spec.schema.json` describes it.
VERSION = 1
SCHEMA = Path(__file__).with_name("spec.schema.json")

# Ratios of candidates to users at which the table shows what is saved.
_RATIOS = (1, 10, 70, 1000)


@dataclass(frozen=True)
class KernelRange:
    """The kernel of one ikbo operator over a part of the range; bounds are inclusive."""

    op: str
    users: tuple[int, int]
    candidates: tuple[int, int]
    kernel: str


@dataclass(frozen=True)
class Row:
    """One operator of the model.

    `batch` names the batches that it runs at now: "U", "B", both, or none ("" for what was computed
    ahead of time or is done by another row). `emitted` are the operators that do its work.
    `blocked` says why user values had to be broadcast here, and `advice`, one for each of these,
    what the model's author could change.
    """

    name: str
    op: str
    source: str
    batch: str
    emitted: tuple[str, ...]
    kernels: tuple[KernelRange, ...]
    flops_before: Formula
    flops_after: Formula
    bytes_before: Formula
    bytes_after: Formula
    blocked: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def is_product(self) -> bool:
        return bool(self.flops_before.terms or self.flops_after.terms)


_Record = TypeVar("_Record", Row, GraphNode, KernelRange, Variant, Timing)


@dataclass(frozen=True)
class Spec:
    """The compilation spec of a transformed model.

    `num_users` and `num_candidates` are the sizes at which `table` evaluates the formulas. Before
    the transformation all work runs at B; the formulas `*_before` hold for the unmodified model
    with the users' rows repeated. `columns` has, for each part of a packed input, the columns of
    the unmodified model's input. `before` and `after` are the operators of both programs.
    `variants` says which form a package runs over which part of the range: disjoint parts that
    cover it; the rows are about the transformed form. `pays_from` has, for "eager" and for
    "package", from how many candidates on the transformed model is faster than the unmodified one,
    as pairs (U, B): with U users or more, up to the next pair's, from B candidates on. `measured`
    are the timings that the pairs for "package" come from, where they are no estimates.
    """

    max_users: int
    max_candidates: int
    num_users: int
    num_candidates: int
    rows: tuple[Row, ...]
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    before: tuple[GraphNode, ...] = ()
    after: tuple[GraphNode, ...] = ()
    variants: tuple[Variant, ...] = ()
    pays_from: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    measured: tuple[Timing, ...] = ()

    def __post_init__(self) -> None:
        if not self.variants:
            whole = Variant(TRANSFORMED, (1, self.max_users), (1, self.max_candidates))
            object.__setattr__(self, "variants", (whole,))

    def total(self, field: str, num_users: int, num_candidates: int) -> float:
        """Sum over the rows of `flops_before`, `flops_after`, `bytes_before` or `bytes_after`."""
        return sum(getattr(row, field)(num_users, num_candidates) for row in self.rows)

    def at(self, num_users: int, num_candidates: int) -> Spec:
        """The same spec, its table evaluated at other sizes."""
        return replace(self, num_users=num_users, num_candidates=num_candidates)

    def table(self) -> str:
        """Products, what moves 1 % of the bytes or is blocked, and totals at several ratios."""
        sizes = (self.num_users, self.num_candidates)
        head = ("operator", "at", "MFLOP", "now", "MB", "now", "kernel", "blocked", "source")
        lines: list[tuple[str, ...]] = [head]
        most = self.total("bytes_before", *sizes) / 100
        for row in self.rows:
            if not (row.is_product or row.blocked or row.bytes_before(*sizes) > most):
                continue
            numbers = [row.flops_before, row.flops_after, row.bytes_before, row.bytes_after]
            kernels = dict.fromkeys(k.kernel for k in row.kernels)
            lines.append(
                (
                    row.name, row.batch or "-", *[f"{n(*sizes) / 1e6:.2f}" for n in numbers],
                    ", ".join(kernels) or "-", "; ".join(row.blocked) or "-", row.source,
                )
            )  # fmt: skip
        return "\n".join([f"U={sizes[0]}, B={sizes[1]}", *_aligned(lines), "", *self._totals()])

    def _totals(self) -> Iterable[str]:
        for ratio in _RATIOS:
            users = max(1, min(self.max_users, self.max_candidates // ratio, 8))
            sizes = (users, users * ratio)
            flops = [self.total(f"flops_{when}", *sizes) for when in ("before", "after")]
            moved = [self.total(f"bytes_{when}", *sizes) for when in ("before", "after")]
            yield (
                f"ratio {ratio} (U={sizes[0]}, B={sizes[1]}): "
                f"{flops[0] / 1e6:.1f} -> {flops[1] / 1e6:.1f} MFLOP, "
                f"{moved[0] / 1e6:.1f} -> {moved[1] / 1e6:.1f} MB"
            )

    def to_json(self) -> str:
        """The spec as JSON text, as `spec.schema.json` describes it."""
        document = {"version": VERSION} | {
            item.name: _encoded(getattr(self, item.name)) for item in fields(self)
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Reads what `to_json` wrote. Errors: ValueError on anything else."""
        document = json.loads(text)
        version = document.pop("version", None) if isinstance(document, dict) else None
        if version != VERSION:
            raise ValueError(f"ikbo.Spec: version must be {VERSION}; got {version!r}")
        try:
            nodes = {
                name: tuple(_decoded(GraphNode, node) for node in document[name])
                for name in ("before", "after")
            }
            rows = tuple(_decoded(Row, row) for row in document["rows"])
            variants = tuple(_decoded(Variant, item) for item in document["variants"])
            measured = tuple(_decoded(Timing, item) for item in document.get("measured", ()))
            columns = {name: tuple(places) for name, places in document["columns"].items()}
            pays_from = {
                how: tuple((users, candidates) for users, candidates in pairs)
                for how, pairs in document["pays_from"].items()
            }
            lists = {"rows": rows, "variants": variants, "measured": measured}
            return cls(**document | nodes | lists | {"columns": columns, "pays_from": pays_from})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"ikbo.Spec: the document must be what to_json writes: {error!r}"
            ) from None

    def to_html(self) -> str:
        """A page with the graph before and after, and the rows; it needs nothing but itself."""
        return report.page(self.to_json())


def _encoded(value: Any) -> Any:
    if isinstance(value, Formula):
        return str(value)
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, Row | GraphNode | KernelRange | Variant | Timing):
        return {item.name: _encoded(getattr(value, item.name)) for item in fields(value)}
    return value


def _decoded(kind: type[_Record], document: Mapping[str, Any]) -> _Record:
    values: dict[str, Any] = {}
    for item in fields(kind):
        value = document[item.name]
        if item.type == "Formula":
            value = Formula.parse(value)
        elif item.name == "kernels":
            value = tuple(_decoded(KernelRange, kernel) for kernel in value)
        elif isinstance(value, list):
            value = tuple(value)
        values[item.name] = value
    return kind(**values)


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
