# SPDX-License-Identifier: Apache-2.0
"""Arguments of another type or layout than the operators take, refused in words of ikbo.

A call of an operator that does not fail pays a few comparisons with None: `check` runs where a
required tensor is None, which PyTorch would pass on, and after PyTorch refused a call. Tensors that
are not dense are told apart by the dispatcher, which has kernels for them that refuse.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Per operator, name and type of each argument. Plain text, so that a compiled call can be refused.
_SIGNATURES: dict[str, tuple[tuple[str, str], ...]] = {}

# What PyTorch raises for an argument that no kernel has seen.
REFUSED = (AttributeError, RuntimeError, TypeError)

_NOT_DENSE = (
    "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "NestedTensorCPU",
    "NestedTensorCUDA", "MkldnnCPU", "QuantizedCPU", "QuantizedCUDA",
)  # fmt: skip
_LIBRARY = torch.library.Library("ikbo", "IMPL")


def is_tensor(value: Any) -> bool:
    # What stands for a tensor in a trace, too.
    return isinstance(value, Tensor) or hasattr(value, "__torch_function__")


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral | torch.SymInt | Tensor)


def _is_float(value: Any) -> bool:
    return value is None or isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt | Tensor)


# Per type of a schema: what is taken, in a test and in words.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "Tensor": (is_tensor, "a torch.Tensor"),
    "Optional[Tensor]": (lambda x: x is None or is_tensor(x), "a torch.Tensor or None"),
    "str": (lambda x: isinstance(x, str), "a str"),
    "bool": (lambda x: _is_int(x) or isinstance(x, torch.SymBool), "a bool"),
    "Optional[float]": (_is_float, "a float or None"),
    "List[int]": (lambda x: isinstance(x, Sequence) and all(map(_is_int, x)), "a list of ints"),
}


def check(op: str, *args: Any) -> None:
    """Refuses what ``ikbo::<op>``, called with these arguments, takes no value of.

    Errors:
        TypeError: an argument is not of its type, or a tensor that is not dense. Without one of
        these it returns: the call fails for another reason, or it does not.
    """
    name = op.partition(".")[0]
    for (argument, kind), value in zip(_SIGNATURES[op], args, strict=False):
        if kind == "List[Tensor]":
            for i, part in enumerate(value):
                _check_argument(name, f"{argument}[{i}]", "Tensor", part)
        else:
            _check_argument(name, argument, kind, value)


def _check_argument(op: str, name: str, kind: str, value: Any) -> None:
    is_taken, words = _TYPES[kind]
    if not is_taken(value):
        raise refusal(op, name, words, value) from None
    if not isinstance(value, Tensor):
        return
    if value.is_nested or value.layout is not torch.strided:
        is_plain_nested = value.is_nested and value.layout is torch.strided
        got = "a nested tensor" if is_plain_nested else str(value.layout)
        fix = ".to_padded_tensor(0)" if value.is_nested else ".to_dense()"
        raise TypeError(
            f"ikbo::{op}: {name} must be dense, of layout torch.strided; got {got}; convert it "
            f"with {fix}"
        ) from None
    if value.is_quantized:
        raise TypeError(
            f"ikbo::{op}: {name} must not be quantised; got {value.dtype}; convert it with "
            ".dequantize()"
        ) from None


def refusal(op: str, name: str, words: str, value: Any) -> TypeError:
    """The error for an argument that must be `words` and is not."""
    got, fix = type(value).__name__, ""
    if isinstance(value, list | tuple) and words == "a list of ints":
        got = f"a list with {next(type(x).__name__ for x in value if not _is_int(x))}"
    elif isinstance(value, list | tuple):
        fix = "; convert it with torch.tensor()"
    elif type(value).__module__ == "numpy":
        fix = "; convert it with torch.from_numpy()"
    elif isinstance(getattr(value, "cand_to_user", None), Tensor):
        fix = "; pass its cand_to_user"
    return TypeError(f"ikbo::{op}: {name} must be {words}; got {got}{fix}")


def register(op: str) -> None:
    """Makes ``ikbo::<op>`` known to `check`, and gives it kernels for tensors that are not dense,
    which refuse them."""
    name, _, overload = op.partition(".")
    schema = getattr(getattr(torch.ops.ikbo, name), overload or "default")._schema
    _SIGNATURES[op] = tuple((argument.name, str(argument.type)) for argument in schema.arguments)

    def kernel(*args: Any) -> Any:
        check(op, *args)
        raise TypeError(f"ikbo::{name}: all tensors must be dense, of layout torch.strided")

    for key in _NOT_DENSE:
        _LIBRARY.impl(op, kernel, key)
