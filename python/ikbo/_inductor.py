# SPDX-License-Identifier: Apache-2.0
"""How ikbo operators become code inside a package.

This module, `_inductor_branches` and `_inductor_products` alone touch TorchInductor.

| operator | in a package |
|---|---|
| `expand` | its input is realised at U, then gathered; the gather fuses into what reads it |
| `linear`, `lce` where that is faster | two GEMMs, gather, add, activation; the last three fuse |
| `lce` elsewhere | our kernel, on a contiguous user operand |
| all others | our kernel |

Where it is faster was measured, by device and element type (`_IN_PARTS`).

Why `expand` needs its own lowering: Inductor inlines the arithmetic that produces a value into
every loop that reads it, so a plain `index_select` of a user value recomputes user-only work for
every candidate.

Why the plain form of `linear` on the CPU: weights are constants of a package, so Inductor packs the
large ones for oneDNN, and what follows the GEMMs fuses; bench/results/ops-cpu.json compares it
(`inside: package`) with our kernel. In 16 bits it would round each GEMM's result there; our kernel
sums in fp32 and rounds once. On a GPU a GEMM of 16 bits can write fp32: parts then round once, too.

`lce` stays whole on the CPU. As one GEMM over B x N rows it would need its candidates transposed, a
temporary of their size. Above 32 MiB glibc maps that anew at each run, with a page fault for every
4 KiB, so that its time is that of the machine's page faults; our kernel has no such temporary.
Embeddings of the user that the model transposed are copied first: the fast kernels for GPUs read
rows whose elements are neighbours, and a copy at U costs little.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.cpp_builder import is_gcc
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from ikbo._inductor_branches import branches_as_programs, has_branches
from ikbo._inductor_products import chosen_products
from ikbo._layers import with_epilogues, with_one_product
from ikbo.reference import ACTIVATIONS

# Versions of torch whose private lowering registry was tested with `expand`'s lowering. On any
# other one the opaque identity operator takes its place.
_LOWERING_VERSIONS = ("2.11", "2.15")
# Those tested with `branches_as_programs` and `chosen_products`. On any other one branches and
# products are compiled as torch does it.
_PATCHED_VERSIONS = ("2.11",)

# Where GEMMs, gather and add are faster than our kernel: operator and device to element types.
# Measured in bench/results: ops-cpu.json, linear-h200.json, generic-h200.json.
_IN_PARTS = {
    ("linear", "cpu"): (torch.float32,),
    ("linear", "cuda"): (torch.float32,),
    ("lce", "cuda"): (torch.float32,),
}
# On a GPU in 16 bits, `linear` with as many columns and rows of `w_cand`, too: linear-h200.json.
_LONG, _WIDE = 4096, 1024


def _is_one_of(versions: Sequence[str]) -> bool:
    """Whether this torch is of one of the minor versions."""
    return ".".join(torch.__version__.split(".")[:2]) in versions


def compile_options(device: str) -> dict[str, Any]:
    """Inductor's options for a package on `device` ("cpu" or "cuda")."""
    options: dict[str, Any] = {
        # The runtime checks index values on the host before a run.
        "assert_indirect_indexing": False,
        # The runtime checks every shape; asserts on batch sizes also trip code generation.
        "scalar_asserts": False,
    }
    if is_gcc():
        # GCC makes symbols of std::regex unique in the process, and glibc never unmaps a library
        # that has one. Inductor takes no flags of a caller's; this option is written behind one.
        contract = config.cpp.enable_floating_point_contract_flag
        options["cpp.enable_floating_point_contract_flag"] = f"{contract} -fno-gnu-unique"
    if device == "cpu":
        # Weights are constants: fold what is computed from them, pack large ones for oneDNN.
        options["freezing"] = True
        # The number of threads is the server's choice, not the compiling machine's.
        options["cpp.dynamic_threads"] = True
        # Link libtorch_cpu alone, which every process that runs a package has. libtorch would pull
        # in the CUDA libraries: 480 MB resident in ikbo-replay instead of 123 MB (torch
        # 2.11.0+cu130).
        options["aot_inductor.link_libtorch"] = False
        options["aot_inductor.custom_op_libs"] = ["torch_cpu"]
    return options


def compile_to(
    programs: Mapping[str, tuple[ExportedProgram, Mapping[str, Any]]], file: Any
) -> None:
    """Compiles programs with AOTInductor into one archive.

    Args:
        programs: by the name of their folder in the archive, each with Inductor's options.
        file: binary, open to write and to seek.
    """
    # NOTE: Inductor finds the vector instructions of this machine once, by compiling a test program
    # under the options then in force. Without libtorch that program does not load, and all packages
    # of this machine would be scalar code.
    valid_vec_isa_list()
    from torch._inductor.package import package_aoti  # slow to import

    examples = tree_leaves([program.example_inputs for program, _ in programs.values()])
    largest_batch = max((len(x) for x in examples if x.dim()), default=1)
    files = {}
    for name, (program, options) in programs.items():
        args, kwargs = program.example_inputs
        with contextlib.ExitStack() as stack:
            stack.enter_context(_torch_on_library_path())
            if _is_one_of(_PATCHED_VERSIONS):
                stack.enter_context(chosen_products(largest_batch))
                if has_branches(program):
                    stack.enter_context(branches_as_programs())
            stack.enter_context(torch.no_grad())
            files[name] = torch._inductor.aot_compile(
                program.module(check_guards=False),
                args,
                kwargs,
                options={**options, "aot_inductor.package": True},
            )
    package_aoti(file, files)


