# SPDX-License-Identifier: Apache-2.0
"""The compilation spec: what becomes of each of the model's operators, and what that saves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ikbo.transform.cost import Formula

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

    @property
    def is_product(self) -> bool:
        return bool(self.flops_before.terms or self.flops_after.terms)


@dataclass(frozen=True)
class Spec:
    """The compilation spec of a transformed model.

    `num_users` and `num_candidates` are the sizes at which `table` evaluates the formulas. Before
    the transformation all work runs at B; the formulas `*_before` hold for the unmodified model
    with the users' rows repeated. `columns` has, for each part of a packed input, the columns of
    the unmodified model's input. `pays_from` has, for "eager" and for "package", from how many
    candidates on the transformed model is faster than the unmodified one, as pairs (U, B): with U
    users or more, up to the next pair's, from B candidates on.
    """

    max_users: int
    max_candidates: int
    num_users: int
    num_candidates: int
    rows: tuple[Row, ...]
    columns: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pays_from: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

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
        """The spec as JSON text; formulas are polynomials in U and B."""

        def encode(value: Any) -> Any:
            return str(value) if isinstance(value, Formula) else value

        document = {
            "max_users": self.max_users,
            "max_candidates": self.max_candidates,
            "num_users": self.num_users,
            "num_candidates": self.num_candidates,
            "columns": self.columns,
            "pays_from": self.pays_from,
            "rows": [
                {key: encode(getattr(row, key)) for key in Row.__dataclass_fields__}
                | {"kernels": [asdict(k) for k in row.kernels]}
                for row in self.rows
            ],
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Reads what `to_json` wrote."""
        document = json.loads(text)
        rows = tuple(_row_from_json(row) for row in document.pop("rows"))
        columns = {name: tuple(places) for name, places in document.pop("columns").items()}
        pays_from = {
            how: tuple((users, candidates) for users, candidates in pairs)
            for how, pairs in document.pop("pays_from").items()
        }
        return cls(**document, rows=rows, columns=columns, pays_from=pays_from)


def _row_from_json(row: dict[str, Any]) -> Row:
    formulas = ("flops_before", "flops_after", "bytes_before", "bytes_after")
    kernels = tuple(
        KernelRange(k["op"], tuple(k["users"]), tuple(k["candidates"]), k["kernel"])
        for k in row["kernels"]
    )
    parsed = {name: Formula.parse(row[name]) for name in formulas}
    texts = {name: tuple(row[name]) for name in ("emitted", "blocked")}
    return Row(**(row | parsed | texts | {"kernels": kernels}))


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
