# SPDX-License-Identifier: Apache-2.0
"""The compilation spec as a document and as a page, opened in a browser."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ikbo
from ikbo.transform import Spec, advice
from ikbo.transform.cost import Formula
from ikbo.transform.spec import SCHEMA, KernelRange, Row
from ikbo.transform.spec_graph import KINDS, GraphNode
from tests.transform.browser import PROGRAM, open_page
from tests.transform.models import MODELS

in_browser = pytest.mark.skipif(PROGRAM is None, reason="needs chromium")


def validate(document: Any) -> None:
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


@pytest.fixture(scope="module")
def spec() -> Spec:
    """Of a model with a broadcast that could not be avoided."""
    ranker = MODELS["coupled"]()
    return ikbo.explain(ranker.model, ranker.inputs, ranker.users, max_users=8, max_candidates=100)


def large_spec(count: int = 2000, depth: int = 40) -> Spec:
    """Layers of operators in modules three levels deep, each reading some of the layer above."""
    draw = random.Random(0)
    nodes: list[GraphNode] = []
    layers: list[list[str]] = [[] for _ in range(depth)]
    for i in range(count):
        layer = i * depth // count
        above = layers[layer - 1] if layer else []
        layers[layer].append(f"op_{i}")
        nodes.append(
            GraphNode(
                name=f"op_{i}",
                op="aten.linear.default",
                kind=draw.choice(KINDS),
                row=f"op_{i}",
                module=f"tower.{layer}.block_{i % 5}.last",
                shape="[B, 64]",
                inputs=tuple(draw.sample(above, min(2, len(above)))),
                flops=Formula({(0, 1): float(draw.randrange(10**6))}),
                bytes=Formula({(0, 1): 256.0, (1, 0): 7.0}),
            )
        )
    rows = tuple(
        Row(
            n.name, n.op, f"net.py:{i} (tower): x", "U+B", (n.op,),
            (KernelRange("ikbo::linear", (1, 8), (1, 4096), "cpu"),),
            n.flops, n.flops, n.bytes, n.bytes, (), (),
        )
        for i, n in enumerate(nodes)
    )  # fmt: skip
    return Spec(8, 4096, 4, 256, rows, {}, tuple(nodes), tuple(nodes))


# The document


def test_schema_holds(spec: Spec) -> None:
    validate(json.loads(spec.to_json()))
    validate(json.loads(large_spec(50).to_json()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("max_users",), 0),
        (("rows", 0, "batch"), "B+U"),
        (("rows", 0, "flops_before"), "8*X"),
        (("rows", 0, "bytes_after"), ""),
        (("rows", 0, "more"), 1),
        (("before", 0, "kind"), "other"),
        (("after", 0, "inputs"), "x"),
    ],
)
def test_schema_refuses(spec: Spec, path: tuple[Any, ...], value: Any) -> None:
    document = json.loads(spec.to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_other_version_is_refused(spec: Spec) -> None:
    text = json.dumps(json.loads(spec.to_json()) | {"version": 7})
    with pytest.raises(ValueError, match="version must be 1; got 7"):
        Spec.from_json(text)


def test_other_document_is_refused(spec: Spec) -> None:
    document = json.loads(spec.to_json())
    del document["rows"][0]["advice"]
    with pytest.raises(ValueError, match=r"must be what to_json writes: KeyError\('advice'\)"):
        Spec.from_json(json.dumps(document))


def test_nodes_are_those_of_the_rows(spec: Spec) -> None:
    """All costs of the rows are drawn, nothing else, and every edge leads to a node before."""
    for nodes, when in ((spec.before, "before"), (spec.after, "after")):
        known: set[str] = set()
        for node in nodes:
            assert set(node.inputs) <= known
            known.add(node.name)
        for what in ("flops", "bytes"):
            drawn = sum(getattr(node, what)(3, 50) for node in nodes)
            assert drawn == pytest.approx(spec.total(f"{what}_{when}", 3, 50))
    assert {n.name: n.kind for n in spec.before if n.op == "input"} == {
        "user": "user", "item": "candidate",
    }  # fmt: skip
    kinds = {node.kind for node in spec.after}
    assert {"user", "candidate", "mixed"} <= kinds


def test_every_reason_has_its_advice() -> None:
    """Each text that the pass gives as a reason, found in its source, has a change of its own."""
    folder = Path(advice.__file__).parent
    reasons = set()
    for path in folder.rglob("*.py"):
        text = path.read_text()
        reasons |= set(re.findall(r'materialise\([^()]*,\s*f?"([^"]+)"', text))
        reasons |= set(re.findall(r'reason = f?"([^"]+)"', text))
    assert len(reasons) >= 7
    for reason in reasons:
        assert advice.advice_for(reason) != advice.advice_for("another reason"), reason


def test_blocked_rows_say_where_and_what_to_change(spec: Spec) -> None:
    (row,) = [row for row in spec.rows if any("softmax" in why for why in row.blocked)]
    assert "models.py:" in row.source
    assert len(row.advice) == len(row.blocked)
    assert "another axis than the batch" in row.advice[0]


# The page


@in_browser
def test_page_draws_every_node(spec: Spec, tmp_path: Path) -> None:
    page = open_page(spec.to_html(), tmp_path)
    assert page.console == []
    drawn = {}
    for node in page.elements("g", "node"):
        drawn.setdefault(node["data-name"], []).append(set(node["class"].split()))
    names = [node.name for node in (*spec.before, *spec.after)]
    assert sum(map(len, drawn.values())) == len(names)
    assert set(drawn) == set(names)
    for node in spec.before:
        assert any(node.kind in classes for classes in drawn[node.name])
    assert any("blocked" in classes for found in drawn.values() for classes in found)
    edges = page.elements("path", "edge")
    assert len(edges) == sum(len(node.inputs) for node in (*spec.before, *spec.after))
    rects = page.elements("rect", "box")[: len(spec.before)]
    costs = [node.flops(spec.num_users, spec.num_candidates) for node in spec.before]
    for rect, cost in zip(rects, costs, strict=True):
        expected = 84 + 176 * (cost / max(costs)) ** 0.5
        assert float(rect["width"]) == pytest.approx(expected), "the width must show the cost"
    assert "another axis than the batch" in page.dom


@in_browser
def test_page_needs_nothing_else(spec: Spec) -> None:
    html = spec.to_html()
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", html)
    assert "default-src 'none'" in html


@in_browser
def test_errors_on_the_console_are_seen(spec: Spec, tmp_path: Path) -> None:
    page = open_page(spec.to_html(), tmp_path, "undefined.nothing")
    assert len(page.console) == 1
    assert "TypeError" in page.console[0]


def test_source_text_cannot_end_the_data() -> None:
    spec = large_spec(3)
    text = spec.to_html().split('id="spec">')[1].split("</script>")[0]
    assert Spec.from_json(text) == spec
    hostile = Spec.from_json(spec.to_json().replace("net.py", "</script><script>alert(1)"))
    assert "<script>alert" not in hostile.to_html()


USE_LARGE = """
const answers = {};
const count = () => byId("before").querySelectorAll(".node").length;
answers.first = count();
answers.modules = byId("before").querySelectorAll(".node.module").length;
byId("depth").value = byId("depth").options[byId("depth").options.length - 1].value;
byId("depth").onchange();
answers.all = count();
answers.layoutMs = Number(views.before.svg.dataset.layoutMs);
const boxes = views.before.boxes;
answers.overlaps = 0;
for (const layer of Object.values(Object.groupBy(boxes, (box) => box.layer))) {
  layer.sort((a, b) => a.x - b.x);
  layer.slice(1).forEach((box, i) => { answers.overlaps += box.x < layer[i].x + layer[i].width; });
}
answers.upward = boxes.filter((box) => box.from.some((other) => other.y >= box.y)).length;
const where = () => views.before.content.getAttribute("transform");
let before = where();
const wheel = { deltaY: -200, clientX: 300, clientY: 300 };
views.before.svg.dispatchEvent(new WheelEvent("wheel", wheel));
answers.zoomed = where() !== before && views.before.at.scale > 0.5;
before = where();
const point = (x, y) => ({ clientX: x, clientY: y, bubbles: true });
views.before.svg.dispatchEvent(new PointerEvent("pointerdown", point(300, 300)));
window.dispatchEvent(new PointerEvent("pointermove", point(340, 310)));
window.dispatchEvent(new PointerEvent("pointerup", point(340, 310)));
answers.panned = where() !== before;
byId("depth").value = "1";
byId("depth").onchange();
answers.closed = count();
byId("search").value = "op_1234";
byId("search").oninput();
answers.found = byId("found").textContent;
answers.matches = [...document.querySelectorAll(".node.match")].map((node) => node.dataset.name);
byId("before").querySelector(".node.match").dispatchEvent(new MouseEvent("click"));
answers.details = byId("details").textContent;
answers.picked = byId("after").querySelectorAll(".node.picked").length;
byId("details").querySelectorAll("button")[1].click();
answers.closedAgain = byId("before").querySelectorAll('[data-name="op_1234"]').length;
document.title = JSON.stringify(answers);
"""


@in_browser
def test_large_page(tmp_path: Path) -> None:
    page = open_page(large_spec().to_html(), tmp_path, USE_LARGE)
    assert page.console == []
    title = re.search(r"<title>(.*?)</title>", page.dom)
    assert title is not None
    answers = json.loads(title[1])
    assert answers["first"] <= 150
    assert answers["modules"] > 10
    assert answers["all"] == 2000
    assert answers["layoutMs"] < 3000
    assert (answers["overlaps"], answers["upward"]) == (0, 0)
    assert answers["zoomed"]
    assert answers["panned"]
    assert answers["closed"] == 40
    assert answers["found"] == "2 found"
    assert answers["matches"] == ["op_1234", "op_1234"]
    assert "net.py:1234" in answers["details"]
    assert "U 1 to 8, B 1 to 4096" in answers["details"]
    assert answers["picked"] == 1
    assert answers["closedAgain"] == 0
