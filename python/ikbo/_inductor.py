# SPDX-License-Identifier: Apache-2.0
"""The one module that touches TorchInductor: how ikbo operators become code inside a package.

| operator | in a package |
|---|---|
| `expand` | its input is realised at U, then gathered; the gather fuses into whatever reads it |
| `linear`, `lce` in fp32 and fp64 | GEMM at U, GEMM at B, gather, add, activation: the last three fuse |
| `linear`, `lce` in 16 bits | our kernel: it sums in fp32 and rounds once |
| `bmm`, `target_attention` | our kernel |

Why `expand` needs its own lowering: Inductor inlines the arithmetic that produces a value into every loop
that reads it, so a plain `index_select` of a user value recomputes user-only work for every candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

# Versions of torch whose private lowering registry was tested with `expand`'s lowering. On any other one
# the opaque identity operator takes its place.
_LOWERING_VERSIONS = ("2.11",)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def compile_options(device: str) -> dict[str, Any]:
    """Inductor's options for a package on `device` ("cpu" or "cuda")."""
    options: dict[str, Any] = {
        # The runtime checks index values on the host before a run.
        "assert_indirect_indexing": False,
        # The runtime checks every shape; asserts on batch sizes also trip code generation.
        "scalar_asserts": False,
    }
    if device == "cpu":
        # The number of threads is the server's choice, not the compiling machine's.
        options["cpp.dynamic_threads"] = True
    return options


def compile_to(program: ExportedProgram, file: Any, options: dict[str, Any]) -> None:
    """Compiles `program` with AOTInductor into `file`, a binary file open for writing and seeking."""
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program, package_path=file, inductor_configs=dict(options)
        )


def lower_operators(program: ExportedProgram) -> ExportedProgram:
    """Replaces the ikbo operators that a package is faster without; keeps every other operator whole."""
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.ikbo.linear.default: _linear,
        torch.ops.ikbo.lce.default: _lce,
    }
    program = program.run_decompositions(table)
    if not register_expand_lowering():
        program = program.run_decompositions({torch.ops.ikbo.expand.default: _expand_opaque})
    return program


@functools.cache
def register_expand_lowering() -> bool:
    """Teaches Inductor `ikbo::expand`, once per process. False where this torch is not a tested one."""
    if ".".join(torch.__version__.split(".")[:2]) not in _LOWERING_VERSIONS:
        return False
    from torch._inductor.lowering import lowerings, register_lowering

    @register_lowering(torch.ops.ikbo.expand.default, type_promotion_kind=None)
    def expand(x_user: Any, cand_to_user: Any) -> Any:
        x_user.realize()
        return lowerings[torch.ops.aten.index.Tensor](x_user, [cand_to_user])

    return True


def _expand_opaque(x_user: Tensor, cand_to_user: Tensor) -> Tensor:
    """`expand` behind an identity that Inductor cannot see through."""
    return torch.ops.ikbo._realise(x_user).index_select(0, cand_to_user)


def _linear(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Any:
    if x_cand.dtype.itemsize < 4:
        return NotImplemented
    if bias is None:
        user = torch.mm(x_user, w_user.t())
    else:
        user = torch.addmm(bias, x_user, w_user.t())
    mixed = torch.ops.ikbo.expand(user, cand_to_user) + torch.mm(x_cand, w_cand.t())
    return _ACTIVATIONS[activation](mixed)


def _lce(
    e_user: Tensor,
    e_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Any:
    if e_cand.dtype.itemsize < 4:
        return NotImplemented
    user = torch.bmm(w_user.expand(e_user.size(0), -1, -1), e_user)
    if bias is not None:
        user = user + bias[:, None]
    cand = torch.bmm(w_cand.expand(e_cand.size(0), -1, -1), e_cand)
    return torch.ops.ikbo.expand(user, cand_to_user) + cand


@torch.library.register_fake("ikbo::_realise")
def _realise_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