@contextlib.contextmanager
def _torch_on_library_path() -> Iterator[None]:
    """Lets the linker find torch's libraries by name."""
    before = os.environ.get("LIBRARY_PATH")
    library_path = os.path.join(os.path.dirname(torch.__file__), "lib")
    os.environ["LIBRARY_PATH"] = f"{library_path}:{before}" if before else library_path
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before


def own_storage(program: ExportedProgram) -> None:
    """Gives each weight a storage of its own: AOTInductor writes the whole storage of a view."""
    for tensors in (program.state_dict, program.constants):
        for name, value in tensors.items():
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                own = value.detach().clone()
                tensors[name] = nn.Parameter(own, False) if isinstance(value, nn.Parameter) else own


def lowered(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program as Inductor is given it for a package on `device`."""
    program = keep_users_apart(lower_operators(program))
    write = {"cpu": with_one_product, "cuda": with_epilogues}.get(device.type)
    return write(program) if write else program


def lower_operators(program: ExportedProgram) -> ExportedProgram:
    """Replaces the ikbo operators that a package is faster without; keeps the others whole."""
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.ikbo.linear.default: _linear,
        torch.ops.ikbo.lce.default: _lce,
    }
    lce = torch.ops.ikbo.lce
    table |= {op: functools.partial(_with_contiguous_user, op) for op in (lce.list, lce.prepacked)}
    return program.run_decompositions(table)


def is_lowered(operator: Any, w_cand: Tensor) -> bool:
    """Whether `lower_operators` replaces a call with this weight of the candidates."""
    if getattr(operator, "_overloadname", None) != "default":
        return False
    name, device = operator._opname, w_cand.device.type
    if (name, device) == ("linear", "cuda") and w_cand.dtype in (torch.float16, torch.bfloat16):
        rows, columns = w_cand.shape
        return rows >= _WIDE and columns >= _LONG
    return w_cand.dtype in _IN_PARTS.get((name, device), ())


def keep_users_apart(program: ExportedProgram) -> ExportedProgram:
    """Makes sure that `expand`'s input is computed at U, in the way that this torch allows."""
    if register_expand_lowering():
        return program
    return program.run_decompositions({torch.ops.ikbo.expand.default: _expand_opaque})


@functools.cache
def register_expand_lowering() -> bool:
    """Teaches Inductor `ikbo::expand`, once per process. False where this torch is untested."""
    if not _is_one_of(_LOWERING_VERSIONS):
        return False
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.ikbo.expand.default, type_promotion_kind=None)
    def expand(x_user: Any, cand_to_user: Any) -> Any:
        x_user.realize()
        num_users, *row = x_user.get_size()
        load_user, load_index = x_user.make_loader(), cand_to_user.make_loader()

        def element(position: Any) -> Any:
            user = ops.indirect_indexing(
                load_index(position[:1]), num_users, check=False, wrap_neg=False
            )
            return load_user([user, *position[1:]])

        return Pointwise.create(
            device=x_user.get_device(),
            dtype=x_user.get_dtype(),
            inner_fn=element,
            ranges=[*cand_to_user.get_size(), *row],
        )

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
    if not is_lowered(torch.ops.ikbo.linear.default, w_cand):
        return NotImplemented
    if x_cand.element_size() == 2:
        # Sums in fp32, rounded once, as our kernel does it.
        products = [(x_user, w_user), (x_cand, w_cand)]
        user, cand = (torch.mm(x, w.t(), out_dtype=torch.float32) for x, w in products)
        user = user if bias is None else user + bias
    else:
        user = torch.nn.functional.linear(x_user, w_user, bias)
        cand = torch.mm(x_cand, w_cand.t())
    # NOTE: the axis of length 1 hides `mm + add` from Inductor, which would turn it into an addmm
    # and write the gathered users at B for it: one more pass over [B, M].
    gathered = torch.ops.ikbo.expand(user, cand_to_user).unsqueeze(1)
    sums = ACTIVATIONS[activation]((gathered + cand.unsqueeze(1)).squeeze(1))
    return sums.to(x_cand.dtype)


def _lce(
    e_user: Tensor,
    e_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Any:
    op = torch.ops.ikbo.lce.default
    if not is_lowered(op, w_cand):
        return _with_contiguous_user(op, e_user, e_cand, w_user, w_cand, bias, cand_to_user)
    return lce_in_parts(e_user, e_cand, w_user, w_cand, bias, cand_to_user)


def lce_in_parts(
    e_user: Tensor,
    e_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    """``ikbo::lce`` as products, gather and add: for graphs that are compiled or taken apart."""
    user = torch.matmul(w_user, e_user)
    if bias is not None:
        user = user + bias.unsqueeze(-1)
    return torch.ops.ikbo.expand(user, cand_to_user) + torch.matmul(w_cand, e_cand)


def _with_contiguous_user(op: Any, e_user: Tensor, *others: Any) -> Any:
    if e_user.stride(2) == 1 or e_user.is_contiguous():
        return NotImplemented
    return op(e_user.contiguous(), *others)


@torch.library.register_fake("ikbo::_realise")
def _realise_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
