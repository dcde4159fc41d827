# SPDX-License-Identifier: Apache-2.0
"""Whole transformed models on the device of `tests/ops/python_device.py`.

PyTorch registers the device for the whole process, so a test runs this as a program: standard input
holds one JSON object a line with `model` and `own_linear` (whether the device brings a kernel for
`ikbo::linear`); standard output gets one a line with `error` (null, or how the result differs from
the unmodified model's on the CPU), `calls` (operator and sizes of its result, in order) and
`own_linear`, how often that kernel ran.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

import ikbo
from ikbo import reference
from tests.ops import python_device
from tests.ops.python_device import DEVICE, DeviceTensor, wrap
from tests.transform.models import MODELS

USERS, CANDIDATES = 2, 64


class OwnLinear:
    """A kernel of the device for `ikbo::linear`, as a vendor registers it."""

    def __init__(self) -> None:
        self.runs = 0
        self._library = torch.library.Library("ikbo", "IMPL")
        self._library.impl("linear", self.run, "PrivateUse1")

    def run(self, *args: Any) -> Tensor:
        self.runs += 1
        raw = [x.raw if isinstance(x, DeviceTensor) else x for x in args]
        return wrap(reference.linear(*raw))


def run(name: str) -> dict[str, Any]:
    ranker = MODELS[name]()
    module = ikbo.transform(
        ranker.model, ranker.inputs, ranker.users, max_users=8, max_candidates=100
    )
    leaves, structure = pytree.tree_flatten(ranker.inputs)
    index = torch.arange(CANDIDATES, dtype=torch.int32) * 7 % USERS
    inputs, repeated = [], []
    for x, role in zip(leaves, module.roles.values(), strict=False):
        picked = x[torch.arange(USERS if role == "user" else CANDIDATES) % len(x)]
        inputs.append(wrap(picked.clone()))
        repeated.append(picked[index.long()] if role == "user" else picked)
    program = move_to_device_pass(module.exported_program, DEVICE).module()
    python_device.calls.clear()
    error = None
    try:
        with torch.no_grad():
            arguments = pytree.tree_unflatten(inputs, structure)
            got = program(*arguments, cand_to_user=wrap(index))
            calls = list(python_device.calls)
            want = ranker.model(*pytree.tree_unflatten(repeated, structure))
        raw = pytree.tree_map(lambda t: t.raw, got)
        torch.testing.assert_close(raw, want, rtol=1e-4, atol=1e-5)
    except (AssertionError, AttributeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"model": name, "error": error, "calls": calls}


if __name__ == "__main__":
    libraries = python_device.set_up()
    kernel = None
    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted["own_linear"] and kernel is None:
            kernel = OwnLinear()
        before = kernel.runs if kernel else 0
        result = run(wanted["model"])
        result["own_linear"] = kernel.runs - before if kernel else 0
        print(json.dumps(result), flush=True)
