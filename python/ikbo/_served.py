# SPDX-License-Identifier: Apache-2.0
"""A module as a package serves it: flat named inputs with roles, flat outputs, two batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ikbo._manifest import CANDIDATE, DTYPE_NAMES, INDEX, ROLES, USER

# Batch sizes to export with: primes, so that none is a multiple of another size by chance. They are
# also the sizes for which Inductor tunes its loops.
_USER_SIZES = (17, 13, 11, 7, 5, 3, 2)
_CAND_SIZES = (1021, 509, 251, 127, 61, 31, 19, 11, 7, 5, 3, 2)


class FlatModule(nn.Module):
    """`inner` behind a flat list of tensors; returns its output tensors flat and contiguous.

    `leaves` are the example leaves of `inner`'s inputs; what is no tensor stays as it is.
    """

    def __init__(self, inner: nn.Module, leaves: Sequence[Any], in_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.inner = inner
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensor_positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.in_spec = in_spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = pytree.tree_leaves(self.call(*tensors))
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(f"outputs must be tensors; got {type(output).__name__}")
        return tuple(x.contiguous() for x in outputs)

    def call(self, *tensors: Tensor) -> Any:
        """`inner`'s own output."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        return self.inner(*args, **kwargs)


@dataclass(frozen=True)
class ServedModel:
    """A module with the names and roles of its flat inputs and example rows for them.

    `examples` hold any number of rows each; the index's are not used.
    """

    module: FlatModule
    roles: Mapping[str, str]
    examples: Mapping[str, Tensor]
    max_users: int
    max_candidates: int
    # An `ikbo.transform.Spec`, of a transformed module.
    spec: Any = None
    # The unmodified model, where it may run over a part of the range.
    replicated: nn.Module | None = None

    @property
    def variants(self) -> tuple[Any, ...]:
        """Which form runs where; none for a plain module."""
        return () if self.spec is None else self.spec.variants

    @property
    def device(self) -> torch.device:
        return next(iter(self.examples.values())).device

    def output_names(self, inputs: Sequence[Tensor]) -> list[str]:
        """One name per output tensor: keys joined by dots, else `output` and a number."""
        paths, _ = pytree.tree_flatten_with_path(self.module.call(*inputs))
        names = [_dotted(path) for path, _ in paths]
        return [f"output_{n}" if n.isdigit() else n or "output" for n in names]

    def export_sizes(self) -> tuple[int, int]:
        """(U, B) to export with: different, and unlike the inputs' fixed sizes if possible."""
        fixed = {size for x in self.examples.values() for size in x.shape[1:]}
        num_users = _pick(_USER_SIZES, self.max_users, fixed)
        return num_users, _pick(_CAND_SIZES, self.max_candidates, fixed | {num_users})

    def make_inputs(self, num_users: int, cand_to_user: Tensor, seed: int) -> list[Tensor]:
        """Inputs with rows drawn from the example rows; those of one role are drawn together."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {USER: num_users, CANDIDATE: cand_to_user.numel()}
        rows: dict[str, Tensor] = {}
        inputs = []
        for name, role in self.roles.items():
            example = self.examples[name]
            if role == INDEX:
                inputs.append(cand_to_user.to(example.device))
                continue
            if role not in rows:
                rows[role] = torch.randint(len(example), (sizes[role],), generator=generator)
            inputs.append(example[rows[role].to(example.device)].contiguous())
        return inputs


def _pick(sizes: Sequence[int], limit: int, taken: set[int]) -> int:
    fitting = [size for size in sizes if size <= max(limit, 2)]
    return next((size for size in fitting if size not in taken), fitting[-1])


def _dotted(path: pytree.KeyPath) -> str:
    return ".".join(str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path)


def from_transformed(
    module: Any, max_users: int | None, max_candidates: int | None, both_forms: bool | str
) -> ServedModel:
    """A served model around a `TransformedModule`, which knows roles and ranges."""
    from ikbo.transform.break_even import MEASURED
    from ikbo.transform.variants import REPLICATED, ReplicatedModule, variants_of

    program, roles, spec = module.exported_program, dict(module.roles), module.spec
    if both_forms is True:
        limits = (spec.max_users, spec.max_candidates)
        spec = replace(spec, variants=variants_of(spec.pays_from["package"], limits))
    args, kwargs = program.example_inputs
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    examples = dict(zip(roles, tensors, strict=True))
    flat = FlatModule(program.module(), leaves, in_spec)
    may_run = both_forms == MEASURED or any(v.form == REPLICATED for v in spec.variants)
    return ServedModel(
        flat,
        roles,
        examples,
        _narrow("max_users", max_users, spec.max_users),
        _narrow("max_candidates", max_candidates, spec.max_candidates),
        spec,
        ReplicatedModule(module.captured) if may_run else None,
    )


def _narrow(argument: str, asked: int | None, limit: int) -> int:
    """A transformed module's range, or a smaller one that the caller asks for."""
    if asked is None:
        return limit
    if _check_limit(argument, asked) > limit:
        raise ValueError(
            f"ikbo.package: {argument} must be at most {limit}, for which the module was "
            f"transformed; got {asked}; pass {argument}={asked} to ikbo.transform"
        )
    return asked


def _check_limit(argument: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"ikbo.package: {argument} must be an int in 1..2^31-1; got {value!r}")
    return value


