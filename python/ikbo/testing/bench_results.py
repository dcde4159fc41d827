# SPDX-License-Identifier: Apache-2.0
"""The result file of a long benchmark, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ikbo.testing.bench import RESULTS, source_hash, write_results


class ResultFile:
    """The rows of a result file, which is rewritten after each: a run that ends early loses none.

    Args:
        name: of the benchmark.
        sources: see ``write_results``.
        folder: of the file; None: ``bench/results``.
        keep: start from the rows that the file has, if it measures the same sources.
        device: ``cpu`` or ``h200``.

    Errors:
        SystemExit: rows of a stale file were to be kept.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        folder: Path | None = None,
        *,
        keep: bool = False,
        device: str = "h200",
    ) -> None:
        self.name = name
        self.sources = sources
        self.device = device
        self.folder = folder or RESULTS
        self.path = self.folder / f"{name}-{device}.json"
        self.rows: dict[str, Mapping[str, Any]] = {}
        if keep and self.path.is_file():
            content = json.loads(self.path.read_text())
            facts = content["environment"]
            if source_hash(facts["sources"]) != facts["source_hash"]:
                raise SystemExit(f"bench_{name}: {self.path} is stale; measure all cases")
            self.rows = {self._key(row["case"]): row for row in content["rows"]}

    def add(self, row: Mapping[str, Any], order: Iterable[Mapping[str, Any]] = ()) -> None:
        """Adds a row, or replaces that of its case, and writes the file.

        Args:
            row: see ``write_results``.
            order: cases in the file's order; rows of cases that it does not hold leave the file.
        """
        self.rows[self._key(row["case"])] = row
        if keys := [self._key(case) for case in order]:
            self.rows = {key: self.rows[key] for key in keys if key in self.rows}
        write_results(
            self.name,
            list(self.rows.values()),
            sources=self.sources,
            device=self.device,
            results=self.folder,
        )

    @staticmethod
    def _key(case: Mapping[str, Any]) -> str:
        return json.dumps(case, sort_keys=True)
