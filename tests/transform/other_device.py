# SPDX-License-Identifier: Apache-2.0
"""Whole transformed models on the device of `tests/ops/python_device.py`.

PyTorch registers the device for the whole process, so a test runs this as a program: standard input
holds the names of models, one a line, "norms" among them. Standard output gets one JSON object:
model to `error` (null, or how the result differs from the unmodified model's on the CPU) and
`calls` (operator and sizes of its result, in order); under "own_linear" the same of "norms" where
the device brings a kernel for `ikbo::linear`, and `runs`, how often that ran.
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
from ikbo.transform.device_costs import FREE
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


class Moved:
    """A transformed model on the device, and one request of two users."""

    def __init__(self, name: str) -> None:
        ranker = MODELS[name]()
        module = ikbo.transform(
            ranker.model,
            ranker.inputs,
            ranker.users,
            max_users=8,
            max_candidates=100,
            device_costs=FREE,  # every split, of whatever size
        )
        leaves, structure = pytree.tree_flatten(ranker.inputs)
        self.index = torch.arange(CANDIDATES, dtype=torch.int32) * 7 % USERS
        inputs, repeated = [], []
        for x, role in zip(leaves, module.roles.values(), strict=False):
            picked = x[torch.arange(USERS if role == "user" else CANDIDATES) % len(x)]
            inputs.append(wrap(picked.clone()))
            repeated.append(picked[self.index.long()] if role == "user" else picked)
        self.arguments = pytree.tree_unflatten(inputs, structure)
        self.program = move_to_device_pass(module.exported_program, DEVICE).module()
        with torch.no_grad():
            self.want = ranker.model(*pytree.tree_unflatten(repeated, structure))

    def run(self) -> dict[str, Any]:
        python_device.calls.clear()
        with torch.no_grad():
            got = self.program(*self.arguments, cand_to_user=wrap(self.index))
        calls, error = list(python_device.calls), None
        try:
            raw = pytree.tree_map(lambda t: t.raw, got)
            torch.testing.assert_close(raw, self.want, rtol=1e-4, atol=1e-5)
        except (AssertionError, AttributeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return {"error": error, "calls": calls}


if __name__ == "__main__":
    libraries = python_device.set_up()
    models = {name: Moved(name) for name in map(str.strip, sys.stdin)}
    results = {name: model.run() for name, model in models.items()}
    kernel = OwnLinear()
    results["own_linear"] = models["norms"].run() | {"runs": kernel.runs}
    print(json.dumps(results))
