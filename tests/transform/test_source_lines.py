# SPDX-License-Identifier: Apache-2.0
"""Reports and refusals name the line of the user's model, not torch's own below it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ikbo
from ikbo._source_line import source_line
from ikbo.transform import TransformError
from tests.transform.models import rows


class Inner(nn.Module):
    """A module of the user's between two of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * 2  # line: norm


class Outer(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), Inner())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.last = last

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        x = self.tower(torch.cat([user, item], dim=1)).unsqueeze(1)  # line: tower
        x, _ = self.attention(x, x, x)  # line: attention
        x = self.encoder(x)  # line: encoder
        return self.last(x)  # line: last


SOURCE = Path(__file__).read_text().splitlines()


def line_of(mark: str) -> str:
    """The file and line of this file that ends with `# line: <mark>`."""
    (number,) = (i for i, line in enumerate(SOURCE, 1) if line.endswith(f"# line: {mark}"))
    return f"test_source_lines.py:{number} "


def outer(last: nn.Module) -> nn.Module:
    return Outer(last).eval()


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The report's source line per operator's submodule."""
    spec = ikbo.explain(outer(nn.Linear(8, 1)), (rows(4), rows(4)), ["user"])
    places = (re.search(r" \((?P<module>[\w.]+)\): ", row.source) for row in spec.rows)
    return {
        place["module"]: row.source for place, row in zip(places, spec.rows, strict=True) if place
    }


@pytest.mark.parametrize(
    ("module", "mark"),
    [
        ("tower.0", "tower"),
        ("tower.1.norm", "norm"),
        ("attention", "attention"),
        ("encoder.self_attn", "encoder"),
        ("encoder.linear1", "encoder"),
        ("encoder.norm2", "encoder"),
        ("last", "last"),
    ],
)
def test_report_names_the_line_of_the_model(
    sources: dict[str, str], module: str, mark: str
) -> None:
    assert sources[module].startswith(line_of(mark))


def test_refusal_names_the_line_of_the_model() -> None:
    model = outer(nn.Dropout(0.5))
    model.last.train()
    with pytest.raises(TransformError, match=f"random numbers.*{line_of('last')}"):
        ikbo.transform(model, (rows(4), rows(4)), ["user"])


WITHOUT_TEXT = """
import torch

class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, user, item):
        return self.layer(torch.cat([user, item], dim=1))
"""


def test_model_without_source_text() -> None:
    """As typed into a Python prompt: the stack trace has no code for its frame."""
    namespace: dict[str, Any] = {"__name__": "typed"}
    exec(compile(WITHOUT_TEXT, "<stdin>", "exec"), namespace)
    spec = ikbo.explain(namespace["Typed"]().eval(), (rows(4), rows(4)), ["user"])
    assert {row.source for row in spec.rows} == {"<stdin>:10", "<stdin>:10 (layer)"}


def trace(*files: str) -> Any:
    """A node whose stack trace has these files, the innermost last, with their lines of code."""
    frames = (f'  File "{file}", line {i}, in f\n    call()' for i, file in enumerate(files, 1))
    return SimpleNamespace(meta={"stack_trace": "\n".join(frames)})


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (("/home/me/model.py", "/opt/lib/site-packages/torch/nn/modules/linear.py"), "model.py:1"),
        (("/home/me/model.py", "/usr/lib/dist-packages/torch/nn/modules/linear.py"), "model.py:1"),
        (("/home/me/model.py", "C:\\py\\site-packages\\torch\\nn\\linear.py"), "model.py:1"),
        (("/home/me/model.py", f"{torch.__path__[0]}rec/towers.py"), "towers.py:2"),
        (("/home/me/torch/model.py", f"{torch.__path__[0]}/nn/modules/linear.py"), "model.py:1"),
        ((f"{torch.__path__[0]}/nn/modules/container.py",), "container.py:1"),
    ],
)
def test_frames_of_torch_are_skipped(files: tuple[str, ...], named: str) -> None:
    assert source_line(trace(*files)) == f"{named}: call()"


def test_node_without_a_trace() -> None:
    assert source_line(trace()) == "source line unknown"
