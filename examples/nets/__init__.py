# SPDX-License-Identifier: Apache-2.0
"""Five ranking nets in plain PyTorch, and the same written with `ikbo.nn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.nets import dlrm_dcn, early_ranking, late_ranking, llm_scale, wukong
from examples.nets.net import Config, Ranker


@dataclass(frozen=True)
class Net:
    """A net, unmodified and adopted, and its sizes: the field's, and one for a CPU; `pieces` is the
    net decomposed by hand into PyTorch's operators.
    """

    plain: Callable[[Any], Ranker]
    adopted: Callable[[Any], nn.Module]
    full: Config
    small: Config
    pieces: Callable[[Any], Ranker] | None = None

    def build(self, config: Config, seed: int = 0) -> tuple[Ranker, nn.Module]:
        """Both forms in eval mode with the same weights."""
        torch.manual_seed(seed)
        plain = self.plain(config)
        adopted = self.adopted(config)
        adopted.load_state_dict(plain.state_dict())
        return plain.eval(), adopted.eval()


NETS = {
    "early_ranking": Net(
        early_ranking.EarlyRanking,
        early_ranking.EarlyRankingAdopted,
        early_ranking.FULL,
        early_ranking.SMALL,
    ),
    "dlrm_dcn": Net(dlrm_dcn.DlrmDcn, dlrm_dcn.DlrmDcnAdopted, dlrm_dcn.FULL, dlrm_dcn.SMALL),
    "late_ranking": Net(
        late_ranking.LateRanking,
        late_ranking.LateRankingAdopted,
        late_ranking.FULL,
        late_ranking.SMALL,
        late_ranking.LateRankingPieces,
    ),
    "wukong": Net(wukong.Wukong, wukong.WukongAdopted, wukong.FULL, wukong.SMALL),
    "llm_scale": Net(
        llm_scale.LlmScale, llm_scale.LlmScaleAdopted, llm_scale.FULL, llm_scale.SMALL
    ),
}
