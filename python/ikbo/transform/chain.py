# SPDX-License-Identifier: Apache-2.0
"""More than two levels: the pass between neighbours, from the candidates outwards.

First all other levels count as one, which is split from the candidates. What is computed at their
batch is then a model of its own, whose candidates are the innermost of these levels, and so on. A
value of an outer level that candidates read stays at its batch: they read it by the composed index.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo.transform.capture import Captured, capture
from ikbo.transform.chained_module import ChainedModule
from ikbo.transform.cut import Cut, cut, graph_of
from ikbo.transform.errors import TransformError
from ikbo.transform.levels import Levels, composed
from ikbo.transform.spec import Spec
from ikbo.transform.spec_build import batch_symbols, build_spec
from ikbo.transform.split import SIZES, export, factor, feature_sizes, pick

Link = tuple[int, int]


class _Pair(nn.Module):
    """The two outermost levels: the transformed program itself, over named values.

    `levels` says of each result at which level it is.
    """

    levels: tuple[int, ...]

    def __init__(self, captured: Captured, program: ExportedProgram) -> None:
        super().__init__()
        self._captured = captured
        self.program = program.module()
        users, _ = batch_symbols(program, captured)
        values = {n.name: n.meta.get("val") for n in program.graph.nodes}
        self.levels = tuple(
            0 if _batch(values.get(name)) == users else 1
            for name in program.graph_signature.user_outputs
        )

    def forward(self, values: dict[str, Any], links: Sequence[Tensor]) -> Any:
        captured = self._captured
        flat = [
            x if name is None else values[name]
            for x, name in zip(captured.flat, captured.names, strict=True)
        ]
        args, kwargs = captured.nest(flat)
        return pytree.tree_leaves(self.program(*args, **kwargs, cand_to_user=links[0]))


class _Linked(nn.Module):
    """The innermost of three levels or more, behind the module of those around it."""

    levels: tuple[int, ...]

    def __init__(
        self, inner: _Pair | _Linked | None, apart: Cut, captured: Captured, levels: Levels
    ) -> None:
        super().__init__()
        self.inner = inner
        self._level = len(levels.names) - 1
        named = {
            node: str(name)
            for node, name in zip(apart.inputs, captured.names, strict=False)
            if node is not None and name is not None
        }
        places = dict(zip(captured.names, levels.flat, strict=True))
        computed = [node for node in apart.crossing if node not in named]
        at: dict[Node, int] = dict(zip(computed, inner.levels if inner else (), strict=True))
        at |= {n: levels.names.index(str(places[named[n]])) for n in apart.crossing if n in named}
        self._indices: list[Link] = []
        self._computed = [node.name for node in computed]
        own = [node for node, name in named.items() if places[name] == levels.names[-1]]
        self._own = {node.name: named[node] for node in [*own, *(n for n in at if n in named)]}
        self.part = self._part(apart, at, own)
        self.levels = tuple(at.get(x, self._level) for x in apart.outputs)

    def _part(self, apart: Cut, at: Mapping[Node, int], own: Sequence[Node]) -> fx.GraphModule:
        """The candidates' nodes, each reading users by the index from their level."""
        index = apart.inputs[-1]
        indices: dict[Link, Node] = {}
        brought: dict[tuple[Node, int], Node] = {}

        def link(graph: fx.Graph, inner: int, outer: int) -> Node:
            if (inner, outer) not in indices:
                first = next(iter(graph.nodes))
                with graph.inserting_before(first):
                    indices[inner, outer] = graph.placeholder(f"index_{inner}_{outer}")
            return indices[inner, outer]

        def emit(graph: fx.Graph, node: Node, done: dict[Node, Node]) -> Node:
            users = [n for n in node.all_input_nodes if n in at]
            if index not in node.all_input_nodes:
                if users:
                    raise TransformError(
                        f"ikbo.transform: {node.target} reads a value of users without the index"
                    )
                return graph.node_copy(node, done.__getitem__)
            level = max((at[n] for n in users), default=self._level - 1)
            read = dict(done)
            for user in users:
                if at[user] < level:
                    key = (user, level)
                    if key not in brought:
                        brought[key] = graph.call_function(
                            torch.ops.ikbo.expand.default,
                            (done[user], link(graph, level, at[user])),
                        )
                    read[user] = brought[key]
            read[index] = link(graph, self._level, level)  # type: ignore[index]
            return graph.node_copy(node, read.__getitem__)

        inputs = [*own, *at]
        module = graph_of(
            apart.program,
            [*inputs, index],
            apart.at_candidates,
            apart.outputs,
            emit,  # type: ignore[list-item]
        )
        self._inputs = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        self._links = {node.name: pair for pair, node in indices.items()}
        self._index_name = index.name  # type: ignore[union-attr]
        return module

    def forward(self, values: dict[str, Any], links: Sequence[Tensor]) -> Any:
        found = {node: values[name] for node, name in self._own.items()}
        if self.inner is not None:
            found |= zip(self._computed, self.inner(values, links[:-1]), strict=True)
        found[self._index_name] = links[-1]
        for name, (inner, outer) in self._links.items():
            found[name] = composed(links, inner, outer)
        return list(fx.Interpreter(self.part).run(*[found[name] for name in self._inputs]))


