# SPDX-License-Identifier: Apache-2.0
"""What users alone determine, found by numbers, against what the pass claims.

An element that never changes with other candidates, in no row of the batch, is user-only.
`claimed` says the same of a form.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikbo.testing.user_work import CANDIDATES, USERS, request_of, unchanged
from ikbo.transform import forms as f
from ikbo.transform.capture import Captured
from ikbo.transform.forms import Cand, Concat, Const, Merged, PerBatch, Scores, Sum, User
from ikbo.transform.interpret import FactoredModel
from ikbo.transform.pending import Affine, Cross, Joined, Normed, Outer, Reordered, Scaled
from tests.transform.random_forms import Draw


class Provenance:
    """Per tensor of the model's graph, which elements of a row are user-only: found, and claimed.

    `found` and `claimed` are bool tensors at B. Scores that are not computed yet claim nothing:
    what becomes of them shows in the values behind them.
    """

    def __init__(self, captured: Captured) -> None:
        flat, self.index = request_of(captured)
        factored = FactoredModel(captured, flat, self.index)
        forms = factored.walk(flat, self.index).values
        same = unchanged(captured, flat, self.index)
        self.found = {n.name: found for n, found in same.items() if n.op == "call_function"}
        self.claimed = {
            node.name: self._claimed(form)
            for node, form in forms.items()
            if node.name in self.found and not isinstance(form, Scores)
        }
        self.rows = {node.name: getattr(forms[node], "rows", None) for node in forms}

    def _claimed(self, form: Any) -> Tensor:
        draw = Draw("claimed")
        draw.index, draw.num_users, draw.num_candidates = self.index, USERS, CANDIDATES
        return draw.meaning(marked(form))

    def differences(self) -> list[str]:
        """What is claimed and not so, and what is so and not claimed, node by node."""
        texts = []
        for name, claimed in self.claimed.items():
            found = self._in_all_rows(self.found[name], self.rows[name])
            assert found.shape == claimed.shape, name
            wrong, missed = claimed & ~found, found & ~claimed
            if wrong.any():
                texts.append(f"{name}: {int(wrong.sum())} elements are claimed for the user")
            if missed.any():
                texts.append(f"{name}: {int(missed.sum())} user-only elements are at B")
        return texts

    def _in_all_rows(self, found: Tensor, rows: f.Rows | None) -> Tensor:
        if rows is None:
            return found
        split = found.unflatten(rows.axis, (rows.outer, CANDIDATES, rows.inner))
        everywhere = split.all(rows.axis + 1, keepdim=True).expand_as(split)
        return everywhere.flatten(rows.axis, rows.axis + 2)


def marked(form: Any, num_candidates: int = CANDIDATES) -> Any:
    """The form with true in place of what is user-only, and false elsewhere."""
    if isinstance(form, Const | User):
        return type(form)(torch.ones_like(form.tensor, dtype=torch.bool), form.rows)
    if isinstance(form, Cand):
        marks = torch.zeros_like(form.tensor, dtype=torch.bool)
        return Cand(marks if form.dead is None else marks | form.dead, form.rows)
    if isinstance(form, Concat):
        return replace(form, parts=tuple(marked(part, num_candidates) for part in form.parts))
    if isinstance(form, Merged):
        return Merged(marked(form.x, num_candidates))
    if isinstance(form, Affine):
        return marked(form.x, num_candidates)
    if isinstance(form, PerBatch):
        return PerBatch(lambda n: torch.ones_like(form.make(n), dtype=torch.bool))
    if isinstance(form, Joined):
        return replace(form, parts=tuple(marked(part, num_candidates) for part in form.parts))
    if isinstance(form, Reordered):
        return replace(form, x=marked(form.x, num_candidates))
    if isinstance(form, Outer):
        return replace(form, p=marked(form.p, num_candidates), q=marked(form.q, num_candidates))
    assert isinstance(form, Sum | Cross | Scaled | Normed)
    sizes = [f.at(d, num_candidates) for d in f.shape(form)]
    return Cand(torch.zeros(sizes, dtype=torch.bool), form.rows)
