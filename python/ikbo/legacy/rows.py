# SPDX-License-Identifier: Apache-2.0
"""The rows of a recorded batch: their inputs, their requests, their bytes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ikbo.candidate_index import CandidateIndex
from ikbo.transform import inputs


def arguments(
    batch: Any, model: nn.Module | None
) -> tuple[tuple[Any, ...], dict[str, Any], inspect.Signature]:
    """Positional and keyword inputs of a batch, and the signature that names the former."""
    args, kwargs = inputs.split(batch)
    if args and model is None:
        raise TypeError(
            "ikbo.legacy: model must be given, which names the inputs, where the batch is "
            f"positional; got a tuple of {len(args)} inputs"
        )
    signature = inspect.Signature() if model is None else inspect.signature(model.forward)
    if model is not None:
        inputs.check_fit(signature, args, kwargs)
    return args, kwargs, signature


def index_of(tensors: Mapping[str, Tensor], request_ids: Any) -> CandidateIndex:
    """The request of each row, on the CPU. Errors: ValueError where inputs have other rows."""
    index = CandidateIndex.from_request_ids(request_ids).to("cpu")
    sizes = {name: x.shape[0] if x.ndim else None for name, x in tensors.items()}
    if set(sizes.values()) != {index.num_candidates}:
        raise ValueError(
            f"ikbo.legacy: every input must have one row for each of the {index.num_candidates} "
            f"request ids; got {sizes}"
        )
    return index


def bits_of(x: Tensor) -> Tensor:
    """The bytes of each element, uint8 `[B, elements, bytes]`."""
    flat = x.detach().cpu().contiguous()
    if not flat.numel():
        return torch.empty(len(flat), 0, 1, dtype=torch.uint8)
    return flat.reshape(-1).view(torch.uint8).reshape(len(flat), -1, x.element_size())
