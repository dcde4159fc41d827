# SPDX-License-Identifier: Apache-2.0
"""Every model class of deepctr-torch: all take one matrix with a column for each feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.public_models import dien
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


def library() -> Any:
    """deepctr_torch.models."""
    with stand_ins():
        import deepctr_torch.models
    return deepctr_torch.models


def _columns(histories: tuple[str, ...] = (), *, numbers: bool = True) -> list[Any]:
    """The features in the order of their columns: of users and candidates in turns."""
    with stand_ins():
        from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    def sparse(name: str, embedding: str | None = None) -> Any:
        return SparseFeat(name, VOCABULARY, WIDTH, embedding_name=embedding)

    users = [sparse(f"user_{i}") for i in range(USER_FIELDS)]
    items = [sparse(f"item_{i}") for i in range(CANDIDATE_FIELDS)]
    half = USER_FIELDS // 2
    columns = users[:half] + items[:half] + users[half:] + items[half:]
    if numbers:
        columns += [DenseFeat("user_numbers", USER_NUMBERS)]
        columns += [DenseFeat("item_numbers", CANDIDATE_NUMBERS)]
    for name in histories:
        table = name.removeprefix("neg_").removeprefix("hist_")
        feature = sparse(name, table)
        columns += [VarLenSparseFeat(feature, HISTORY, length_name="history_length")]
    return columns


class _Inputs:
    """The matrix that a list of features asks for, and the user's columns in it."""

    def __init__(self, columns: Callable[[], list[Any]]) -> None:
        self.columns = columns

    def index(self) -> dict[str, tuple[int, int]]:
        from deepctr_torch.inputs import build_input_features

        return build_input_features(self.columns())

    def request_only(self) -> tuple[str, ...]:
        ranges = [r for name, r in self.index().items() if not name.startswith("item_")]
        return tuple(f"X[:, {begin}:{end}]" for begin, end in ranges)

    def __call__(self, count: int, generator: torch.Generator) -> Any:
        parts = []
        for name, (begin, end) in self.index().items():
            shape = (count, end - begin)
            if name.endswith("numbers"):
                parts.append(torch.rand(shape, generator=generator))
            elif name == "history_length":
                parts.append(torch.randint(1, HISTORY + 1, shape, generator=generator))
            else:
                parts.append(torch.randint(1, VOCABULARY, shape, generator=generator))
        return (torch.cat([part.float() for part in parts], dim=1),)


_SEQUENCES = ("hist_item_0", "hist_item_1")


def _with_linear(name: str, *, numbers: bool = True, **options: Any) -> Callable[[], nn.Module]:
    """A model that is given features for its linear part and for the rest."""

    def build() -> nn.Module:
        return getattr(library(), name)(_columns(), _columns(numbers=numbers), **options)

    return build


def _with_features(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(library(), name)(_columns(), **options)

    return build


def _with_histories(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(library(), name)(_columns(_SEQUENCES), ["item_0", "item_1"], **options)

    return build


# Case to how it is built; where a class does more than one thing, each of them.
_PLAIN: dict[str, Callable[[], nn.Module]] = {
    "WDL": _with_linear("WDL"),
    "DeepFM": _with_linear("DeepFM"),
    "xDeepFM": _with_linear("xDeepFM"),
    "AFM": _with_linear("AFM", numbers=False),
    "DIFM": _with_linear("DIFM"),
    "IFM": _with_linear("IFM"),
    "AutoInt": _with_linear("AutoInt"),
    "DCN": _with_linear("DCN"),
    "DCN (matrix)": _with_linear("DCN", cross_parameterization="matrix"),
    "DCNMix": _with_linear("DCNMix"),
    "FiBiNET": _with_linear("FiBiNET"),
    "NFM": _with_linear("NFM"),
    "MLR": _with_features("MLR"),
    "ONN": _with_linear("ONN"),
    "PNN": _with_features("PNN"),
    "PNN (outer products)": _with_features("PNN", use_outter=True),
    "CCPM": _with_linear("CCPM", numbers=False),
    "AFN": _with_linear("AFN"),
    "SharedBottom": _with_features("SharedBottom"),
    "ESMM": _with_features("ESMM"),
    "MMOE": _with_features("MMOE"),
    "PLE": _with_features("PLE"),
}
_OF_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "DIN": _with_histories("DIN"),
    "DIEN": _with_histories("DIEN"),
}
_CURES = {"DIEN": dien.CURE}


def cases() -> list[Case]:
    library()
    plain, sequences = _Inputs(_columns), _Inputs(lambda: _columns(_SEQUENCES))
    made = []
    for table, inputs in ((_PLAIN, plain), (_OF_SEQUENCES, sequences)):
        for model, build in table.items():
            users = inputs.request_only()
            made.append(Case("deepctr_torch", model, build, inputs, users, _CURES.get(model)))
    return made
