# SPDX-License-Identifier: Apache-2.0
"""How much of the unmodified net's arithmetic depends on the user alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from examples.movielens.model import (
    MLP,
    NUM_MIXED_FIELDS,
    NUM_USER_FIELDS,
    USER_WIDTH,
    WIDTH,
    Ranker,
)
from examples.movielens.split import replicate


def count_sdpa(query: Any, key: Any, value: Any, *_args: Any, **_options: Any) -> int:
    return sdpa_flop_count(query, key, value)


# The counter of PyTorch 2.11 has no formula for the CPU's attention.
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_sdpa}


@torch.no_grad()
def flops_per_candidate(net: Ranker, inputs: dict[str, Tensor]) -> tuple[int, int]:
    """Floating-point operations for one candidate of the unmodified net.

    Args:
        inputs: of `SplitRanker`.

    Returns:
        All of them, and those that the user alone determines: the user encoder, and the user's
        columns of the layers that read user and candidate side by side.
    """
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as everything:
        net(**{name: x[:1] for name, x in replicate(inputs).items()})
    counts = everything.get_flop_counts()
    user = sum(counts["Ranker.user"].values())
    user += 2 * USER_WIDTH * MLP[0] + 2 * NUM_USER_FIELDS * NUM_MIXED_FIELDS * WIDTH
    return everything.get_total_flops(), user
