# SPDX-License-Identifier: Apache-2.0
"""Step 2: the model's graph, walked over forms.

`FactoredModel` is a module that takes user inputs at U, candidate inputs at B and `cand_to_user`.
Its forward walks the model's graph: with real tensors it computes, under `torch.export` it writes
the new graph. It knows the graph and no operator.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from ikbo._source_line import source_line
from ikbo.transform import forms as f
from ikbo.transform.capture import Captured
from ikbo.transform.constants import Constants
from ikbo.transform.errors import TransformError
from ikbo.transform.experts import Experts
from ikbo.transform.forms import Cand, Const, PerBatch, Rows, Size, Sum, User
from ikbo.transform.inputs import INDEX
from ikbo.transform.live import live_ranges
from ikbo.transform.origin import at_origin
from ikbo.transform.walk import Walk

aten = torch.ops.aten

# Checks on sizes and metadata of the unmodified model; the transformed one is checked when it runs.
_ASSERTIONS = {
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}


class FactoredModel(nn.Module):
    """The model with user inputs at U and candidate inputs at B.

    Args:
        captured: the model's graph.
        flat: example inputs, flat, user inputs at one batch and candidate inputs at another.
        cand_to_user: int32 `[B]`.
        kept: operators that are not split, and why.
        keep_users: whether outputs that users alone determine stay at U.

    The constructor walks over the example inputs, again if layers are to be computed together;
    constants that the new graph needs become buffers, all others are dropped.
    """

    def __init__(
        self,
        captured: Captured,
        flat: list[Any],
        cand_to_user: Tensor,
        kept: Mapping[str, str] | None = None,
        *,
        keep_users: bool = False,
    ) -> None:
        super().__init__()
        self._kept, self._keep_users = kept or {}, keep_users
        self._captured = captured
        self._constants, self._experts = Constants(), Experts()
        with torch.no_grad():
            walk = self.walk(flat, cand_to_user)
            if self._experts.plan():
                self._constants = Constants()
                walk = self.walk(flat, cand_to_user)
        self.broadcasts = walk.broadcasts
        for name, tensor in self._constants.tensors.items():
            self.register_buffer(name, tensor)
        self.forward = self._make_forward()  # type: ignore[method-assign]

    def _make_forward(self) -> Callable[..., Any]:
        def forward(*args: Any, cand_to_user: Tensor, **kwargs: Any) -> Any:
            flat = self._captured.flatten(args, kwargs)
            with fx_traceback.preserve_node_meta():
                return self.walk(flat, cand_to_user, self.get_buffer).outputs

        index = inspect.Parameter(INDEX, inspect.Parameter.KEYWORD_ONLY)
        parameters = list(self._captured.signature.parameters.values())
        has_rest = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - has_rest, index)
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return forward

    def walk(
        self, flat: list[Any], cand_to_user: Tensor, fetch: Callable[[str], Tensor] | None = None
    ) -> GraphWalk:
        """Walks over the graph; without `fetch` constants are read where they are stored."""
        self._constants.rewind()
        self._experts.rewind()
        users = [x for x, r in zip(flat, self._captured.flat_roles, strict=True) if r == "user"]
        walk = Walk(self._constants, cand_to_user, users[0].shape[0], fetch, self._experts)
        walk.kept = self._kept
        return GraphWalk(self._captured, walk, flat, fetch is None, self._keep_users)


class GraphWalk:
    """One walk over the graph: `values` per node, tensors as forms; `outputs` are the model's."""

    def __init__(
        self,
        captured: Captured,
        walk: Walk,
        flat: list[Any],
        check_shapes: bool,
        keep_users: bool = False,
    ) -> None:
        self._captured, self._walk, self._check_shapes = captured, walk, check_shapes
        self._keep_users = keep_users
        self.values: dict[Node, Any] = dict(self._placeholders(flat))
        self.broadcasts = walk.broadcasts
        self._live = live_ranges(captured.program.graph)
        for node in captured.program.graph.nodes:
            if node.op == "call_function":
                with at_origin(node.name):
                    self.values[node] = self._call(node)
            elif node.op == "get_attr":
                raise self._error(node, "calls a part of the model conditionally or in a loop")
            elif node.op == "output":
                self.outputs = self._finish(node)

    def _placeholders(self, flat: list[Any]) -> list[tuple[Node, Any]]:
        program = self._captured.program
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        inputs, roles = iter(flat), iter(self._captured.flat_roles)
        layouts = iter(self._captured.layouts)
        values: list[tuple[Node, Any]] = []
        for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                layout, role = next(layouts), next(roles)
                if layout.packed is not None:
                    next(roles)
                if isinstance(spec.arg, ConstantArgument) or role is None:
                    values.append((node, next(inputs)))
                else:
                    values.append((node, layout.form(User if role == "user" else Cand, inputs)))
                continue
            name = spec.target
            tensor = program.state_dict.get(name, program.constants.get(name)) if name else None
            if not isinstance(tensor, Tensor):
                raise TransformError(
                    f"ikbo.transform: the model has a {spec.kind.name} input {name!r}; "
                    "the pass needs parameters, buffers and tensors only"
                )
            const = self._walk.fold(tensor.detach, str(name).replace(".", "_"))
            values.append((node, const))
        return values

    def _call(self, node: Node) -> Any:
        target = node.target
        if target in _ASSERTIONS:
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]]
        if target is aten.sym_size.int:
            return f.shape(args[0])[args[1]]
        if not isinstance(target, torch._ops.OpOverload):
            return self._number(node, target, args, kwargs)
        self._walk.node, self._walk.node_live = node.name, self._live.get(node)
        self._walk.node_rows = self._rows_in_graph(node.meta.get("val"))
        try:
            result = self._walk.apply(target, *args, **kwargs)
        except TransformError as error:
            raise TransformError(f"{error} ({source_line(node)})") from error
        except Exception as error:
            raise self._error(node, f"could not be rewritten: {error}") from error
        if isinstance(result, Sum) and len(node.users) > 1:
            result = replace(result, is_shared=True)
        if self._check_shapes:
            self._check(node, result)
        return result

    def _number(self, node: Node, target: Any, args: Any, kwargs: Any) -> Any:
        leaves = f.leaves((args, kwargs))
        if not callable(target) or any(isinstance(x, f.FORMS) for x in leaves):
            raise self._error(node, "is no tensor operator; the pass cannot follow it")
        if not any(isinstance(x, Size) for x in leaves):
            return target(*args, **kwargs)
        return Size(lambda n: target(*f.map_leaves(lambda x: f.at(x, n), args), **kwargs))

    def _rows_in_graph(self, value: Any) -> Any:
        """Where the graph's metadata has the batch symbol; None if that is not one whole axis."""
        if isinstance(value, tuple | list):
            return tuple(self._rows_in_graph(item) for item in value)
        if not isinstance(value, Tensor):
            return None
        sizes = [d.node.expr if isinstance(d, torch.SymInt) else d for d in value.shape]
        axes = [a for a, size in enumerate(sizes) if not isinstance(size, int)]
        is_whole = len(axes) == 1 and sizes[axes[0]] == self._captured.batch
        return Rows(axes[0]) if is_whole else None

    def _check(self, node: Node, result: Any) -> None:
        """The result at B must have the shape that the model's graph has for B rows.

        Of several results, those that are read: the graph has a wrong one for the state of an LSTM.
        """
        values = node.meta.get("val")
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        pairs = zip(_as_tuple(result), _as_tuple(values), strict=False)
        for place, (form, value) in enumerate(pairs):
            if not isinstance(form, f.FORMS) or not isinstance(value, Tensor):
                continue
            if isinstance(result, tuple) and place not in read:
                continue
            b, batch = self._walk.num_candidates, self._captured.batch
            if any(_symbols(d) - {batch} for d in value.shape):
                raise self._error(node, "has a size that depends on the values of a tensor")
            expected = [_evaluate(d, batch, b) for d in value.shape]
            actual = [int(f.at(d, b)) for d in f.shape(form)]
            if expected != actual or value.dtype != f.dtype(form):
                raise self._error(
                    node,
                    f"became {f.dtype(form)} {actual} instead of {value.dtype} {expected}",
                )

    def _finish(self, node: Node) -> Any:
        captured, walk = self._captured, self._walk
        walk.node = "output"
        results = []
        for value in node.args[0]:  # type: ignore[union-attr]
            form = self.values[value] if isinstance(value, Node) else value
            if isinstance(form, f.FORMS):
                with at_origin("output"):
                    form = self._output(form)
            results.append(f.at(form, walk.num_candidates))
        return pytree.tree_unflatten(results, captured.program.call_spec.out_spec)

    def _output(self, form: Any) -> Tensor:
        if self._keep_users and isinstance(form, User) and form.rows == Rows():
            return form.tensor.clone()
        tensor = self._walk.materialise(form, "the model returns it for every candidate")
        # A value that is an input, or a constant, may not leave a graph under the same name.
        return tensor.clone() if isinstance(form, Const | PerBatch) else tensor

    def _error(self, node: Node, what: str) -> TransformError:
        return TransformError(f"ikbo.transform: {node.target} {what} ({source_line(node)})")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _symbols(dim: Any) -> set[Any]:
    return set(dim.node.expr.free_symbols) if isinstance(dim, torch.SymInt) else set()


def _evaluate(dim: Any, symbol: Any, n: int) -> int:
    return int(dim.node.expr.subs(symbol, n)) if isinstance(dim, torch.SymInt) else int(dim)
