# SPDX-License-Identifier: Apache-2.0
"""docs/models.md from bench/results/models.json and, where it is there, models-h200.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = """# Public models through the pass

Written by `make models` (`bench/bench_models.py`) from `bench/results/models.json`: do not edit.

Classes of {libraries}, unmodified, with random weights, at the sizes of
`bench/public_models/case.py`: 26 categorical fields of width 16, half of them the user's, 13
numbers, histories of 50. Users' inputs are named by `request_only`, and nothing else is said about
a model. Measured on {device}, {threads} threads, PyTorch {torch}, {date}.

{counts}

Columns of the tables:

- FLOPs: of the unmodified model, per candidate.
- user's: the share of them that users alone determine. It is found by numbers
  (`ikbo.testing.user_work`): the model is run again with other candidates, and a product of two
  values that never change is the user's.
- moved: FLOPs saved per candidate, over the user's; 1 where a rewrite saves more than those.
- left: FLOPs left per candidate, over those that users do not determine; under 1 where a rewrite
  saves work of the candidates too.
- error: the largest, against the unmodified model in fp64.
- 1, 10, 64, 500: how many times faster than the unmodified model with users repeated, eager, at so
  many candidates per user and about 500 candidates.
"""

_ON_GPU = """## On a GPU

From `bench/results/models-h200.json`: how many times faster than the unmodified model in the same
form, in fp32 and at the sizes above, each first compared with the unmodified model in fp64. A CUDA
graph leaves the host's launches of kernels out. Measured on {device}, PyTorch {torch}, {date}.
"""
_WAYS = {"eager": "eager", "package": "package", "replayed": "package as a CUDA graph"}

# What saves less of the user's work is explained.
_NEARLY_ALL = 0.99

_RATIOS = ("1", "10", "64", "500")
_COLUMNS = (
    "model", "status", "FLOPs", "user's", "moved", "left", "error", *_RATIOS, "rules",
)  # fmt: skip


def text(results: Mapping[str, Any], on_gpu: Mapping[str, Any] | None = None) -> str:
    """The page; `on_gpu` are the results of a GPU."""
    rows, facts = results["rows"], results["environment"]
    libraries = list(dict.fromkeys(row["case"]["library"] for row in rows))
    head = _HEAD.format(
        libraries=", ".join(f"`{name}`" for name in libraries), counts=_counts(rows), **facts
    )
    parts = [head]
    for library in libraries:
        lines = [_line(row) for row in rows if row["case"]["library"] == library]
        parts.append(f"## {library}\n\n{_table(_COLUMNS, lines)}\n")
    parts += [_notes(rows), _packages(rows), _on_gpu(on_gpu) if on_gpu else ""]
    return "\n".join(part for part in parts if part)


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    found = Counter(row["status"] for row in rows if not row["case"]["cured"])
    taken = sum(found.values()) - found["not_exportable"]
    return (
        f"Of {sum(found.values())} models torch.export takes {taken} as they are. Of those\n"
        f"{found['transformed']} are transformed, {found['refused']} refused, "
        f"{found['wrong']} wrong."
    )


def _name(row: Mapping[str, Any]) -> str:
    return row["case"]["model"] + (", changed" if row["case"]["cured"] else "")


def _line(row: Mapping[str, Any]) -> list[str]:
    if row["status"] not in ("transformed", "wrong"):
        return [_name(row), row["status"].replace("_", " "), *["-"] * (len(_COLUMNS) - 2)]
    user = row["user_flops"] / row["flops"] if row["flops"] else 0.0
    return [
        _name(row), row["status"], f"{row['flops']:,.0f}", f"{user:.0%}",
        _figure(row["moved_share"], ".3f"), _figure(row["left_over_minimum"], ".3f"),
        f"{row['max_error']:.0e}", *[f"{row['speedup'][r]:.2f}" for r in _RATIOS],
        " ".join(row["rules"]) or "-",
    ]  # fmt: skip


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why a model is not exported or refused, and what keeps the user's work at candidates."""
    lines = []
    for row in rows:
        name = f"{row['case']['library']} {_name(row)}"
        if "reason" in row:
            lines.append(f"- {name}: {row['reason']}")
        if row.get("cure"):
            lines.append(f"  It is exported with this change: {row['cure']}")
        if "cure_error" in row:
            lines.append(f"- {name}: results as before, within {row['cure_error']:.0e}")
        if row.get("moved_share") is not None and row["moved_share"] < _NEARLY_ALL:
            blocked = "; ".join(row["blocked"]) or "no operator is named"
            lines.append(f"- {name}: what is not moved: {blocked}")
    return "\n".join(["## What is refused or left\n", *lines, ""]) if lines else ""


def _packages(rows: Sequence[Mapping[str, Any]]) -> str:
    """Both as AOTInductor packages, where that was measured."""
    lines = [
        [f"{row['case']['library']} {_name(row)}"]
        + [f"{value:.2f}" for value in row["package_speedup"].values()]
        for row in rows
        if "package_speedup" in row
    ]
    if not lines:
        return ""
    head = ["model", *_RATIOS]
    title = (
        "## As packages\n\nThe same, both models compiled ahead of time by AOTInductor; ours runs "
        "the unmodified form [where it is the faster one](package.md#variants).\n"
    )
    return f"{title}\n{_table(head, lines)}\n"


def _on_gpu(results: Mapping[str, Any]) -> str:
    """The same on a GPU, and why a form did not run there."""
    models: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in results["rows"]:
        case = row["case"]
        rows = models.setdefault(f"{case['library']} {case['model']}", {})
        rows[str(case["ratio"])] = row
    lines, notes = [], []
    for model, rows in models.items():
        for way, title in _WAYS.items():
            found = [rows[r]["speedup"].get(way) if r in rows else None for r in _RATIOS]
            lines.append([model, title, *(_figure(value, ".2f") for value in found)])
        for ratio, row in rows.items():
            for form, why in _reasons(row):
                notes.append(f"- {model} at {ratio}, {form}: {why}")
    table = _table(["model", "form", *_RATIOS], lines)
    parts = [_ON_GPU.format(**results["environment"]), table, ""]
    return "\n".join([*parts, *notes, ""] if notes else parts)


def _reasons(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What did not run, and why."""
    eager = {"ours": row["ours"], **row["peers"]}
    ways = {"eager": eager, **{way: row.get(way, {}) for way in _WAYS if way != "eager"}}
    return [
        (f"{_WAYS[way]}, {'transformed' if form == 'ours' else 'unmodified'}", why)
        for way, forms in ways.items()
        for form, why in forms.items()
        if isinstance(why, str)
    ]
