# SPDX-License-Identifier: Apache-2.0
"""Draws each file of bench/results/ as a bar chart, build/plots/<name>.png.

One group of bars per row: ours, the peers that could run, and the physical limit where it is known.
usage: tools/plots.py [RESULTS_FOLDER [PLOTS_FOLDER]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.8  # height of one group of bars


def bars_of(row: dict[str, Any]) -> dict[str, float]:
    """Name to value, of those that have a figure: ours, the peers, the floor."""
    ours = {name: value for name, value in row.items() if name.startswith("ours")}
    bars = {**ours, **row.get("peers", {}), "floor": row.get("floor")}
    return {name: value for name, value in bars.items() if isinstance(value, (int, float))}


def label_of(case: dict[str, Any]) -> str:
    return " ".join(str(v) if k == "op" else f"{k}={v}" for k, v in case.items())


def draw(results: Path, folder: Path) -> list[Path]:
    """The charts of one results file: one per unit, since an axis has one."""
    rows = json.loads(results.read_text())["rows"]
    drawn = []
    for unit in sorted({row["unit"] for row in rows}):
        drawn.append(folder / f"{results.stem}-{unit.replace('/', '-per-')}.png")
        draw_chart([row for row in rows if row["unit"] == unit], unit, results.stem, drawn[-1])
    return drawn


def draw_chart(rows: list[dict[str, Any]], unit: str, title: str, target: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in bars_of(row)))
    tab20 = pyplot.get_cmap("tab20")
    colours = {name: tab20(k % tab20.N) for k, name in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.17 * sum(len(bars_of(r)) for r in rows)))
    labelled: set[str] = set()
    for number, row in enumerate(rows):
        bars = bars_of(row)
        for k, (name, value) in enumerate(bars.items()):
            height = BAR / len(bars)
            axes.barh(
                number - BAR / 2 + (k + 0.5) * height,
                value,
                height,
                color=colours[name],
                label=None if name in labelled else name,
            )
            labelled.add(name)
    axes.set_yticks(range(len(rows)), [label_of(row["case"]) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=7)
    figure.savefig(target, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def main() -> int:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "bench" / "results"
    plots = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "build" / "plots"
    files = sorted(results.glob("*.json"))
    if not files:
        print(f"plots: no results in {results}; `make bench` measures", file=sys.stderr)
        return 1
    plots.mkdir(parents=True, exist_ok=True)
    for file in files:
        for target in draw(file, plots):
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
