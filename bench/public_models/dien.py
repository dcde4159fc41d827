# SPDX-License-Identifier: Apache-2.0
"""What lets torch.export take deepctr-torch's DIEN: two `forward` without data-dependent shapes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bench.public_models.case import Cure


def _is_within(lengths: Tensor, x: Tensor) -> Tensor:
    """Bool `[B, T, 1]`: which rows of a padded sequence count."""
    return (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)).unsqueeze(2)


def _extract(self: Any, keys: Tensor, keys_length: Tensor, neg_keys: Any = None) -> Any:
    """`InterestExtractor.forward`: padded rows run too, come last, and are set to 0."""
    interests, _ = self.gru(keys)
    return interests * _is_within(keys_length, keys), torch.zeros((1,), device=keys.device)


def _evolve(self: Any, query: Tensor, keys: Tensor, keys_length: Tensor, mask: Any = None) -> Any:
    """`InterestEvolving.forward` with a GRU: users without a history are set to 0, not left out."""
    interests, _ = self.interest_evolution(keys)
    interests = interests * _is_within(keys_length, keys)
    pooled = self.attention(query.unsqueeze(1), interests, keys_length.unsqueeze(1)).squeeze(1)
    return pooled * (keys_length > 0).unsqueeze(1)


def _apply(model: nn.Module) -> None:
    for name, forward in (("interest_extractor", _extract), ("interest_evolution", _evolve)):
        module = getattr(model, name)
        module.forward = MethodType(forward, module)


CURE = Cure(
    "in `InterestExtractor.forward` and `InterestEvolving.forward` the GRU runs on the padded "
    "sequence, and a product with a mask follows, in place of `pack_padded_sequence` on the rows "
    "that `masked_select` leaves (`bench/public_models/dien.py`).",
    _apply,
)
