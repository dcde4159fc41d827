# SPDX-License-Identifier: Apache-2.0
"""Runs the pass on models of public libraries, as they are, and says what came of each.

usage: python -m bench.bench_models [--only NAME...] [--packages] [--page]
       python -m bench.bench_models --device cuda [--workers N] [--output DIR]

Needs the packages of requirements/models.txt on the path: `make models` installs them and calls
this, `make models-packed` packs them for a GPU machine. Writes bench/results/models.json and
docs/models.md; with `--only` it prints rows and writes nothing, with `--page` it writes
docs/models.md from the results that are there. Fails if a model is wrong, or if fewer than 90 % of
those that torch.export takes are transformed.

With `--device cuda` it times six of them on a GPU, in fp32 and at the same sizes, into
models-h200.json: transformed against unmodified, eager, as AOTInductor packages, and these as CUDA
graphs (`replayed`), each first compared with the unmodified model in fp64. Packages are built in a
pool of processes and kept in build/bench; ours run the form that was faster when they were made.
Fails if ours did not run or was wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.public_models import deepctr, on_gpu, page, rechub, torchrec
from bench.public_models.case import Case
from bench.public_models.measure import SIZES, measured
from ikbo.testing.bench import REPOSITORY, RESULTS, source_hash, write_results
from ikbo.testing.bench_results import ResultFile
from ikbo.testing.bench_sources import cuda_sources

THREADS = 1
PAGE = REPOSITORY / "docs" / "models.md"
RESULT = RESULTS / "models.json"
ON_GPU = RESULTS / "models-h200.json"
TRANSFORMED_SHARE = 0.9
OPS = ("linear", "lce", "bmm", "target_attention", "expand")
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
_MODELS = [
    "bench/bench_models.py",
    "bench/in_turn.py",
    *(f"bench/public_models/{name}.py" for name in ("case", "measure", "stand_ins")),
    *(f"bench/public_models/{name}.py" for name in ("deepctr", "dien", "rechub", "torchrec")),
    "requirements/models.txt",
    "python/ikbo/*.py",
    "python/ikbo/transform/**/*.py",
]
_TESTING = "python/ikbo/testing"
_NATIVE = ["include/ikbo/*.h", *(f"src/{folder}/*" for folder in ("common", "cpu", "torch_ops"))]
_ON_GPU = [*_MODELS, "bench/public_models/on_gpu.py"]
_ON_GPU += [f"{_TESTING}/{name}.py" for name in ("bench", "bench_cuda")]
SOURCES = {
    "cpu": [*_MODELS, f"{_TESTING}/bench.py", f"{_TESTING}/user_work.py", *_NATIVE],
    # The operators that the six models call on a GPU, where they may differ from the CPU's.
    "cuda": sorted({f for op in OPS for f in cuda_sources(op, *_ON_GPU)}),
}


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


def run_on_gpu(workers: int, output: Path | None) -> list[str]:
    """The six models on a GPU; what failed."""
    results = ResultFile("models", SOURCES["cuda"], output)
    state = source_hash(SOURCES["cuda"])[:12]
    names = re.compile(r"\W+")
    folder = REPOSITORY / "build" / "bench"
    jobs = {
        (name, form): folder / f"models-{names.sub('-', name)}-{form}-{state}.pt2"
        for name in on_gpu.MODELS
        for form in on_gpu.FORMS
    }
    failed = on_gpu.run(on_gpu.cases(), jobs, "cuda", SIZES, workers=workers, add=results.add)
    print(results.path, file=sys.stderr)
    return failed


def write_page() -> None:
    gpu = json.loads(ON_GPU.read_text()) if ON_GPU.is_file() else None
    PAGE.write_text(page.text(json.loads(RESULT.read_text()), gpu))


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What the results must not be."""
    unmodified = [row for row in rows if not row["case"]["cured"]]
    texts = [f"{row['case']['model']} is wrong" for row in rows if row["status"] == "wrong"]
    taken = [row for row in unmodified if row["status"] != "not_exportable"]
    good = sum(row["status"] == "transformed" for row in taken)
    if good < TRANSFORMED_SHARE * len(taken):
        texts.append(f"{good} of {len(taken)} models that torch.export takes are transformed")
    return texts


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--packages", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=12, help="that build GPU packages (12)")
    parser.add_argument("--output", type=Path, help="folder of models-h200.json")
    options = parser.parse_args()
    known = [case.name for case in cases()]
    if unknown := sorted(set(options.only) - set(known)):
        parser.error(f"--only must name cases; got {unknown}; there are {known}")
    if options.device == "cuda" and (options.only or options.packages or options.page):
        parser.error("--device cuda must come without --only, --packages and --page")
    return options


def run_on_cpu(only: list[str], *, packages: bool) -> list[str]:
    """All models on the CPU, or those named; what failed."""
    rows = []
    for case in cases():
        if not only or case.name in only:
            rows += run(case, packages=packages)
    if not only:
        with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
            written = write_results("models", rows, sources=SOURCES["cpu"], results=Path(folder))
            written.replace(RESULT)
        write_page()
    return failures(rows)


def main() -> int:
    options = arguments_of()
    if options.page:
        write_page()
        return 0
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_num_threads(THREADS)
    if options.device == "cuda":
        failed = run_on_gpu(options.workers, options.output)
    else:
        failed = run_on_cpu(options.only, packages=options.packages)
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
