# SPDX-License-Identifier: Apache-2.0
"""Times what ``ikbo::lce`` chose on an H200 against what it could have chosen.

The program ``lce_choices`` (``bench/lce_choices.cu``, ``ninja -C build/sm90 lce_choices``) has the
kernel with other tiles, pipelines and stages, compiled from the same sources, compares each with
the chosen form, bit for bit where the sums are the same, and times all of them, interleaved, each
with a cold L2. M=433, N=256, K_user=1178, K_cand=866, fp16, both weights packed ahead.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ikbo.testing.bench import REPOSITORY
from ikbo.testing.bench_cuda import parser_of
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import with_includes

SOURCES = with_includes(
    [
        "bench/bench_lce_choices.py",
        "bench/lce_choices.cu",
        "bench/lce_designs.patch",
        "src/kernels/lce/**/*",
    ]
)


def row_of(line: dict[str, Any]) -> dict[str, Any]:
    """A row of the result file; ``chosen`` is the configuration that ``ours`` has."""
    times = dict(line["ms"])
    case = {key: line[key] for key in ("B", "ratio", "order")}
    return {
        "case": {"op": "lce", **case, "M": 433, "N": 256, "K_user": 1178, "K_cand": 866},
        "unit": "ms",
        "ours": times.pop("chosen"),
        "peers": times,
        "chosen": line["chosen"],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/kernels/lce.md."""
    lines = ["| B, ratio | form | ms | of the chosen |", "|---|---|---|---|"]
    for row in rows:
        case = row["case"]
        where = f"{case['B']}, {case['ratio']:g}" + ", shuffled" * (case["order"] == "shuffled")
        forms = {f"**{row['chosen']}**": row["ours"], **row["peers"]}
        for name, time in forms.items():
            lines.append(f"| {where} | {name} | {time:.4g} | {time / row['ours']:.2f} |")
            where = ""
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    default = REPOSITORY / "build/sm90/bin/lce_choices"
    parser.add_argument("--program", type=Path, default=default, help="lce_choices, built")
    args = parser.parse_args()
    run = subprocess.run([args.program], check=True, stdout=subprocess.PIPE, text=True)
    rows = [row_of(json.loads(line)) for line in run.stdout.splitlines()]
    results = ResultFile("lce-choices", SOURCES, args.output)
    for row in rows:
        results.add(row)
    print(markdown(rows))
    print(results.path, file=sys.stderr)


if __name__ == "__main__":
    main()
