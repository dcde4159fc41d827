# SPDX-License-Identifier: Apache-2.0
"""The compilation spec as one HTML page without anything to load.

`page.html` has places for the style, the scripts and the spec's own JSON text, from which the
scripts draw everything.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent
_SCRIPTS = ("formula.js", "layout.js", "groups.js", "view.js", "page.js")


def page(spec_json: str) -> str:
    """The page for a spec, as `Spec.to_json` writes it."""
    # Inside of a script element "<" could end it; in JSON it occurs in strings alone.
    data = spec_json.replace("<", "\\u003c")
    texts = {
        "style": _read("page.css"),
        "scripts": "\n".join(map(_read, _SCRIPTS)),
        "spec": data,
    }
    html = _read("page.html")
    for name, text in texts.items():
        head, _, tail = html.partition(f"<!-- {name} -->")
        html = head + text + tail
    return html


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
