# SPDX-License-Identifier: Apache-2.0
"""The example inputs of a transformation: their names, their roles, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ikbo.transform import packed
from ikbo.transform.packed import Packed

INDEX = "cand_to_user"


def split(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    raise TypeError(
        "ikbo.transform: example_inputs must be a tuple (positional arguments) or a dict (keyword "
        f"arguments); got {type(example_inputs).__name__}"
    )


def unshared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with a copy of a tensor that is given twice: an export takes it for one."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) not in seen:
            seen.add(id(x))
            return x
        return x.clone()

    return pytree.tree_map(own, (args, kwargs))  # type: ignore[no-any-return]


def check_fit(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises TypeError where the model's `forward` does not take these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"ikbo.transform: example_inputs must fit model.forward: {error}; its parameters are "
            f"{list(signature.parameters)}"
        ) from None


def named_leaves(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, Any]]:
    """The flat inputs, each with its name: parameter, then keys, joined by dots.

    Where the only argument is a container, its keys alone are the names.
    """
    parameters = list(signature.parameters)
    positional = [parameters[i] if i < len(parameters) else f"arg{i}" for i in range(len(args))]
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    is_sole = len(args) + len(kwargs) == 1
    named = []
    for path, value in leaves:
        keys = [_key(entry) for entry in path[1:]]
        if path[0].idx == 0:
            keys[0] = positional[int(keys[0])]
        if is_sole and len(keys) > 1:
            keys = keys[1:]
        named.append((".".join(keys), value))
    return named


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def roles(
    named: Sequence[tuple[str, Any]], request_only: Sequence[str], columns: Any = None
) -> dict[str, str | Packed]:
    """The name of each tensor to "user", "candidate", or which of its columns are the user's."""
    known = [name for name, value in named if isinstance(value, Tensor)]
    others = {name: value for name, value in named if not isinstance(value, Tensor)}
    if INDEX in known:
        raise ValueError(
            f"ikbo.transform: an input of the model is called {INDEX!r}, which is the name of the "
            "index that the transformed model takes; rename the input"
        )
    if isinstance(request_only, str) or not request_only:
        raise ValueError(
            "ikbo.transform: request_only must be a list with at least one input name; "
            f"got {request_only!r}; the inputs are {known}"
        )
    tensors = {name: value for name, value in named if isinstance(value, Tensor)}
    places = packed.ranges(columns, tensors)
    users: set[str] = set()
    chosen: dict[str, dict[int, set[int]]] = {}
    for wanted in request_only:
        found = [name for name in known if name == wanted or name.startswith(f"{wanted}.")]
        picked = None if found else _columns(wanted, tensors, places)
        if picked is not None:
            name, axis, some = picked
            chosen.setdefault(name, {}).setdefault(axis, set()).update(some)
            continue
        for name, value in others.items():
            if name == wanted or (not found and name.startswith(f"{wanted}.")):
                raise _no_tensor(name, value)
        if not found:
            raise ValueError(
                f"ikbo.transform: request_only has {wanted!r}, which is no input of the model"
                f"{' and no column' if places else ''}; the inputs are {known}"
                f"{f', the columns {list(places)}' if places else ''}"
            )
        users.update(found)
    for name, value in others.items():
        if isinstance(value, np.ndarray):
            raise _no_tensor(name, value)
    mixed = _packed({n: c for n, c in chosen.items() if n not in users}, tensors, known)
    users.update(name for name in chosen if name not in mixed)
    if len(users) == len(known):
        raise ValueError(
            "ikbo.transform: request_only must leave at least one input to the candidates; it "
            f"names all: {known}; a model of users alone has nothing to share: run it once per user"
        )
    return {
        name: "user" if name in users else mixed.get(name, "candidate")  # type: ignore[arg-type]
        for name in known
    }


def _columns(
    wanted: str, tensors: Mapping[str, Tensor], places: Mapping[str, tuple[str, range]]
) -> tuple[str, int, set[int]] | None:
    """The input, axis and columns that an entry of `request_only` names, if it names columns."""
    if wanted not in places:
        return packed.subscript(wanted, tensors)
    name, place = places[wanted]
    return name, tensors[name].ndim - 1, set(place)


def _packed(
    chosen: Mapping[str, Mapping[int, set[int]]], tensors: Mapping[str, Tensor], known: list[str]
) -> dict[str, Packed]:
    """The inputs of which some columns are the user's, not all."""
    mixed = {}
    for name, by_axis in chosen.items():
        if len(by_axis) > 1:
            raise ValueError(
                f"ikbo.transform: the columns of input {name!r} must be along one axis; "
                f"request_only names columns along the axes {sorted(by_axis)}"
            )
        ((axis, columns),) = by_axis.items()
        width = tensors[name].shape[axis]
        if len(columns) < width:
            mixed[name] = Packed(axis, width, frozenset(columns))
    taken = [f"{name}.{side}" for name in mixed for side in packed.SIDES]
    clash = sorted(set(taken) & set(known))
    if clash:
        raise ValueError(
            f"ikbo.transform: the parts of a packed input are called {taken}, but the model has "
            f"the inputs {clash}; rename them"
        )
    return mixed


def _no_tensor(name: str, value: Any) -> TypeError:
    fix = "; convert it with torch.from_numpy()" if isinstance(value, np.ndarray) else ""
    return TypeError(
        f"ikbo.transform: input {name!r} must be a torch.Tensor; got {type(value).__name__}{fix}"
    )


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the tensors cannot be the rows of one batch."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise ValueError(
                f"ikbo.transform: input {name!r} must be dense, of layout torch.strided; got "
                f"{tensor.layout}"
            )
        if tensor.ndim == 0:
            raise ValueError(
                f"ikbo.transform: input {name!r} must have the batch as its first axis; "
                "got a tensor without axes; make it a buffer of the model"
            )
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) != 1:
        raise ValueError(f"ikbo.transform: all example inputs must be on one device; got {devices}")
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            "ikbo.transform: all example inputs must have one batch size, user rows replicated; "
            f"got {sizes}"
        )
    if min(sizes.values()) < 2:
        raise ValueError(
            "ikbo.transform: example inputs must have 2 rows or more, since torch.export takes a "
            f"batch of one for a fixed size; got {min(sizes.values())}"
        )
