# SPDX-License-Identifier: Apache-2.0
"""DLRM of TorchRec from the pooled embeddings on: its dense, interaction and over architectures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.public_models.case import (
    CANDIDATE_FIELDS,
    CANDIDATE_NUMBERS,
    USER_FIELDS,
    USER_NUMBERS,
    WIDTH,
    Case,
)

FIELDS, NUMBERS = USER_FIELDS + CANDIDATE_FIELDS, USER_NUMBERS + CANDIDATE_NUMBERS
DENSE_LAYERS, OVER_LAYERS = [256, 64, WIDTH], [256, 128, 1]


class FromPooled(nn.Module):
    """What `torchrec.models.dlrm.DLRM.forward` does after its embedding bags."""

    def __init__(self, dense_arch: nn.Module, inter_arch: nn.Module, over_arch: nn.Module) -> None:
        super().__init__()
        self.dense_arch, self.inter_arch, self.over_arch = dense_arch, inter_arch, over_arch

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over_arch(self.inter_arch(self.dense_arch(dense), pooled))


def _dlrm() -> nn.Module:
    from torchrec.models import dlrm

    return FromPooled(
        dlrm.DenseArch(NUMBERS, DENSE_LAYERS),
        dlrm.InteractionArch(FIELDS),
        dlrm.OverArch(WIDTH + FIELDS + FIELDS * (FIELDS - 1) // 2, OVER_LAYERS),
    )


def _dlrm_dcn() -> nn.Module:
    from torchrec.models import dlrm
    from torchrec.modules.crossnet import LowRankCrossNet

    features = (FIELDS + 1) * WIDTH
    return FromPooled(
        dlrm.DenseArch(NUMBERS, DENSE_LAYERS),
        dlrm.InteractionDCNArch(FIELDS, LowRankCrossNet(features, num_layers=3, low_rank=64)),
        dlrm.OverArch(features, OVER_LAYERS),
    )


def _inputs(count: int, generator: torch.Generator) -> Any:
    dense = torch.rand(count, NUMBERS, generator=generator)
    return dense, torch.randn(count, FIELDS, WIDTH, generator=generator) / 2


_USERS = (f"dense[:, 0:{USER_NUMBERS}]", f"pooled[:, 0:{USER_FIELDS}]")


def cases() -> list[Case]:
    return [
        Case("torchrec", "DLRM", _dlrm, _inputs, _USERS),
        Case("torchrec", "DLRM_DCN", _dlrm_dcn, _inputs, _USERS),
    ]
