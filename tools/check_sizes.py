# SPDX-License-Identifier: Apache-2.0
"""Checks file lengths, line widths and C++ and Python function lengths.

A file over its cap says why in a comment of its own: `size waiver: <reason>`; one over the cap of
functions likewise: `function size waiver: <reason>`. usage: tools/check_sizes.py [ROOT]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check_layers import below, sources

MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 60  # of code: a Python docstring does not count
DEVICE_FUNCTION_LINES = 120  # CUDA
ANY_FILE = 500

# First match wins: (folder, suffix, lines).
FILE_CAPS = (
    ("tests", "", 600),
    ("src/kernels/device/ptx_wgmma.cuh", "", 210),  # half of it names one instruction's registers
    ("src/kernels/device", "", 150),
    ("src/kernels/host", ".h", 150),
    ("src", ".cuh", 450),
    ("src", "", 300),
    ("include", "", 300),
    ("python", ".py", 300),
    ("tools", ".py", 300),
)
SUFFIXES = (".h", ".hpp", ".cuh", ".cpp", ".cu", ".py", ".sh", ".cmake", "CMakeLists.txt", ".md")

WAIVER = re.compile(r"(?P<function>function )?size waiver: (?P<reason>\S.{9,})")


# A line after which a C++ statement goes on, and statements with a brace that are no functions.
CONTINUED = re.compile(r"^(?!\s*(//|#|[a-z]+:\s*$)).*[^\s;{}:>]\s*$")
NO_FUNCTION = re.compile(
    r"(template\s*<.*>\s*)?(namespace|class|struct|union|enum|extern)\b[^()]*\{$"
)


def file_cap(path: Path) -> int:
    """The most lines that `path` may have."""
    for folder, suffix, lines in FILE_CAPS:
        if below(path, folder) and path.name.endswith(suffix):
            return lines
    return ANY_FILE


def waived(text: str, *, function: bool) -> bool:
    """Whether the file gives a reason for being over that cap."""
    return any(bool(match["function"]) == function for match in WAIVER.finditer(text))


def python_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines without signature and docstring) of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield node.lineno, node.name, (node.end_lineno or 0) - body[0].lineno + 1


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def cpp_functions(text: str) -> Iterator[tuple[int, str, int]]:
    """(line, first line, lines) of every function body in clang-formatted source.

    A body opens with a line that ends in `{` and closes with `}` at the indentation of the
    statement's first line; it is a function's when that statement has parentheses and is neither
    a type nor a namespace.
    """
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        if not lines[number].endswith("{") or lines[number].lstrip().startswith("//"):
            number += 1
            continue
        first = number
        while first > 0 and CONTINUED.search(lines[first - 1]):
            first -= 1
        head = " ".join(line.strip() for line in lines[first : number + 1])
        if "(" not in head or NO_FUNCTION.match(head):
            number += 1
            continue
        closing = re.compile(rf"\s{{{indent_of(lines[first])}}}\}}")
        end = next(
            (k for k in range(number + 1, len(lines)) if closing.match(lines[k])), len(lines)
        )
        yield first + 1, lines[first].strip(), end - number - 1
        number = end + 1


def wide_lines(text: str) -> Iterator[tuple[int, int]]:
    """(line, columns) of the lines that are too wide, outside of regions marked as laid out by
    hand (`clang-format off`)."""
    by_hand = False
    for number, line in enumerate(text.splitlines(), 1):
        if "clang-format o" in line:
            by_hand = "clang-format off" in line
        if len(line) > MAX_COLUMNS and not by_hand and "http" not in line:
            yield number, len(line)


def check_file(root: Path, path: Path) -> list[str]:
    """What is too large in one file."""
    text = (root / path).read_text()
    lines = text.splitlines()
    violations = []
    cap = file_cap(path)
    if len(lines) > cap and not waived(text, function=False):
        violations.append(f"{path}: {len(lines)} lines; at most {cap}")
    if path.suffix != ".md":
        violations += [
            f"{path}:{number}: {columns} columns; at most {MAX_COLUMNS}"
            for number, columns in wide_lines(text)
        ]
    functions: Iterator[tuple[int, str, int]] = iter(())
    function_cap = MAX_FUNCTION_LINES
    if path.suffix == ".py":
        functions = python_functions(text)
    elif path.suffix in (".h", ".cpp", ".cu", ".cuh"):
        functions = cpp_functions(text)
        if path.suffix == ".cuh":
            function_cap = DEVICE_FUNCTION_LINES
    if not waived(text, function=True):
        violations += [
            f"{path}:{line}: {name} has {length} lines; at most {function_cap}"
            for line, name, length in functions
            if length > function_cap
        ]
    return violations


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    violations = [v for path in sources(root, *SUFFIXES) for v in check_file(root, path)]
    print("\n".join(violations) or "sizes: every file and function is within its cap")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
