# SPDX-License-Identifier: Apache-2.0
"""`make plots`: every results file becomes a picture, one per unit."""

import json
import runpy
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


def test_predicted_speedups_become_a_picture(tmp_path: Path) -> None:
    case = {"net": "wukong", "ratio": 10, "U": 2, "B": 20}
    peers = {"net_split_aoti": 6.0, "replicated_compile": "could not run"}
    row = {"case": case, "unit": "ms", "ours": 2.0, "peers": peers, "predicted": 4.0}
    (tmp_path / "end_to_end-cpu.json").write_text(json.dumps({"environment": {}, "rows": [row]}))
    done = plots(tmp_path, tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in pictures] == ["end_to_end-cpu-ms.png", "end_to_end-cpu-speedup.png"]
    names = runpy.run_path(str(REPO / "tools" / "plots.py"), run_name="plots")
    assert names["speedups_of"](row) == {"net_split_aoti": 3.0}


def test_rows_with_an_x_become_curves(tmp_path: Path) -> None:
    case = {"what": "batching_curve"}
    more = {"unit": "ms", "x_unit": "requests/s", "y": "p99", "limits": {"2 x alone": 9.0}}
    rows = [
        {"case": case, "ours": 8.0, "peers": {"off": 9.0}, "x": {"ours": 10, "off": 9}, **more},
        {"case": case, "ours": 9.5, "peers": {}, "x": {"ours": 20}, **more},
        ROWS[1],
    ]
    (tmp_path / "serve-cpu.json").write_text(json.dumps({"environment": {}, "rows": rows}))
    done = plots(tmp_path, tmp_path / "plots")
    assert done.returncode == 0, done.stderr
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in pictures] == ["serve-cpu-GB-per-s.png", "serve-cpu-curve.png"]
    names = runpy.run_path(str(REPO / "tools" / "plots.py"), run_name="plots")
    assert names["curves_of"](rows[:2]) == {"ours": [(10, 8.0), (20, 9.5)], "off": [(9, 9.0)]}


def test_shares_of_both_floors_stand_beside_the_bars() -> None:
    names = runpy.run_path(str(REPO / "tools" / "plots.py"), run_name="plots")
    ladder = json.loads((REPO / "bench" / "results" / "lce-ladder-h200.json").read_text())
    for row in ladder["rows"]:
        bars = names["bars_of"](row)
        floors = {kind: bars.pop(f"floor: {kind}") for kind in ("hbm", "tensor")}
        assert "floor" not in bars
        assert {"baseline", "decomposed", "aligned", "ours"} <= set(bars)
        for name, time in bars.items():
            hbm, tensor = (100 * floor / time for floor in floors.values())
            # The file has four digits of each time.
            texts = {f"{x:.0f} % of hbm" for x in (hbm * 0.999, hbm * 1.001)}
            texts |= {f"{x:.0f} % of tensor" for x in (tensor * 0.999, tensor * 1.001)}
            assert set(names["shares_of"](row, name).split(", ")) <= texts
    assert names["shares_of"](ROWS[0], "ours") == ""
    assert names["bars_of"](ROWS[0]) == {"ours": 1.5, "two_gemms": 1.4, "floor": 0.9}


def test_no_results_is_an_error(tmp_path: Path) -> None:
    done = plots(tmp_path, tmp_path / "plots")
    assert done.returncode == 1
    assert "no results in" in done.stderr
