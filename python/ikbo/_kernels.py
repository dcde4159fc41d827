# SPDX-License-Identifier: Apache-2.0
"""Which operators of ikbo a lowered program calls, and with which kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from ikbo._manifest import DTYPE_NAMES, KernelRun, OpSchema
from ikbo._source_line import source_line

# Operators of torch itself; every process with libtorch has them.
_TORCH_NAMESPACES = ("aten", "prim", "prims")


@dataclass(frozen=True)
class _Query:
    """How the sizes that choose an operator's kernel are read off its arguments, of which the
    candidate's may be a list.

    `operands` are those on whose place in memory the choice depends, on a GPU, and `flags` what
    else it depends on there, in the order of `ikbo::_select_kernel`. `op` is what that calls an
    overload with kernels of its own, and `rows_more` how many more rows than U the user's has.
    """

    user: str
    cand: str
    dims: Callable[[Mapping[str, Any]], Sequence[Any]]
    operands: tuple[str, ...] = ()
    flags: Callable[[Mapping[str, Any]], Sequence[bool]] = lambda _: ()
    op: str | None = None
    rows_more: int = 0


def _has_positive_scale(a: Mapping[str, Any]) -> bool:
    scale = a.get("scale")
    return scale is None or scale > 0


def _attention_flags(a: Mapping[str, Any]) -> Sequence[bool]:
    return a.get("user_mask") is not None, _has_positive_scale(a)


def _bmm_dims(a: Mapping[str, Any]) -> Sequence[Any]:
    rows, inner = a["a_user"].shape[1:]
    columns = a["b_cand"].shape[1 if a.get("transpose_b") else 2]
    return [inner, rows, columns] if a.get("transpose_a") else [rows, inner, columns]


def _lce_dims(a: Mapping[str, Any]) -> Sequence[Any]:
    k_cand = sum(part.shape[1] for part in pytree.tree_leaves(a["e_cand"]))
    return [a["w_user"].shape[0], a["e_user"].shape[2], a["e_user"].shape[1], k_cand]


_LINEAR = _Query(
    "x_user",
    "x_cand",
    lambda a: [a["w_user"].shape[0], a["x_user"].shape[1], a["x_cand"].shape[1]],
    ("x_user", "x_cand", "w_user", "w_cand"),
)
_LCE = _Query("e_user", "e_cand", _lce_dims, ("e_user", "w_user", "w_cand", "e_cand"))

# Dims in the order of `ikbo::_select_kernel`.
_QUERIES = {
    "ikbo::linear": _LINEAR,
    "ikbo::linear.prepacked": _LINEAR,
    "ikbo::lce": _LCE,
    "ikbo::lce.list": _LCE,
    "ikbo::lce.prepacked": _LCE,
    "ikbo::bmm": _Query(
        "a_user",
        "b_cand",
        _bmm_dims,
        ("a_user", "b_cand"),
        lambda a: (bool(a.get("transpose_a")), bool(a.get("transpose_b"))),
    ),
    "ikbo::target_attention": _Query(
        "k",
        "q",
        lambda a: [a["q"].shape[1], a["k"].shape[1], a["q"].shape[2], *a["k"].shape[2:]],
        ("q", "k", "v"),
        _attention_flags,
    ),
    "ikbo::target_attention.packed": _Query(
        "user_offsets",
        "q",
        lambda a: [*a["q"].shape[1:3], *a["k"].shape[1:]],
        ("q", "k", "v"),
        _attention_flags,
        op="target_attention.packed",
        rows_more=1,
    ),
    "ikbo::self_target_attention": _Query(
        "k",
        "q_cand",
        lambda a: [a["q_cand"].shape[1], *a["q_user"].shape[1:3], *a["k"].shape[2:]],
        ("q_user", "q_cand", "k", "v"),
        lambda a: (_has_positive_scale(a),),
    ),
}  # fmt: skip


def _calls(program: ExportedProgram) -> Iterator[Node]:
    return (
        node
        for node in program.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    )


def ops_of(*programs: ExportedProgram) -> tuple[OpSchema, ...]:
    """The ikbo operators that a package of the lowered programs calls, by name.

    Raises RuntimeError when it calls an operator of another library: the runtime has only ikbo's.
    """
    schemas = {}
    for node in (node for program in programs for node in _calls(program)):
        op = node.target
        if op.name() == "ikbo::expand":  # compiled into what reads it
            continue
        if op.namespace == "ikbo":
            schemas[op.name()] = OpSchema(op.name(), str(op._schema))
        elif op.namespace not in _TORCH_NAMESPACES:
            raise RuntimeError(
                "ikbo.package: the module must call operators of torch and ikbo only, the ones "
                f"that the runtime has; it calls {op.name()} ({source_line(node)})"
            )
    return tuple(schemas[name] for name in sorted(schemas))


def kernels_at(program: ExportedProgram, inputs: Sequence[Tensor]) -> tuple[KernelRun, ...]:
    """The kernel that each ikbo call of the program chooses for `inputs`, in the graph's order."""
    sizes = _symbol_values(program, inputs)
    runs = []
    for node in _calls(program):
        query = _QUERIES.get(node.target.name())
        if query is None:
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        values = torch.fx.map_arg(arguments, lambda node: node.meta["val"])
        cand = pytree.tree_leaves(values[query.cand])[0]
        layouts = [_layout(query, values)] if cand.device.type == "cuda" else []
        kernel = torch.ops.ikbo._select_kernel(
            query.op or node.target._opname,
            cand.device.type,
            DTYPE_NAMES[cand.dtype],
            _resolve(values[query.user].shape[0], sizes) - query.rows_more,
            _resolve(cand.shape[0], sizes),
            [_resolve(size, sizes) for size in query.dims(values)],
            *[[_resolve(number, sizes) for number in layout] for layout in layouts],
        )
        runs.append(KernelRun(node.target._opname, kernel))
    return tuple(runs)


def _layout(query: _Query, values: Mapping[str, Any]) -> list[Any]:
    """The argument `layout` of `ikbo::_select_kernel`."""
    layout: list[Any] = []
    for name in query.operands:
        if name not in values:  # linear and lce call a packed w_cand by another name
            layout += [0, -1, -1]
            continue
        for tensor in pytree.tree_leaves(values[name]):
            layout += [tensor.shape[1]] if name == "e_cand" else []
            layout += [tensor.storage_offset(), *tensor.stride()]
    return layout + [int(flag) for flag in query.flags(values)]


def _symbol_values(program: ExportedProgram, inputs: Sequence[Tensor]) -> dict[Any, int]:
    """Size symbol of the program to its value for `inputs`."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    taken = [
        placeholders[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument)
    ]
    values = {}
    for value, tensor in zip(taken, inputs, strict=True):
        for size, actual in zip(value.shape, tensor.shape, strict=True):
            if isinstance(size, torch.SymInt):
                values[size.node.expr] = actual
    return values


def _resolve(size: int | torch.SymInt, sizes: Mapping[Any, int]) -> int:
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size
