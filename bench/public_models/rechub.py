# SPDX-License-Identifier: Apache-2.0
"""Models of torch-rechub: inputs are a dict with one tensor for each feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.public_models.case import (
    CANDIDATE_FIELDS,
    CANDIDATE_NUMBERS,
    HISTORY,
    USER_FIELDS,
    USER_NUMBERS,
    VOCABULARY,
    WIDTH,
    Case,
)
from bench.public_models.stand_ins import stand_ins

_MLP = {"dims": [256, 128], "dropout": 0.2, "activation": "relu"}
_USERS = [f"user_{i}" for i in range(USER_FIELDS)]
_ITEMS = [f"item_{i}" for i in range(CANDIDATE_FIELDS)]
_USER_NUMBERS = [f"user_number_{i}" for i in range(USER_NUMBERS)]
_ITEM_NUMBERS = [f"item_number_{i}" for i in range(CANDIDATE_NUMBERS)]
_HISTORIES = ["history_item", "history_category"]


def _sparse(names: list[str]) -> list[Any]:
    from torch_rechub.basic.features import SparseFeature

    return [SparseFeature(name, VOCABULARY, WIDTH) for name in names]


def _dense(names: list[str]) -> list[Any]:
    from torch_rechub.basic.features import DenseFeature

    return [DenseFeature(name) for name in names]


def _ranking() -> Any:
    with stand_ins():
        from torch_rechub.models import ranking
    return ranking


def _deepfm() -> nn.Module:
    ranking = _ranking()
    numbers = _dense(_USER_NUMBERS + _ITEM_NUMBERS)
    fields = _sparse(_USERS + _ITEMS)
    return ranking.DeepFM(numbers + fields, fields, _MLP)


def _dcn_v2(*, low_rank: bool) -> nn.Module:
    ranking = _ranking()
    features = _sparse(_USERS + _ITEMS) + _dense(_USER_NUMBERS + _ITEM_NUMBERS)
    return ranking.DCNv2(features, 3, _MLP, use_low_rank_mixture=low_rank)


def _din() -> nn.Module:
    ranking = _ranking()
    from torch_rechub.basic.features import SequenceFeature

    targets = _sparse(_ITEMS[:2])
    histories = [
        SequenceFeature(name, VOCABULARY, WIDTH, pooling="concat", shared_with=target)
        for name, target in zip(_HISTORIES, _ITEMS, strict=False)
    ]
    fields = _sparse(_USERS + _ITEMS[2:])
    return ranking.DIN(fields, histories, targets, {"dims": [256, 128]}, {"dims": [64, 32]})


def _ids(names: list[str], count: int, generator: torch.Generator, *shape: int) -> dict[str, Any]:
    shape = (count, *shape)
    return {name: torch.randint(VOCABULARY, shape, generator=generator) for name in names}


def _features(count: int, generator: torch.Generator) -> Any:
    numbers = _USER_NUMBERS + _ITEM_NUMBERS
    drawn = {name: torch.rand(count, generator=generator) for name in numbers}
    return ({**_ids(_USERS + _ITEMS, count, generator), **drawn},)


def _sequences(count: int, generator: torch.Generator) -> Any:
    histories = _ids(_HISTORIES, count, generator, HISTORY)
    return ({**_ids(_USERS + _ITEMS, count, generator), **histories},)


def cases() -> list[Case]:
    users = tuple(_USERS + _USER_NUMBERS)
    low_rank, matrix = (lambda low=low: _dcn_v2(low_rank=low) for low in (True, False))
    return [
        Case("torch_rechub", "DeepFM", _deepfm, _features, users),
        Case("torch_rechub", "DCNv2", low_rank, _features, users),
        Case("torch_rechub", "DCNv2 (one matrix per layer)", matrix, _features, users),
        Case("torch_rechub", "DIN", _din, _sequences, tuple(_USERS + _HISTORIES)),
    ]
