# SPDX-License-Identifier: Apache-2.0
"""What `ikbo.transform` returns where there are more than two levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from ikbo.transform.calls import check_call
from ikbo.transform.levels import Levels
from ikbo.transform.spec import Spec


class ChainedModule(nn.Module):
    """A model with more than two levels of batches.

    It is called as the example inputs were given, each input at the batch of its level, with one
    index for each pair of neighbours by keyword: `vendor_to_user`, int32, the user row of each
    vendor, and `cand_to_vendor`. Results have batch B, that of the candidates.

    Attributes:
        exported_program: the program, with one named dimension for each level.
        levels: names of the levels, the outermost first, "candidate" last.
        roles: input name to its level, or "index", in the order of the flat inputs.
        specs: level name to what became of each operator when it was split from those around it; in
            each of these U is the batch of the level around and B that of the level itself.
    """

    def __init__(
        self,
        program: ExportedProgram,
        levels: Levels,
        roles: Mapping[str, str],
        specs: Mapping[str, Spec],
    ) -> None:
        super().__init__()
        self.exported_program = program
        self.levels = levels.names
        self.roles = dict(roles)
        self.specs = dict(specs)
        self.module = program.module()
        letters = levels.letters
        inner = dict(zip(levels.links, levels.names[1:], strict=True))
        self._letters = {name: letters[inner.get(name, role)] for name, role in roles.items()}
        self._limits = dict(zip(letters.values(), levels.limits, strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except Exception:
            check_call(self.exported_program, self._letters, self._limits, args, kwargs)
            raise

    def report(self) -> str:
        """The specs as tables; see `Spec.table`."""
        return "\n\n".join(
            f"{level}: split from {', '.join(self.levels[: self.levels.index(level)])}\n"
            f"{spec.table()}"
            for level, spec in self.specs.items()
        )
