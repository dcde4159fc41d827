# SPDX-License-Identifier: Apache-2.0
"""libikbo_ops.so itself: what it links, how it is found, which kernels it says it launches."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ikbo
from ikbo._load import ops_library_path
from ikbo.testing.inputs import DTYPES, case, make_inputs

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
# Per operator: a case's sizes, and those that _select_kernel takes, in its order.
TRACED = {
    "expand": ({"K_user": 3}, ("K_user",)),
    "linear": ({"M": 4, "K_user": 5, "K_cand": 6}, ("M", "K_user", "K_cand")),
    "lce": ({"M": 4, "N": 3, "K_user": 5, "K_cand": 6}, ("M", "N", "K_user", "K_cand")),
    "bmm": ({"P": 4, "R": 5, "N": 6}, ("P", "R", "N")),
    "target_attention": (
        {"Q": 2, "S": 9, "H": 4, "H_kv": 2, "D": 8},
        ("Q", "S", "H", "H_kv", "D"),
    ),
    "self_target_attention": (
        {"Q": 2, "S": 9, "H": 4, "H_kv": 2, "D": 8},
        ("Q", "S", "H", "H_kv", "D"),
    ),
    "target_attention.packed": (
        {"Q": 2, "S": 9, "H": 4, "H_kv": 2, "D": 8},
        ("Q", "H", "H_kv", "D"),
    ),
}


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def traced_kernels() -> Iterator[list[tuple[str, str]]]:
    """The (operator, kernel) pairs launched inside the block."""
    launches: list[tuple[str, str]] = []
    library = ctypes.CDLL(str(ops_library_path()))
    callback = CALLBACK(lambda op, kernel, _: launches.append((op.decode(), kernel.decode())))
    library.ikbo_set_kernel_trace(callback, None)
    try:
        yield launches
    finally:
        library.ikbo_set_kernel_trace(None, None)


def test_needs_no_python_and_only_the_stable_part_of_pytorch() -> None:
    undefined = run("nm", "-D", "--undefined-only", ops_library_path())
    assert not re.findall(r"\b_?Py[A-Z_]\w*", undefined)
    assert not re.findall(r"\b_ZN\w*(?:at|c10)\d", undefined)
    needed = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", ops_library_path()))
    torch_libraries = {name for name in needed if "torch" in name or "c10" in name}
    assert torch_libraries <= {"libtorch_cpu.so", "libc10.so"}


def test_exports_one_symbol() -> None:
    defined = run("nm", "-D", "--defined-only", ops_library_path())
    functions = {line.split()[-1] for line in defined.splitlines() if " T " in line}
    assert functions == {"ikbo_set_kernel_trace"}


def test_missing_library_names_the_paths_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IKBO_OPS_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(RuntimeError, match=r"libikbo_ops.so must exist; tried .*absent.so; build"):
        ops_library_path()


def test_library_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "libikbo_ops.so"
    link.symlink_to(ops_library_path())
    monkeypatch.setenv("IKBO_OPS_LIBRARY", str(link))
    assert ops_library_path() == link


@pytest.mark.parametrize("traced", TRACED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_candidates", [1, 40, 600])
def test_selected_kernel_is_the_one_that_runs(traced: str, dtype: str, num_candidates: int) -> None:
    sizes, letters = TRACED[traced]
    op, _, overload = traced.partition(".")
    options = {overload: True} if overload else {}
    batch = {"U": 3, "B": num_candidates}
    this = case(op, dtype, "shuffled", "contiguous", {**batch, **sizes}, **options)
    with traced_kernels() as launches:
        getattr(ikbo, op)(**make_inputs(this))
    dims = [this.size(letter) for letter in letters]
    name = str(DTYPES[dtype]).removeprefix("torch.")
    select = torch.ops.ikbo._select_kernel
    assert launches == [(op, select(traced, "cpu", name, 3, num_candidates, dims))]
    assert select(traced, "xpu", name, 3, num_candidates, dims) == "composite"


def test_nothing_is_traced_after_the_callback_is_removed() -> None:
    with traced_kernels() as launches:
        pass
    ikbo.expand(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32))
    assert not launches


@pytest.mark.parametrize(
    ("op", "dims", "message"),
    [
        ("matmul", [1], "op must be an operator of ikbo; got 'matmul'"),
        ("linear", [1], r"dims of linear must be \[M, K_user, K_cand\]; got 1 values"),
    ],
)
def test_select_kernel_refuses(op: str, dims: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.ikbo._select_kernel(op, "cpu", "float32", 1, 1, dims)


@pytest.mark.parametrize(
    "imports",
    [
        "import ikbo",
        "import ikbo.transform, ikbo.package",
        "from ikbo.transform import explain; import ikbo",
        "import ikbo; ikbo.transform; from ikbo.transform import forms",
    ],
)
def test_functions_win_over_modules_of_the_same_name(imports: str) -> None:
    check = (
        "assert callable(ikbo.transform) and callable(ikbo.package) and callable(ikbo.explain)\n"
        "from ikbo.transform import forms\n"
        "assert ikbo.nn.Linear and ikbo.CandidateIndex\n"
        "assert callable(ikbo.transform)\n"
    )
    run(sys.executable, "-c", f"{imports}\n{check}")


def test_import_alone_loads_nothing_heavy() -> None:
    code = "import sys, ikbo; print([m for m in sys.modules if m.startswith('ikbo.')])"
    loaded = run(sys.executable, "-c", code)
    assert not re.search(r"ikbo\.(transform|package|nn|testing|reference)", loaded)
