# SPDX-License-Identifier: Apache-2.0
"""What `ikbo.transform` returns: both forms of a model, and which of them a call runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from ikbo.transform.calls import check_call
from ikbo.transform.capture import Captured
from ikbo.transform.choose import is_faster
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
        unmodified: Callable[[list[Tensor]], Any],
        captured: Captured,
    ) -> None:
        super().__init__()
        self.exported_program = program
        self.roles = dict(roles)
        self.columns = dict(spec.columns)
        self.spec = spec
        self.captured = captured
        self.module = _flat_module(program)
        # What it closes over is the caller's model: neither a part of this one nor copied with it.
        self._unmodified = unmodified
        args, kwargs = program.example_inputs
        leaves, self._structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._names = list(kwargs)
        # Of calls without containers, the number of positional arguments.
        is_flat = all(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        self._flat_args = len(args) if is_flat else None
        sides = iter(self.roles.values())
        self._is_of_user = [isinstance(x, Tensor) and next(sides) == "user" for x in leaves]
        self._user_places = [i for i, is_of_user in enumerate(self._is_of_user) if is_of_user]
        self._examples = [
            (x.dtype, x.device, list(x.shape[1:])) if isinstance(x, Tensor) else x for x in leaves
        ]
        self._out_spec = program.call_spec.out_spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = self._flatten(args, kwargs)
        if torch.compiler.is_compiling():
            return self.run_transformed(leaves)
        sizes = self._sizes(leaves)
        if sizes is None:
            limits = {"U": self.spec.max_users, "B": self.spec.max_candidates}
            check_call(self.exported_program, self.roles, limits, args, kwargs)
            raise ValueError(
                "ikbo: a transformed module: what is no tensor must be as in the example inputs"
            )
        table = self.spec.pays_from.get("eager")
        if table and not is_faster(table, *sizes):
            return self.run_unmodified(leaves)
        return self.run_transformed(leaves)

    def run_nested(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the transformed form whatever the batch, called as the module is."""
        return self.run_transformed(self._flatten(args, kwargs))

    def run_transformed(self, leaves: list[Any]) -> Any:
        """The result of the transformed form, on flat inputs."""
        results = self.module(*leaves)
        return (
            results[0]
            if self._out_spec.is_leaf()
            else pytree.tree_unflatten(results, self._out_spec)
        )

    def run_unmodified(self, leaves: list[Any]) -> Any:
        """The result of the unmodified model on flat inputs, its users repeated."""
        *rows, index = leaves
        for place in self._user_places:
            rows[place] = rows[place].index_select(0, index)
        return self._unmodified(rows)

    def report(self) -> str:
        """The spec as a table; see `Spec.table`."""
        return self.spec.table()

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat inputs of a call; none where its structure is not that of the examples."""
        if kwargs.keys() != set(self._names):
            return []
        if self._flat_args is not None:
            # What is no tensor fails the check of its type.
            return [*args, *map(kwargs.get, self._names)] if len(args) == self._flat_args else []
        ordered = {name: kwargs[name] for name in self._names}
        leaves, structure = pytree.tree_flatten((args, ordered))
        if structure == self._structure:
            return leaves
        leaves, structure = pytree.tree_flatten(_in_order((args, ordered), self._structure))
        return leaves if structure == self._structure else []

    def _sizes(self, leaves: list[Any]) -> tuple[int, int] | None:
        """(U, B) of flat inputs; None if they are not as the example inputs are."""
        if not leaves:
            return None
        sizes: dict[bool, int] = {}
        for x, example, is_of_user in zip(leaves, self._examples, self._is_of_user, strict=True):
            if type(example) is not tuple:
                if isinstance(x, Tensor) or x != example:
                    return None
                continue
            dtype, device, row = example
            if not isinstance(x, Tensor) or x.dtype != dtype or x.device != device:
                return None
            count, *rest = x.shape or (0,)
            if rest != row or sizes.setdefault(is_of_user, count) != count:
                return None
        users, candidates = sizes[True], sizes[False]
        fits = 0 < users <= self.spec.max_users and 0 < candidates <= self.spec.max_candidates
        return (users, candidates) if fits else None


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


def _flat_module(program: ExportedProgram) -> nn.Module:
    """A program as a module that takes and returns flat values, without checks of its own."""
    module = program.module(check_guards=False)
    # Torch's own hooks check the inputs of each call, for half of a small model's time.
    module._forward_pre_hooks.clear()
    module._forward_hooks.clear()
    module.graph.set_codegen(CodeGen())  # type: ignore[operator,union-attr]
    module.recompile()  # type: ignore[operator]
    return module
