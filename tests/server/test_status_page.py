# SPDX-License-Identifier: Apache-2.0
"""The status page in a headless browser, with a server under load behind it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.server.serving import WIRE_NAMES, Arrays, Server, running
from tests.transform import browser
from tests.transform.browser import Page

CHARTS = 10


def inputs_of(num_users: int, num_candidates: int) -> Arrays:
    rng = np.random.default_rng(9)
    return {
        "user_id": rng.integers(0, 10, num_users),
        "history": rng.integers(0, 200, (num_users, 12)),
        "history_length": rng.integers(1, 12, num_users),
        "item_id": rng.integers(0, 200, num_candidates),
        "price": rng.random((num_candidates, 4), dtype=np.float32),
        "cand_to_user": rng.integers(0, num_users, num_candidates).astype(np.int32),
    }


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Requests of several sizes, now and then one that is refused."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        with triton.InferenceServerClient(server.address) as client:
            for turn in range(100_000):
                if is_over.wait(0.02):
                    return
                inputs = inputs_of(1 + turn % 3, 50 + 97 * (turn % 5))
                if turn % 10 == number:
                    del inputs["price"]
                described = []
                for name, x in inputs.items():
                    described.append(
                        triton.InferInput(name, list(x.shape), WIRE_NAMES[x.dtype.name])
                    )
                    described[-1].set_data_from_numpy(x)
                try:
                    client.infer("model", described)
                except InferenceServerException as refusal:
                    assert refusal.status() == "400"

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def visit(server: Server, folder: Path, *flags: str) -> Page:
    """The page after twelve seconds of its own time."""
    url = f"http://{server.address}/"
    seen = ("--window-size=1600,1000", "--virtual-time-budget=12000")
    return browser.visit(url, folder, *seen, *flags)


def lines_of(page: Page) -> dict[str, list[tuple[float, float]]]:
    """The longest line of each name, as points."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for line in page.elements("polyline", "line"):
        points = [tuple(map(float, point.split(","))) for point in line["points"].split()]
        if len(points) > len(lines.get(line["data-name"], [])):
            lines[line["data-name"]] = points
    return lines


def test_charts_are_drawn_from_live_metrics(staged_package: Path, tmp_path: Path) -> None:
    with running([staged_package], "--user-cache-bytes", "1000000") as server, traffic(server):
        page = visit(server, tmp_path)
    assert page.console == []
    assert len(page.elements("article", "chart")) == CHARTS
    lines = lines_of(page)
    expected = {"requests", "p50", "p99", "waiting", "candidates", "users", "FLOPs", "bytes"}
    expected |= {"found"}
    assert expected | {"bad request"} <= set(lines)
    for name in expected:
        points = lines[name]
        assert len(points) >= 3, name
        assert [x for x, _ in points] == sorted({x for x, _ in points}), name
        assert all(x >= 0 and y >= 0 for x, y in points), name
    for name in ("requests", "p50", "candidates", "FLOPs"):
        assert len({y for _, y in lines[name]} | {130.0}) > 1, f"{name} stays at zero"
    text = re.sub(r"<script>.*?</script>|<[^>]+>", " ", page.dom, flags=re.DOTALL)
    assert "live" in text and "no answer" not in text
    assert [option["value"] for option in page.elements("option")] == ["", "model 7"]


def test_it_asks_for_the_token_that_the_server_wants(
    transformed_package: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("infer-infer-infer")
    with running([transformed_package], "--infer-token-file", str(tmp_path / "token")) as server:
        page = visit(server, tmp_path)
    (field,) = page.elements("input")
    assert field["id"] == "token" and "hidden" not in field
    assert "/metrics answers 401" in page.dom
    assert lines_of(page) == {}


def test_without_requests_there_is_nothing_to_complain_about(
    transformed_package: Path, tmp_path: Path
) -> None:
    with running([transformed_package]) as server:
        page = visit(server, tmp_path)
    assert page.console == []
    assert not {"p50", "p99", "candidates"} & set(lines_of(page))
    assert len(lines_of(page)["requests"]) >= 3
