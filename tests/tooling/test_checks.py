# SPDX-License-Identifier: Apache-2.0
"""The repository's own checkers find what they are for: each planted violation is reported."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run_checker(name: str, root: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / f"{name}.py"), str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def plant(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


CLEAN_CPP = {
    "include/ikbo/lce.h": '#include <cstdint>\n#include "ikbo/types.h"\n',
    "src/cpu/lce_cpu.cpp": '#include "ikbo/lce.h"\n#include <torch/csrc/stable/tensor.h>\n',
    "src/server/http.cpp": "#include <boost/beast.hpp>\n#include <sys/socket.h>\n"
    '#include "ikbo/runtime/model.h"\n',
    "src/kernels/lce/lce.cu": '#include "kernels/device/ptx.cuh"\n#include "kernels/lce/lce.cuh"\n',
    "src/runtime/executor_aoti.cpp": "#include <torch/csrc/inductor/aoti_package/loader.h>\n",
    "src/runtime/cuda/graph.cpp": "#include <c10/cuda/CUDAStream.h>\n"
    "#include <cuda_runtime_api.h>\n",
}


def test_layers_accept_what_is_allowed(tree: Path) -> None:
    for path, text in CLEAN_CPP.items():
        plant(tree, path, text)
    plant(tree, "python/ikbo/testing/bench.py", "from ikbo.testing import cost\n")
    plant(tree, "python/ikbo/ops.py", "import torch\nfrom ikbo import _load\n")
    assert run_checker("check_layers", tree) == (
        0,
        "layers: every include and import is allowed\n",
    )


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("include/ikbo/lce.h", "cuda_runtime.h"),
        ("include/ikbo/lce.h", "torch/csrc/stable/tensor.h"),
        ("include/ikbo/runtime/model.h", "c10/core/Device.h"),
        ("src/common/text.h", "c10/util/Exception.h"),
        ("src/kernels/lce/lce.cu", "torch/headeronly/util/Half.h"),
        ("src/kernels/lce/lce.cu", "kernels/bmm/bmm.cuh"),
        ("src/cpu/lce_cpu.cpp", "ATen/ATen.h"),
        ("src/cpu/lce_cpu.cpp", "cuda_fp16.h"),
        ("src/torch_ops/lce.cpp", "kernels/lce/lce.cuh"),
        ("src/torch_ops/lce.cpp", "pybind11/pybind11.h"),
        ("src/torch_ops/lce.cpp", "Python.h"),
        ("src/runtime/model.cpp", "server/http.h"),
        ("src/runtime/model.cpp", "torch_ops/checks.h"),
        ("src/runtime/model.cpp", "cuda_runtime_api.h"),
        ("src/server/http.cpp", "torch/csrc/stable/tensor.h"),
        ("src/server/http.cpp", "runtime/archive.h"),
        ("tests/server/http_test.cpp", "kernels/lce/lce.cuh"),
    ],
)
def test_layers_catch_an_include(tree: Path, path: str, include: str) -> None:
    plant(tree, path, f"#include <vector>\n#include <{include}>\n")
    status, text = run_checker("check_layers", tree)
    assert status == 1
    assert f"{path}:2: " in text
    assert f"'{include}'" in text


def test_layers_count_files_with_full_torch_headers(tree: Path) -> None:
    for name in "abcdefg":
        plant(tree, f"src/runtime/{name}.cpp", "#include <ATen/ATen.h>\n")
    status, text = run_checker("check_layers", tree)
    assert status == 1
    assert "at most 6 files may include PyTorch's full headers; got 7: src/runtime/a.cpp:1" in text


@pytest.mark.parametrize(
    ("path", "line", "name"),
    [
        ("python/ikbo/ops.py", "import setuptools", "setuptools"),
        ("python/ikbo/ops.py", "import triton.language", "triton.language"),
        (
            "python/ikbo/package.py",
            "from torch._inductor.ir import Pointwise",
            "torch._inductor.ir.Pointwise",
        ),
        (
            "python/ikbo/transform/verify.py",
            "from ikbo.testing import compare",
            "ikbo.testing.compare",
        ),
        ("python/ikbo/transform/rules/linear.py", "import torch.fx", "torch.fx"),
        ("python/ikbo/ops.py", "from tests.ops import cases", "tests.ops.cases"),
        ("bench/bench_lce.py", "from tests.ops import cases", "tests.ops.cases"),
    ],
)
def test_layers_catch_an_import(tree: Path, path: str, line: str, name: str) -> None:
    plant(tree, path, f"import torch\n\n\ndef late():\n    {line}\n")
    status, text = run_checker("check_layers", tree)
    assert status == 1
    assert f"{path}:5: " in text
    assert f"must not import '{name}'" in text


def test_sizes_accept_what_fits(tree: Path) -> None:
    plant(tree, "src/cpu/a.cpp", "int a;\n" * 300)
    plant(tree, "tests/test_a.py", "a = 1\n" * 600)
    plant(tree, "src/cpu/b.cpp", "namespace ikbo {\n" + "int a;\n" * 200 + "}\n")
    assert run_checker("check_sizes", tree)[0] == 0


@pytest.mark.parametrize(
    ("path", "lines", "cap"),
    [
        ("src/cpu/a.cpp", 301, 300),
        ("src/kernels/device/ptx.cuh", 151, 150),
        ("src/kernels/lce/lce.cuh", 451, 450),
        ("python/ikbo/a.py", 301, 300),
        ("tests/ops/test_a.py", 601, 600),
        ("docs/a.md", 501, 500),
    ],
)
def test_sizes_catch_a_long_file_unless_it_says_why(
    tree: Path, path: str, lines: int, cap: int
) -> None:
    comment = "#" if path.endswith(".py") else "//"
    plant(tree, path, f"{comment} text\n" * lines)
    assert run_checker("check_sizes", tree) == (1, f"{path}: {lines} lines; at most {cap}\n")
    plant(tree, path, f"{comment} size waiver: \n" + f"{comment} text\n" * lines)
    assert run_checker("check_sizes", tree)[0] == 1, "a waiver needs a reason"
    reason = f"{comment} size waiver: one table that is read as a whole\n"
    plant(tree, path, reason + f"{comment} text\n" * lines)
    assert run_checker("check_sizes", tree)[0] == 0


def test_sizes_catch_wide_lines(tree: Path) -> None:
    plant(tree, "src/cpu/a.cpp", "int a;\n// " + "x" * 98 + "\n")
    assert run_checker("check_sizes", tree) == (1, "src/cpu/a.cpp:2: 101 columns; at most 100\n")


CPP_FUNCTION = "namespace ikbo {{\n\nvoid f(int a,\n       int b) {{\n{body}}}\n\n}}\n"
CPP_METHOD = "class C {{\n public:\n  void f() const {{\n{body}  }}\n}};\n"
PYTHON_FUNCTION = 'def f():\n    """Text.\n' + "\n" * 40 + '    """\n{body}'


@pytest.mark.parametrize(
    ("path", "template", "statement"),
    [
        ("src/cpu/a.cpp", CPP_FUNCTION, "  a = b;\n"),
        ("include/ikbo/a.h", CPP_METHOD, "    a = b;\n"),
        ("python/ikbo/a.py", PYTHON_FUNCTION, "    a = b\n"),
    ],
    ids=["function", "method", "python"],
)
def test_sizes_catch_a_long_function(tree: Path, path: str, template: str, statement: str) -> None:
    plant(tree, path, template.format(body=statement * 60))
    assert run_checker("check_sizes", tree)[0] == 0
    plant(tree, path, template.format(body=statement * 61))
    status, text = run_checker("check_sizes", tree)
    assert status == 1
    assert "has 61 lines; at most 60" in text
