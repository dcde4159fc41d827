# SPDX-License-Identifier: Apache-2.0
"""Draws each file of bench/results/ as a bar chart, build/plots/<name>.png.

One group of bars per row: ours, the peers that could run, and the physical limits where they are
known. Where a row has shares of its limits in per cent, they stand beside the bars. Where rows have
a predicted speed-up, <name>-speedup.png shows how many times faster than each peer ours is. Rows
with an `x` are points of curves, <name>-curve.png, with a line at each of their `limits`.
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
    """Name to value, of those that have a figure: ours, the peers, the floor or each of several."""
    ours = {name: value for name, value in row.items() if name.startswith("ours")}
    floors = {f"floor: {name}": value for name, value in row.get("floors", {}).items()}
    bars = {**ours, **row.get("peers", {}), **(floors or {"floor": row.get("floor")})}
    return {name: value for name, value in bars.items() if isinstance(value, (int, float))}


def shares_of(row: dict[str, Any], name: str) -> str:
    """What a bar reaches of each floor, as text; empty where the row does not say."""
    shares = row.get("per_cent_of_floor", {}).get(name, {})
    return ", ".join(f"{value:.0f} % of {floor}" for floor, value in shares.items())


def label_of(case: dict[str, Any]) -> str:
    return " ".join(str(v) if k == "op" else f"{k}={v}" for k, v in case.items())


def draw(results: Path, folder: Path) -> list[Path]:
    """The charts of one results file: one per unit, since an axis has one."""
    rows = json.loads(results.read_text())["rows"]
    drawn = []
    if points := [row for row in rows if "x" in row]:
        drawn.append(folder / f"{results.stem}-curve.png")
        draw_curves(points, results.stem, drawn[-1])
        rows = [row for row in rows if "x" not in row]
    for unit in sorted({row["unit"] for row in rows}):
        drawn.append(folder / f"{results.stem}-{unit.replace('/', '-per-')}.png")
        draw_chart([row for row in rows if row["unit"] == unit], unit, results.stem, drawn[-1])
    if some := [row for row in rows if "predicted" in row and not isinstance(row["ours"], str)]:
        drawn.append(folder / f"{results.stem}-speedup.png")
        draw_speedups(some, results.stem, drawn[-1])
    return drawn


def speedups_of(row: dict[str, Any]) -> dict[str, float]:
    """How many times faster than each peer that could run ours is."""
    peers = {name: time for name, time in row["peers"].items() if not isinstance(time, str)}
    return {name: time / row["ours"] for name, time in peers.items()}


def draw_speedups(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    """Bars of the measured speed-ups, a line across each group at the predicted one."""
    names = list(dict.fromkeys(name for row in rows for name in speedups_of(row)))
    colours = {name: f"C{k}" for k, name in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.17 * sum(len(r["peers"]) for r in rows)))
    for number, row in enumerate(rows):
        height = BAR / len(names)
        for k, name in enumerate(names):
            value = speedups_of(row).get(name, 0.0)
            middle = number - BAR / 2 + (k + 0.5) * height
            axes.barh(
                middle, value, height, color=colours[name], label=None if number else f"over {name}"
            )
            axes.text(value, middle, f" {value:.2f}" if value else "", fontsize=6, va="center")
        ends = (number - BAR / 2, number + BAR / 2)
        label = None if number else "predicted, over replicated"
        axes.plot([row["predicted"]] * 2, ends, color="black", label=label)
    cases = [row["case"] for row in rows]
    texts = [f"{case['net']} ratio={case['ratio']} U={case['U']} B={case['B']}" for case in cases]
    axes.set_yticks(range(len(rows)), texts, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times faster")
    axes.set_title(title)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(target, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def curves_of(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """The points of ours and of each peer, in order of the rows."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in bars_of(row).items():
            curves.setdefault(name, []).append((row["x"][name], value))
    return curves


def draw_curves(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name, points in curves_of(rows).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for name, value in rows[0].get("limits", {}).items():
        axes.axhline(value, color="grey", linestyle="--", linewidth=1)
        axes.text(1, value, f" {name}", transform=axes.get_yaxis_transform(), va="center")
    axes.set_yscale("log")
    axes.set_xlabel(rows[0]["x_unit"])
    axes.set_ylabel(f"{rows[0].get('y', rows[0]['case']['what'])}, {rows[0]['unit']}")
    shared = {name: x for name, x in rows[0]["case"].items() if x == rows[-1]["case"].get(name)}
    axes.set_title(f"{title}: {label_of(shared)}")
    axes.legend()
    figure.savefig(target, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


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
            middle = number - BAR / 2 + (k + 0.5) * height
            label = None if name in labelled else name
            axes.barh(middle, value, height, color=colours[name], label=label)
            axes.text(value, middle, f" {shares_of(row, name)}", fontsize=6, va="center")
            labelled.add(name)
    axes.set_yticks(range(len(rows)), [label_of(row["case"]) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    if any("per_cent_of_floor" in row for row in rows):
        axes.set_xlim(right=2 * axes.get_xlim()[1])  # for the text beside the longest bar
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
