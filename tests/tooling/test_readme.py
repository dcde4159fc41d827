# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as it stands, and its result is the unmodified model's."""

import re
from pathlib import Path
from typing import Any

import torch

REPO = Path(__file__).resolve().parents[2]


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    return code


def test_example_gives_the_scores_of_the_unmodified_model() -> None:
    names: dict[str, Any] = {}
    exec(compile(example(), "README.md", "exec"), names)
    index = names["index"].cand_to_user.long()
    plain = names["model"](names["user"][index], names["item"])
    assert names["scores"].shape == (500, 1)
    torch.testing.assert_close(names["scores"], plain)
    assert "linear" in names["fast"].report()


def test_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 15
    assert len((REPO / "README.md").read_text().splitlines()) <= 150


def test_paths_that_the_readme_links_to_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (REPO / "README.md").read_text())
    assert len(targets) > 5
    assert [target for target in targets if not (REPO / target).exists()] == []