def transform_chain(captured: Captured, levels: Levels) -> ChainedModule:
    """The captured model with one batch for each level.

    Args:
        captured: all levels but the candidates as users.
        levels: three or more.

    Errors:
        TransformError: the model cannot be split.
    """
    module, specs = _split(captured, levels, keep_users=False)
    program = _export(captured, module, levels)
    roles = {
        name: level
        for name, level in zip(captured.names, levels.flat, strict=True)
        if name is not None and level is not None
    }
    specs = {name: specs[name] for name in levels.names if name in specs}
    return ChainedModule(program, levels, roles | dict.fromkeys(levels.links, "index"), specs)


def _split(
    captured: Captured, levels: Levels, *, keep_users: bool
) -> tuple[_Pair | _Linked, dict[str, Spec]]:
    """The module over named values and the indices, and the spec of each split."""
    limits = (levels.limits[-2], levels.limits[-1])
    factored, flat, index = factor(captured, limits, keep_users=keep_users)
    program = export(captured, factored, flat, index, limits)
    specs = {levels.names[-1]: build_spec(captured, program, factored.broadcasts, limits)}
    if len(levels.names) == 2:
        return _Pair(captured, program), specs
    apart = cut(program, captured.names, captured.flat_roles)
    if apart.at_users is None:
        return _Linked(None, apart, captured, levels), specs
    examples = dict(zip(captured.names, captured.flat, strict=True))
    inputs = {name: examples[name] for name in apart.at_users.names}
    places = dict(zip(captured.names, levels.flat, strict=True))
    outer = levels.outer()
    last = outer.names[-1]
    users = [name for name in inputs if places[name] != last]
    if not users or len(users) == len(inputs):
        raise TransformError(
            f"ikbo.transform: nothing at the level {last!r} or above meets another level"
        )
    inner = capture(apart.at_users, (inputs,), users)
    flat_levels = tuple(places[name] for name in inner.names)
    outer = Levels(outer.names, flat_levels, outer.limits)
    module, found = _split(inner, outer, keep_users=True)
    return _Linked(module, apart, captured, levels), specs | found


def _export(captured: Captured, module: nn.Module, levels: Levels) -> ExportedProgram:
    """The module as a program with one named dimension for each level."""
    fixed = feature_sizes(captured)
    dims: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, letter, limit in zip(
        levels.names, levels.letters.values(), levels.limits, strict=True
    ):
        taken = fixed | set(sizes.values())
        sizes[name] = pick(SIZES, limit, taken)
        dims[name] = Dim(letter, min=1, max=max(limit, 2))
    shapes = ShapesCollection()
    flat = []
    for x, level in zip(captured.flat, levels.flat, strict=True):
        if level is not None:
            x = x[torch.arange(sizes[level], device=x.device) % x.shape[0]]
            shapes[x] = {0: dims[level]}
        flat.append(x)
    links = {}
    for link, outer, inner in zip(levels.links, levels.names, levels.names[1:], strict=False):
        index = torch.arange(sizes[inner], dtype=torch.int32, device=captured.device)
        links[link] = index % sizes[outer]
        shapes[links[link]] = {0: dims[inner]}
    args, kwargs = captured.nest(flat)
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Called(captured, module, levels), args, {**kwargs, **links}, dynamic_shapes=shapes
            )
    except Exception as error:
        raise TransformError(
            f"ikbo.transform: the levels {levels.names} need free batches: {error}"
        ) from error
    return program


class _Called(nn.Module):
    """A module over named values, called as the model is, with the indices by keyword."""

    def __init__(self, captured: Captured, module: nn.Module, levels: Levels) -> None:
        super().__init__()
        self.module = module

        def forward(*args: Any, **kwargs: Any) -> Any:
            links = [kwargs.pop(name) for name in levels.links]
            flat = captured.flatten(args, kwargs)
            values = {n: x for n, x in zip(captured.names, flat, strict=True) if n is not None}
            out_spec = captured.program.call_spec.out_spec
            return pytree.tree_unflatten(module(values, links), out_spec)

        parameters = list(captured.signature.parameters.values())
        has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        for link in levels.links:
            index = inspect.Parameter(link, inspect.Parameter.KEYWORD_ONLY)
            parameters.insert(len(parameters) - has_rest, index)
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward  # type: ignore[method-assign]


def _batch(value: Any) -> Any:
    size = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
    return size.node.expr if isinstance(size, torch.SymInt) else size
