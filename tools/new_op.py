# SPDX-License-Identifier: Apache-2.0
"""Creates the files of a new operator and lists what is left to do by hand.

The files are those of a small complete operator, ``x_user[cand_to_user] + x_cand``: they build and
pass their test as soon as the printed lines are added to the shared files. Then replace its
formula, file by file. usage: tools/new_op.py NAME [ROOT]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEMPLATES = Path(__file__).parent / "new_op"
FILES = {
    "config.h.in": "src/cpu/@op@_config.h",
    "cpu.h.in": "src/cpu/@op@_cpu.h",
    "cpu.cpp.in": "src/cpu/@op@_cpu.cpp",
    "torch_op.cpp.in": "src/torch_ops/@op@.cpp",
    "op.py.in": "python/ikbo/_@op@.py",
    "test.py.in": "tests/ops/test_@op@.py",
    "doc.md.in": "docs/ops/@op@.md",
}
# Shared file: what to add there.
BY_HAND = {
    "docs/decisions/001-operator-schemas.md": "the schema, before anything else",
    "src/cpu/CMakeLists.txt": "@op@_cpu.cpp",
    "src/torch_ops/CMakeLists.txt": "@op@.cpp",
    "src/torch_ops/library.cpp": "a Selector around cpu::select_@op@_config()",
    "python/ikbo/ops.py": "from ikbo._@op@ import @op@, and the name in __all__",
    "python/ikbo/__init__.py": "@op@ in the import from ikbo.ops and in __all__",
    "python/ikbo/reference.py": "def @op@: return expand(x_user, cand_to_user) + x_cand",
    "python/ikbo/testing/inputs.py": 'SHAPES: "@op@": {"x_user": ("U", "M"), "x_cand": ("B", "M")}',
    "python/ikbo/testing/cost.py": "its FLOP and byte formulas",
    "tests/ops/test_every_op.py": "a case in CASES",
    "tests/ops/test_composite.py": "sizes in SIZES, the user tensor in USER_TENSOR",
    "tests/ops/test_library.py": "sizes in TRACED",
    "bench/bench_ops_cpu.py": "its rows",
}


def create(op: str, root: Path) -> list[Path]:
    """Writes the slice of `op` below `root`; returns the new files.

    Errors:
        ValueError: the name is not in snake_case, or one of the files exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", op):
        raise ValueError(f"new_op: NAME must be in snake_case, such as dot_product; got {op!r}")
    pascal = "".join(word.capitalize() for word in op.split("_"))
    targets = {name: root / path.replace("@op@", op) for name, path in FILES.items()}
    for path in targets.values():
        if path.exists():
            raise ValueError(f"new_op: {path} must not exist yet; choose another NAME")
    for name, path in targets.items():
        text = (TEMPLATES / name).read_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@op@", op).replace("@Op@", pascal))
    return list(targets.values())


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    op = sys.argv[1]
    root = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent.parent
    try:
        created = create(op, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("created:")
    for path in created:
        print(f"  {path.relative_to(root)}")
    print("to add by hand:")
    for shared, what in BY_HAND.items():
        print(f"  {shared}: {what.replace('@op@', op)}")
    print('then "make format": lines may need another break for a longer name')
    return 0


if __name__ == "__main__":
    sys.exit(main())
