# SPDX-License-Identifier: Apache-2.0
"""Where a graph's node comes from in the source of the user's model."""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

# The code is absent where there is no source file, as of a model typed into a prompt.
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*'
    r'(?:\n +(?! |File "[^"]+", line )(?P<code>[^\n]*))?'
)
# This process's torch, or the one of the machine that exported the program.
_TORCH = re.compile(
    rf"{re.escape(str(Path(torch.__file__).parent))}[/\\]"
    r"|.*[/\\](site|dist)-packages[/\\]torch[/\\]"
)


def source_line(node: Any) -> str:
    """Where the model's source calls the operator of a `torch.fx.Node`.

    "file.py:12 (submodule): code", of the innermost frame that is not inside torch; without the
    code where there is none. A frame of torch where the model itself is one of torch's modules.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    ours = [frame for frame in frames if not _TORCH.match(frame["file"])] or frames
    if not ours:
        return "source line unknown"
    frame = ours[-1]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = f" ({stack[-1][0]})" if stack and stack[-1][0] else ""
    code = (frame["code"] or "").strip()
    # Windows' rules know both separators.
    place = f"{PureWindowsPath(frame['file']).name}:{frame['line']}{module}"
    return f"{place}: {code}" if code else place
