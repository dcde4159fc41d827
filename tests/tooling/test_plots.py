# SPDX-License-Identifier: Apache-2.0
"""`make plots`: every results file becomes a picture, one per unit."""

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

REPO = Path(__file__).resolve().parents[2]

ROWS = [
    {
        "case": {"op": "linear", "B": 64},
        "unit": "ms",
        "ours": 1.5,
        "ours_prepacked": "could not run",
        "peers": {"two_gemms": 1.4, "other": "could not run: no kernel"},
        "floor": 0.9,
    },
    {"case": {"op": "lce"}, "unit": "GB/s", "ours": 2.5, "peers": {}, "floor": None},
]


def plots(results: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPO / "tools" / "plots.py"), str(results), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_unit_becomes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "ops-cpu.json").write_text(json.dumps({"environment": {}, "rows": ROWS}))
    done = plots(tmp_path, tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in pictures] == ["ops-cpu-GB-per-s.png", "ops-cpu-ms.png"]
    for picture in pictures:
        assert min(Image.open(picture).size) > 100


def test_no_results_is_an_error(tmp_path: Path) -> None:
    done = plots(tmp_path, tmp_path / "plots")
    assert done.returncode == 1
    assert "no results in" in done.stderr
