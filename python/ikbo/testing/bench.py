# SPDX-License-Identifier: Apache-2.0
"""Timers and result files of the benchmarks.

A result file is ``bench/results/<name>-<cpu|h200>.json``:
``{"environment": {...}, "rows": [{"case", "unit", "ours", "peers", "floor"}, ...]}``. Its
environment names the sources that the figures depend on, as globs relative to the repository, and
their hash: a file is stale once they changed.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[3]
RESULTS = REPOSITORY / "bench" / "results"


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int = 31,
    *,
    min_rounds: int = 5,
    seconds: float = math.inf,
    before: Callable[[str], object] | None = None,
) -> dict[str, float]:
    """Median wall-clock time of each contestant, in milliseconds.

    One round calls each contestant once, so that a slow phase of the machine meets all of them. The
    order of a round is drawn anew, the same in each run of the program: a contestant finds caches
    and heap as the one before it left them, and none is always behind the same one. Each is called
    once before the first round.

    Args:
        contestants: name to a call that finishes its work before it returns.
        rounds: rounds at most.
        min_rounds: rounds at least.
        seconds: no further round starts after this time.
        before: called with a contestant's name before each of its calls, untimed.

    Returns:
        Name to median.
    """
    prepare = before or (lambda _: None)
    for name, call in contestants.items():
        prepare(name)
        call()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, draw = list(contestants.items()), random.Random(0)
    begin = time.perf_counter()
    for finished in range(rounds):
        if finished >= min_rounds and time.perf_counter() - begin > seconds:
            break
        draw.shuffle(order)
        for name, call in order:
            prepare(name)
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def source_files(sources: Iterable[str]) -> list[Path]:
    """Files of the repository that match the globs, each once, in order of their paths.

    Errors:
        FileNotFoundError: a glob that matches nothing.
    """
    files: set[Path] = set()
    for pattern in sources:
        found = [path for path in REPOSITORY.glob(pattern) if path.is_file()]
        if not found:
            raise FileNotFoundError(
                f"ikbo.testing.bench: source '{pattern}' must match a file under {REPOSITORY}"
            )
        files.update(found)
    return sorted(files)


def source_hash(sources: Iterable[str]) -> str:
    """Changes with the name and the content of every file that the globs match."""
    digest = hashlib.sha256()
    for path in source_files(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(REPOSITORY)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def environment(sources: Sequence[str | Path], device: str = "cpu") -> dict[str, Any]:
    """What a figure depends on besides its case."""
    names = sorted(
        Path(source).resolve().relative_to(REPOSITORY).as_posix()
        if Path(source).is_absolute()
        else str(source)
        for source in sources
    )
    facts: dict[str, Any] = {
        "device": _cpu_model() if device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    return {**facts, "sources": names, "source_hash": source_hash(names)}


def write_results(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    sources: Sequence[str | Path],
    device: str = "cpu",
    results: Path = RESULTS,
) -> Path:
    """Writes ``<results>/<name>-<device>.json``, whole or not at all.

    Args:
        name: of the benchmark.
        rows: each with ``case``, ``unit``, ``ours``, ``peers`` (name to figure, or to why it could
            not run) and, where a physical limit is known, ``floor``.
        sources: files or globs that the figures depend on, absolute or relative to the repository.
        device: ``cpu`` or ``h200``.
        results: the folder.

    Errors:
        ValueError: an unknown device, or a row without one of its keys.
        FileNotFoundError: a source that matches nothing.
    """
    if device not in ("cpu", "h200"):
        raise ValueError(
            f"ikbo.testing.bench.write_results: device must be cpu or h200; got {device!r}"
        )
    for row in rows:
        missing = {"case", "unit", "ours", "peers"} - set(row)
        if missing:
            raise ValueError(
                f"ikbo.testing.bench.write_results: a row must have {sorted(missing)}; got {row}"
            )
    content = {"environment": environment(sources, device), "rows": [_rounded(row) for row in rows]}
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}-{device}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
    return path


def stale_results(results: Path = RESULTS) -> list[str]:
    """One line for each result file whose sources changed since it was written, and why."""
    lines = []
    for path in sorted(results.glob("*.json")):
        facts = json.loads(path.read_text())["environment"]
        try:
            is_current = source_hash(facts["sources"]) == facts["source_hash"]
            reason = "its sources changed"
        except FileNotFoundError as error:
            is_current, reason = False, str(error)
        if not is_current:
            lines.append(f"{path.name}: stale, {reason}; measured {facts['date']}")
    return lines


def _rounded(value: Any) -> Any:
    """Floats to four significant digits: no timing here is better than that."""
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
