# SPDX-License-Identifier: Apache-2.0
"""What the verification grants: an error that the model makes in some batch, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ikbo.transform import TransformError
from ikbo.transform.verify import Output, compare

EXACT = torch.linspace(-2, 2, 64, dtype=torch.float64)[:, None]
# Two values of size 1 that cancel: fp32 keeps 1e-7 of them, and may be exact by chance.
SMALL = torch.tensor([[1e-3]], dtype=torch.float64)


def output(exact: Tensor, error: float, error_of_model: float) -> list[Output]:
    return [Output("the output", (exact + error).float(), (exact + error_of_model).float(), exact)]


@pytest.mark.parametrize("error_of_model", [0.0, 1e-6], ids=["exact", "1e-6"])
def test_single_value_may_err_as_the_output_does_elsewhere(error_of_model: float) -> None:
    many = output(EXACT, 1e-6, error_of_model)
    compare({"U=2, B=64": many, "U=5, B=1": output(SMALL, 1e-7, 0.0)})


def test_single_value_that_is_wrong() -> None:
    many = output(EXACT, 0.0, 0.0)
    with pytest.raises(TransformError, match=r"the output at U=5, B=1 .*first at \[0, 0\]"):
        compare({"U=2, B=64": many, "U=5, B=1": output(SMALL, 1e-4, 0.0)})


def test_a_value_that_the_model_lost_grants_nothing() -> None:
    """A model that overflows where fp64 does not: infinity is no error to be granted."""
    of_model = EXACT.float().clone()
    of_model[3] = torch.inf
    many = Output("the output", (EXACT + 1e-2).float(), of_model, EXACT)
    with pytest.raises(TransformError, match="the output at U=2, B=64 .*allowed error"):
        compare({"U=2, B=64": [many]})


def test_other_shape() -> None:
    narrow = Output("the output", SMALL.float()[0], SMALL.float(), SMALL)
    with pytest.raises(TransformError, match=r"at U=1, B=1 is torch.float32 \[1\] instead of"):
        compare({"U=1, B=1": [narrow]})
