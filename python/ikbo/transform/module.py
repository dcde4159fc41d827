# SPDX-License-Identifier: Apache-2.0
"""What `ikbo.transform` returns: both forms of a model, and which of them a call runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ikbo._autograd import below_autograd
from ikbo.transform.calls import check_call
from ikbo.transform.capture import Captured
from ikbo.transform.direct import FlatModule, is_plain
from ikbo.transform.entry import entry
from ikbo.transform.spec import Spec


class TransformedModule(nn.Module):
    """A model whose user inputs have batch U and whose candidate inputs have batch B.

    It is called as the example inputs were given, positionally or by keyword, with the keyword
    `cand_to_user` (int32 `[B]`, the user row of each candidate) added. In the place of a packed
    input `x` is a dict of its parts, `{"user": [U, ...], "cand": [B, ...]}`, named `x.user` and
    `x.cand`; their columns keep their order (`columns`). Results have batch B. Inputs
    of another structure, type, dtype, device or size raise TypeError or ValueError.

    A batch of so few candidates per user that the unmodified model is the faster one
    (`spec.pays_from["eager"]`) is run by that model, its users repeated; not under `torch.export`
    or `torch.compile`; a package holds both forms where `ikbo.package` is asked to.

    Attributes:
        exported_program: the program, with the named dimensions U and B.
        roles: input name to "user", "candidate" or "index", in the order of the flat inputs.
        columns: of each part of a packed input, the columns of the unmodified model's input.
        spec: what became of each operator.
        captured: the unmodified model.
    """

    def __init__(
        self,
        program: ExportedProgram,
        roles: Mapping[str, str],
        spec: Spec,
        unmodified: nn.Module | ExportedProgram,
        captured: Captured,
    ) -> None:
        super().__init__()
        self.exported_program = program
        self.roles = dict(roles)
        self.columns = dict(spec.columns)
        self.spec = spec
        self.captured = captured
        self.module = FlatModule(program)
        args, kwargs = program.example_inputs
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._names = list(kwargs)
        self._out_spec = program.call_spec.out_spec
        limits = (spec.max_users, spec.max_candidates)
        # What it closes over is the caller's model: neither a part of this one nor copied with it.
        self._entry = entry(
            captured, unmodified, self._structure, leaves, limits, spec.pays_from.get("eager", ())
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.run_nested(*args, **kwargs)
        return self._entry(self, args, kwargs)

    def run_nested(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the transformed form whatever the batch, called as the module is."""
        return self.run_transformed(self.flatten(args, kwargs))

    def run_transformed(self, leaves: Sequence[Any]) -> Any:
        """The result of the transformed form, on flat inputs."""
        program = self._modules["module"]
        assert program is not None
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            results = program.forward(*leaves)
        else:
            with below_autograd():
                results = program.forward(*leaves)
        if is_plain(self._out_spec):
            return results
        return pytree.tree_unflatten(results, self._out_spec)

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Raises TypeError or ValueError: why the module cannot be called with these arguments."""
        limits = {"U": self.spec.max_users, "B": self.spec.max_candidates}
        check_call(self.exported_program, self.roles, limits, args, kwargs)
        raise ValueError(
            "ikbo: a transformed module: what is no tensor must be as in the example inputs"
        )

    def report(self) -> str:
        """The spec as a table; see `Spec.table`."""
        return self.spec.table()

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat inputs of a call, which is refused where they are nested otherwise."""
        if kwargs.keys() != set(self._names):
            self.refuse(args, kwargs)
        value = (args, {name: kwargs[name] for name in self._names})
        leaves, structure = pytree.tree_flatten(value)
        if structure != self._structure:
            leaves, structure = pytree.tree_flatten(_in_order(value, self._structure))
        if structure != self._structure:
            self.refuse(args, kwargs)
        return leaves


def _in_order(value: Any, structure: pytree.TreeSpec) -> Any:
    """A nested value, its dicts in the order of their keys in `structure`, where they fit it."""
    children = structure.children()
    if isinstance(value, dict) and structure.type is dict and {*value} == {*structure.context}:
        pairs = zip(structure.context, children, strict=True)
        return {key: _in_order(value[key], child) for key, child in pairs}
    is_plain = type(value) in (list, tuple) and type(value) is structure.type
    if is_plain and len(value) == len(children):
        return type(value)(map(_in_order, value, children))
    return value
