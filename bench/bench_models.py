# SPDX-License-Identifier: Apache-2.0
"""Runs the pass on models of public libraries, as they are, and says what came of each.

usage: python -m bench.bench_models [--only NAME...] [--packages] [--page]

Needs the packages of requirements/models.txt (`make models` installs them and calls this). Writes
bench/results/models.json and docs/models.md; with `--only` it prints rows and writes nothing, with
`--page` it writes docs/models.md from the results that are there. Fails if a model is wrong, or if
fewer than 90 % of those that torch.export takes are transformed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.public_models import deepctr, page, rechub, torchrec
from bench.public_models.case import Case
from bench.public_models.measure import SIZES, measured
from ikbo.testing.bench import REPOSITORY, RESULTS, write_results

THREADS = 2
PAGE = REPOSITORY / "docs" / "models.md"
RESULT = RESULTS / "models.json"
TRANSFORMED_SHARE = 0.9
# The cases that are also compared as AOTInductor packages.
PACKAGED = (
    "deepctr_torch.DeepFM",
    "deepctr_torch.xDeepFM",
    "deepctr_torch.AutoInt",
    "deepctr_torch.DCN (matrix)",
    "deepctr_torch.DIN",
    "deepctr_torch.MMOE",
    "torch_rechub.DCNv2 (one matrix per layer)",
    "torch_rechub.DIN",
    "torchrec.DLRM",
    "torchrec.DLRM_DCN",
)
SOURCES = [
    "bench/bench_models.py",
    *(f"bench/public_models/{name}.py" for name in ("case", "measure", "stand_ins")),
    *(f"bench/public_models/{name}.py" for name in ("deepctr", "dien", "rechub", "torchrec")),
    "requirements/models.txt",
    "include/ikbo/*.h",
    "python/ikbo/*.py",
    "python/ikbo/testing/bench.py",
    "python/ikbo/testing/user_work.py",
    "python/ikbo/transform/**/*.py",
    *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops")),
]


def cases() -> list[Case]:
    return [*deepctr.cases(), *rechub.cases(), *torchrec.cases()]


def run(case: Case, *, packages: bool) -> list[dict[str, Any]]:
    """The rows of a case: as it is and, where that cannot be exported, with its cure."""
    package = packages and case.name in PACKAGED
    rows = [measured(case, tuple(SIZES), cured=False, package=package)]
    if rows[0]["status"] == "not_exportable" and case.cure is not None:
        rows.append(measured(case, tuple(SIZES), cured=True, package=package))
    for row in rows:
        shown = ("status", "moved_share", "left_over_minimum", "max_error", "speedup", "reason")
        print(case.name, json.dumps({key: row[key] for key in shown if key in row}), flush=True)
    gc.collect()
    return rows


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What the results must not be."""
    unmodified = [row for row in rows if not row["case"]["cured"]]
    texts = [f"{row['case']['model']} is wrong" for row in rows if row["status"] == "wrong"]
    taken = [row for row in unmodified if row["status"] != "not_exportable"]
    good = sum(row["status"] == "transformed" for row in taken)
    if good < TRANSFORMED_SHARE * len(taken):
        texts.append(f"{good} of {len(taken)} models that torch.export takes are transformed")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--packages", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page.text(json.loads(RESULT.read_text())))
        return 0
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(THREADS)
    known = cases()
    unknown = set(options.only) - {case.name for case in known}
    if unknown:
        parser.error(f"--only must name cases; got {sorted(unknown)}; there are "
                     f"{[case.name for case in known]}")  # fmt: skip
    rows = []
    for case in known:
        if not options.only or case.name in options.only:
            rows += run(case, packages=options.packages)
    if not options.only:
        with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
            written = write_results("models", rows, sources=SOURCES, results=Path(folder))
            written.replace(RESULT)
        PAGE.write_text(page.text(json.loads(RESULT.read_text())))
    failed = failures(rows)
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
