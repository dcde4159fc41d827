# SPDX-License-Identifier: Apache-2.0
"""A headless browser that opens a page: what it shows, and what it complains about."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)


@dataclass(frozen=True)
class Page:
    """The document after its scripts have run, and the messages on the console."""

    dom: str
    console: list[str]

    def elements(self, name: str, with_class: str = "") -> list[dict[str, str]]:
        """The attributes of the elements with that name and class."""
        found: list[dict[str, str]] = []

        class Parser(HTMLParser):
            def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
                values = {key: value or "" for key, value in attrs}
                if tag == name and (
                    not with_class or with_class in values.get("class", "").split()
                ):
                    found.append(values)

        Parser().feed(self.dom)
        return found


def open_page(html: str, folder: Path, script: str = "") -> Page:
    """Opens a page from a file; `script` runs in it after its own scripts."""
    path = folder / "page.html"
    path.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return visit(path.as_uri(), folder, "--window-size=1600,1200")


def visit(url: str, folder: Path, *flags: str) -> Page:
    """Opens what is at `url`; the browser keeps its profile in `folder`."""
    assert PROGRAM is not None
    done = subprocess.run(
        [
            PROGRAM,
            "--headless",
            "--no-sandbox",  # refuses to run as root otherwise
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            *flags,
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Page(done.stdout, re.findall(r"CONSOLE[:(]\d+\)?\] (.*)", done.stderr))
