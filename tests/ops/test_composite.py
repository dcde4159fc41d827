# SPDX-License-Identifier: Apache-2.0
"""The operators on devices without a kernel of ours: right, and nothing is replicated to B."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ikbo
from ikbo import reference
from ikbo.testing.compare import COMPOSITE_ROUNDINGS, check_against_reference
from ikbo.testing.inputs import SHAPES, Case, case, make_inputs

# User rows are far larger than anything that an operator may build per candidate.
SIZES = {
    "expand": {"K_user": 9},
    "linear": {"K_user": 300, "K_cand": 21, "M": 5},
    "lce": {"K_user": 300, "K_cand": 21, "M": 13, "N": 4},
    "bmm": {"P": 60, "R": 8, "N": 1},
    "target_attention": {"Q": 2, "H": 4, "H_kv": 2, "S": 64, "D": 8},
    # The scores of a history's own rows are not for candidates, but must pass for small.
    "self_target_attention": {"Q": 2, "H": 4, "H_kv": 2, "S": 32, "D": 32},
}
# The first of an operator's tensors that would be replicated without ikbo.
USER_TENSOR = {
    "linear": "x_user",
    "lce": "e_user",
    "bmm": "a_user",
    "target_attention": "k",
    "self_target_attention": "k",
}
FURTHER_OPTIONS = {
    "lce": ({"parts": 3},),
    "bmm": ({"transpose_a": True, "transpose_b": True},),
    "target_attention": ({"masks": True}, {"packed": True}),
    "self_target_attention": ({"is_causal": True}, {"masks": True, "is_causal": True}),
}
CASES = [
    case(op, dtype, index, "contiguous", {"U": users, "B": candidates, **sizes}, **options)
    for op, sizes in SIZES.items()
    for dtype, index, users, candidates in (
        ("fp64", "shuffled", 3, 40),
        ("fp32", "gaps", 5, 40),
        ("bf16", "sorted", 2, 300),
        ("fp32", "one_each", 7, 7),
        ("fp32", "shuffled", 3, 0),
    )
    for options in (
        *({"linear": ({"activation": "gelu"},)}.get(op, ({},))),
        *(FURTHER_OPTIONS.get(op, ())),
    )
    # A mask on rows that do not exist is not a case.
    if candidates or "masks" not in options
]


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    """What each case did on the Python device."""
    program = Path(__file__).with_name("python_device.py")
    ids = "\n".join(this.id for this in CASES)
    done = subprocess.run(
        [sys.executable, program], input=ids, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[:4000]
    return {run["id"]: run for run in map(json.loads, done.stdout.splitlines())}


def replicated_elements(this: Case) -> int:
    """Elements of the user tensor replicated to the candidate batch."""
    return this.size("B") * math.prod(this.shape(USER_TENSOR[this.op])[1:])


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.id)
def test_result_is_right(this: Case, runs: dict[str, Any]) -> None:
    assert runs[this.id]["error"] is None


@pytest.mark.parametrize(
    "this",
    [c for c in CASES if c.op in USER_TENSOR and c.size("B") > 4 * c.size("U")],
    ids=lambda c: c.id,
)
def test_nothing_is_replicated(this: Case, runs: dict[str, Any]) -> None:
    run = runs[this.id]
    assert run["forward"]
    assert bool(run["backward"]) == (this.dtype == "fp64")
    for operator, sizes in run["forward"] + run["backward"]:
        # A block of candidates takes U of them, or B / 16.
        assert math.prod(sizes) * 4 <= replicated_elements(this), f"{operator} made {sizes}"


@pytest.mark.parametrize(
    "this", [c for c in CASES if "parts" in dict(c.options)], ids=lambda c: c.id
)
def test_parts_are_never_joined(this: Case, runs: dict[str, Any]) -> None:
    joined = math.prod(this.shape("e_cand"))
    for operator, sizes in runs[this.id]["forward"]:
        assert "cat" not in operator
        assert math.prod(sizes) < joined or joined == 0, f"{operator} made {sizes}"


@pytest.mark.parametrize("op", ["linear", "lce"])
def test_user_part_runs_at_u(op: str, runs: dict[str, Any]) -> None:
    this = next(c for c in CASES if c.op == op)
    products = [
        sizes[0]
        for name, sizes in runs[this.id]["forward"]
        if name in ("aten::mm.out", "aten::bmm.out")
    ]
    assert products == [this.size("U"), this.size("B")]


def test_sizes_of_all_operators_are_given() -> None:
    assert set(SIZES) == set(SHAPES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "this", [c for c in CASES if "masks" not in dict(c.options)], ids=lambda c: c.id
)
def test_on_cuda(this: Case) -> None:
    inputs = make_inputs(this, "cuda")
    operator = getattr(ikbo, this.op)
    operator(**inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = operator(**inputs)
    grown = torch.cuda.max_memory_allocated() - before
    if this.op in USER_TENSOR and this.size("B") > 4 * this.size("U"):
        assert grown < replicated_elements(this) * inputs[USER_TENSOR[this.op]].element_size()
    definition = getattr(reference, this.op)
    check_against_reference(this, inputs, result, definition, roundings=COMPOSITE_ROUNDINGS)
