# SPDX-License-Identifier: Apache-2.0
"""Checks who may include or import whom.

C++: each folder lists what its `#include`s may name besides its own files; everything else is a
violation. Python: each
rule lists what the modules of a folder must not import. usage: tools/check_layers.py [ROOT]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STD = r"[a-z0-9_]+"  # <vector>: a standard header has no suffix
POSIX = r"(sys/\w+|netinet/\w+|dlfcn|fcntl|link|malloc|poll|pthread|sched|signal|unistd)\.h"
STABLE_TORCH = r"torch/(csrc/(stable|inductor/aoti_torch/(c|generated))|headeronly)/.+"
CUDA = r"(cuda\w*|cooperative_groups(/.+)?)(\.h|\.hpp)?|cuda/.+"
TEST = r"(gtest|gmock)/.+|fuzzer/.+"
IKBO = r"ikbo/\w+\.h"
ERROR_AND_TYPES = r"ikbo/(error|types)\.h"
RUNTIME = r"ikbo/runtime/.+"
FULL_TORCH = rf"(?!{STABLE_TORCH})(torch|ATen|c10)/.+"
LIBRARIES = (r"simdjson\.h", r"zip\.h", r"xxhash\.h", r"CLI/CLI\.hpp", r"openssl/.+")
PROTOBUF = r"google/protobuf/.+|open_inference\.pb\.h"
BENCHMARK = r"benchmark/benchmark\.h"
# gRPC locks with the mutex of Abseil.
GRPC = r"grpc(pp)?/.+|open_inference\.grpc\.pb\.h|absl/synchronization/mutex\.h"


@dataclass(frozen=True)
class Layer:
    """What the C++ files below `folder` may include; the longest matching folder counts."""

    folder: str
    may_include: tuple[str, ...]


LAYERS = (
    Layer("include/ikbo", (STD, IKBO, r"std(def|int)\.h")),
    Layer("include/ikbo/runtime", (STD, ERROR_AND_TYPES, RUNTIME)),
    Layer("src/common", (STD, IKBO, r"common/.+")),
    Layer("src/kernels", (STD, IKBO, r"common/.+", CUDA, r"cute/.+", r"cutlass/.+")),
    Layer("src/cpu", (STD, IKBO, r"common/.+", STABLE_TORCH, r"\w*intrin\.h", r"cpu/.+")),
    Layer(
        "src/torch_ops",
        (STD, IKBO, r"common/.+", r"cpu/.+", STABLE_TORCH, r"torch_ops/.+", r"dlfcn\.h"),
    ),
    Layer(
        "src/runtime",
        (
            STD,
            POSIX,
            ERROR_AND_TYPES,
            RUNTIME,
            r"runtime/.+",
            FULL_TORCH,
            STABLE_TORCH,
            *LIBRARIES,
        ),
    ),
    # A library of its own, which the runtime loads where there is a GPU.
    Layer("src/runtime/cuda", (STD, ERROR_AND_TYPES, r"runtime/.+", FULL_TORCH, CUDA)),
    Layer("src/c_api", (STD, ERROR_AND_TYPES, RUNTIME, r"ikbo/ikbo\.h")),
    Layer(
        "src/server",
        (
            STD,
            POSIX,
            ERROR_AND_TYPES,
            RUNTIME,
            r"server/.+",
            r"boost/.+",
            r"zlib\.h",
            PROTOBUF,
            GRPC,
            *LIBRARIES,
        ),
    ),
    Layer("bench", (STD, IKBO, CUDA, r"kernels/.+")),
    Layer(
        "bench/serve",
        (STD, POSIX, RUNTIME, r"server/.+", r"boost/.+", PROTOBUF, GRPC, BENCHMARK, *LIBRARIES),
    ),
    Layer("tests", (STD, POSIX, IKBO, RUNTIME, TEST)),
    Layer(
        "tests/ops",
        (STD, IKBO, TEST, r"(cpu|common|torch_ops)/.+", STABLE_TORCH),
    ),
    Layer("tests/kernels", (STD, IKBO, TEST, r"kernels/.+")),
    Layer(
        "tests/runtime",
        (STD, POSIX, IKBO, RUNTIME, TEST, r"runtime/.+", r"zip\.h", r"openssl/.+"),
    ),
    Layer(
        "tests/server",
        (STD, POSIX, IKBO, RUNTIME, TEST, r"(runtime|server)/.+", r"boost/.+", *LIBRARIES),
    ),
    Layer(
        "tests/fuzz",
        (STD, POSIX, IKBO, RUNTIME, TEST, r"(runtime|server)/.+", r"boost/.+", PROTOBUF),
    ),
    Layer("tests/device", (STD, IKBO, TEST, CUDA, r"kernels/.+")),
)

# In src/kernels an operator's folder sees the shared ones and itself, never another operator's.
SHARED_KERNEL_FOLDERS = ("host", "device")

# Files that include PyTorch's full C++ headers cost most of a minute each to compile.
MAX_FULL_TORCH_FILES = 6


@dataclass(frozen=True)
class ImportRule:
    """Python files below `folder` (but not below `except_below`) must not import `forbidden`."""

    folder: str
    forbidden: str
    why: str
    except_below: tuple[str, ...] = ()


IMPORT_RULES = (
    ImportRule("python/ikbo", r"(setuptools|skbuild|scikit_build_core|cmake)\b.*", "a build tool"),
    ImportRule("python/ikbo", r"triton\b.*", "Triton is no dependency of the package"),
    ImportRule(
        "python/ikbo",
        r"ikbo\.testing\b.*",
        "only tests and benchmarks use it",
        ("python/ikbo/testing",),
    ),
    ImportRule(
        "python/ikbo",
        r"torch\._inductor\.(lowering|ir|virtualized|graph|scheduler|freezing|fx_passes)\b.*",
        "Inductor's private interfaces have one adapter, in three files",
        tuple(f"python/ikbo/_inductor{part}.py" for part in ("", "_branches", "_products")),
    ),
    ImportRule("python/ikbo/transform/rules", r"torch\.fx\b.*", "rules know forms, not graphs"),
    ImportRule("python/ikbo", r"(tests|bench|examples|tools)\b.*", "the package stands alone"),
    ImportRule("bench", r"tests\b.*", "benchmarks do not use tests"),
)


def sources(root: Path, *suffixes: str) -> Iterator[Path]:
    """Files that git tracks or would track, relative to `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in sorted(set(filter(None, listed))):
        if name.endswith(suffixes) and (root / name).is_file():
            yield Path(name)


def layer_of(path: Path) -> Layer | None:
    """The layer with the longest folder that holds `path`."""
    holding = [layer for layer in LAYERS if Path(layer.folder) in path.parents]
    return max(holding, key=lambda layer: len(layer.folder), default=None)


def included(text: str) -> Iterator[tuple[int, str]]:
    """(line number, path) of every #include."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line):
            yield number, match.group(1)


def check_kernel_folder(path: Path, include: str) -> str | None:
    """A complaint when an operator's kernels include another operator's."""
    match = re.match(r"kernels/(\w+)/", include)
    if not match or path.parts[:2] != ("src", "kernels"):
        return None
    own = path.parts[2]
    if match.group(1) in (*SHARED_KERNEL_FOLDERS, own):
        return None
    return f"src/kernels/{own} must not include another operator's '{include}'"


def check_cpp(root: Path) -> list[str]:
    """Violations of the C++ layers, one line each."""
    violations = []
    full_torch: dict[Path, int] = {}
    for path in sources(root, ".h", ".hpp", ".cuh", ".cpp", ".cu"):
        layer = layer_of(path)
        for number, include in included((root / path).read_text()):
            if re.fullmatch(FULL_TORCH, include):
                full_torch.setdefault(path, number)
            if layer is None:
                continue
            allowed = (root / path.parent / include).is_file() or any(
                re.fullmatch(pattern, include) for pattern in layer.may_include
            )
            if include.startswith("kernels/") and layer.folder == "src/kernels":
                complaint = check_kernel_folder(path, include)
                if complaint:
                    violations.append(f"{path}:{number}: {complaint}")
            elif not allowed:
                violations.append(f"{path}:{number}: {layer.folder} must not include '{include}'")
    if len(full_torch) > MAX_FULL_TORCH_FILES:
        files = ", ".join(f"{path}:{number}" for path, number in full_torch.items())
        violations.append(
            f"at most {MAX_FULL_TORCH_FILES} files may include PyTorch's full headers; "
            f"got {len(full_torch)}: {files}"
        )
    return violations


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line number, dotted name) of every import; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def below(path: Path, folder: str) -> bool:
    return Path(folder) == path or Path(folder) in path.parents


def check_python(root: Path) -> list[str]:
    """Violations of the import rules, one line each."""
    violations = []
    for path in sources(root, ".py"):
        rules = [
            rule
            for rule in IMPORT_RULES
            if below(path, rule.folder) and not any(below(path, e) for e in rule.except_below)
        ]
        if not rules:
            continue
        for number, name in imported(ast.parse((root / path).read_text(), str(path))):
            violations += [
                f"{path}:{number}: {rule.folder} must not import '{name}' ({rule.why})"
                for rule in rules
                if re.fullmatch(rule.forbidden, name)
            ]
    return violations


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    violations = check_cpp(root) + check_python(root)
    print("\n".join(violations) or "layers: every include and import is allowed")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