def from_module(
    module: nn.Module,
    example_inputs: Any,
    roles: Mapping[str, str] | None,
    max_users: int | None,
    max_candidates: int | None,
) -> ServedModel:
    """A served model around a plain module. Raises ValueError or TypeError on bad arguments."""
    if any(child.training for child in module.modules()):
        raise ValueError("ikbo.package: module must be in eval mode; call module.eval() first")
    names, leaves, in_spec = _flatten(module, example_inputs)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(roles, Mapping) and name in roles and not isinstance(leaf, Tensor):
            raise TypeError(
                f"ikbo.package: input {name} must be a torch.Tensor; got {type(leaf).__name__}"
            )
    tensors = [(n, x) for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]
    examples = dict(tensors)
    if len(examples) != len(tensors):
        raise ValueError(f"ikbo.package: input names must be unique; got {sorted(names)}")
    for name, example in tensors:
        _check_example(name, example)
    ordered = _check_roles(list(examples), roles)
    candidates = _check_limit("max_candidates", max_candidates)
    if USER in ordered.values():
        _check_limit("max_users", max_users)
    elif max_users:
        raise ValueError(
            "ikbo.package: max_users must be 0 or left out when no input has role user; "
            f"got {max_users!r}"
        )
    _check_batches(examples, ordered)
    flat = FlatModule(module, leaves, in_spec)
    return ServedModel(flat, ordered, examples, max_users or 0, candidates)


def _flatten(module: nn.Module, example_inputs: Any) -> tuple[list[str], list[Any], Any]:
    """Names, leaves and structure of the inputs, named as `ikbo.transform` names them.

    A nested leaf is named by its path, `features.age`, without the parameter's name where the
    container is the only argument.
    """
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, tuple):
        args, kwargs = example_inputs, {}
    else:
        raise TypeError(
            "ikbo.package: example_inputs must be a tuple of positional or a dict of keyword "
            f"arguments of the module; got {type(example_inputs).__name__}"
        )
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"ikbo.package: example_inputs must fit module.forward: {error}") from error
    positional: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            extra = len(args) - len(positional)
            positional += [f"{parameter.name}.{i}" for i in range(extra)]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append(parameter.name)
    paths, in_spec = pytree.tree_flatten_with_path((args, kwargs))
    is_sole = len(args) + len(kwargs) == 1
    names = [_input_name(path, positional, is_sole) for path, _ in paths]
    return names, [leaf for _, leaf in paths], in_spec


def _input_name(path: pytree.KeyPath, positional: Sequence[str], is_sole: bool) -> str:
    """`path` leads into `(args, kwargs)`."""
    side, top, *rest = path
    first = positional[top.idx] if side.idx == 0 else top.key
    nested = [_dotted(tuple(rest))] if rest else []
    return ".".join(nested if is_sole and nested else [first, *nested])


def _check_example(name: str, leaf: Tensor) -> None:
    if leaf.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"ikbo.package: the dtype of input {name} must be one of "
            f"{', '.join(DTYPE_NAMES.values())}; got {leaf.dtype}"
        )
    if leaf.dim() < 1 or len(leaf) < 1:
        raise ValueError(
            f"ikbo.package: input {name} must have a batch of at least one example row in "
            f"dimension 0; got shape {list(leaf.shape)}"
        )


def _check_roles(names: Sequence[str], roles: Mapping[str, str] | None) -> dict[str, str]:
    """Roles in input order."""
    if roles is not None and not isinstance(roles, Mapping):
        raise TypeError(
            "ikbo.package: roles must be a dict from input name to role; got "
            f"{type(roles).__name__}"
        )
    known = dict(roles or {})
    missing = [name for name in names if name not in known]
    unknown = [name for name in known if name not in names]
    if missing or unknown:
        raise ValueError(
            f"ikbo.package: roles must name each input once; missing {missing}, unknown "
            f"{unknown}; the inputs are {list(names)}"
        )
    for name, role in known.items():
        if role not in ROLES:
            raise ValueError(
                f"ikbo.package: the role of input {name} must be one of {', '.join(ROLES)}; got "
                f"{role!r}"
            )
    counts = {role: list(known.values()).count(role) for role in ROLES}
    if counts[INDEX] != (1 if counts[USER] else 0):
        raise ValueError(
            "ikbo.package: a module with user inputs must have one input with role index, and one "
            f"without must have none; got {counts[USER]} user inputs and {counts[INDEX]} indices"
        )
    return {name: known[name] for name in names}


def _check_batches(examples: Mapping[str, Tensor], roles: Mapping[str, str]) -> None:
    devices = {str(x.device) for x in examples.values()}
    if len(devices) > 1:
        raise ValueError(f"ikbo.package: all inputs must be on one device; got {sorted(devices)}")
    rows: dict[str, int] = {}
    for name, role in roles.items():
        example = examples[name]
        if role == INDEX and (example.dtype != torch.int32 or example.dim() != 1):
            raise ValueError(
                f"ikbo.package: the index {name} must be int32 of shape [B]; got {example.dtype} "
                f"of shape {list(example.shape)}"
            )
        batch = USER if role == USER else CANDIDATE
        expected = rows.setdefault(batch, len(example))
        if len(example) != expected:
            raise ValueError(
                f"ikbo.package: inputs of one batch must have equally many rows; input {name} "
                f"({role}) has {len(example)}, another {expected}"
            )
