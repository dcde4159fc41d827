# SPDX-License-Identifier: Apache-2.0
"""The net as teams split it by hand today: user encoder once a user, its outputs replicated.

`key` and `value` of the target attention are projected before the replication: nothing that a
careful engineer moves to the user's side is left on the candidates' side.
"""

from __future__ import annotations

from torch import Tensor, nn

from examples.movielens.data import CANDIDATE_INPUTS, USER_INPUTS
from examples.movielens.model import Ranker, UserSide


def replicate(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of `Ranker` from those of `SplitRanker`: user rows repeated for their candidates."""
    rows = inputs["cand_to_user"].long()
    users = {name: inputs[name][rows] for name in USER_INPUTS}
    return users | {name: inputs[name] for name in CANDIDATE_INPUTS}


class SplitRanker(nn.Module):
    """`Ranker` with one row of user inputs a user; `cand_to_user [B]` is each candidate's row."""

    def __init__(self, ranker: Ranker) -> None:
        super().__init__()
        self.ranker = ranker

    def forward(
        self,
        user_id: Tensor,
        age: Tensor,
        gender: Tensor,
        occupation: Tensor,
        zip_prefix: Tensor,
        hour: Tensor,
        weekday: Tensor,
        idle_gap: Tensor,
        history_item: Tensor,
        history_rating: Tensor,
        history_gap: Tensor,
        history_length: Tensor,
        item_id: Tensor,
        item_year: Tensor,
        item_genres: Tensor,
        item_popularity: Tensor,
        item_score: Tensor,
        cand_to_user: Tensor,
    ) -> dict[str, Tensor]:
        tokens = (age, gender, occupation, zip_prefix, hour, weekday, idle_gap)
        history = (history_item, history_rating, history_gap, history_length)
        user = self.ranker.user(user_id, tokens, *history)
        replicated = UserSide(*(part.index_select(0, cand_to_user) for part in user))
        return self.ranker.interact(
            replicated, item_id, item_year, item_genres, item_popularity, item_score
        )
