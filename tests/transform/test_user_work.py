# SPDX-License-Identifier: Apache-2.0
"""FLOPs that users alone determine, against what is counted by hand."""

import re
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn import functional

from ikbo._torch_warnings import quiet
from ikbo.testing.user_work import user_work
from ikbo.transform.capture import capture

K_USER, K_CAND, M, D = 5, 3, 7, 4
K = K_USER + K_CAND


class Model(nn.Module):
    """One operator of each kind over fields of both sides, and a net over the user's history."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K * D, M), nn.Linear(M, 2)
        self.gru = nn.GRU(D, 2, batch_first=True)
        self.conv = nn.Conv1d(K, M, 1)

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, ...]:
        x = torch.cat([user, item], 1)
        # No output of the first layer is the user's, also where it is 0 by chance.
        deep = self.second(torch.relu(self.first(x.flatten(1))))
        pairs = torch.bmm(x, x.transpose(1, 2))
        states, _ = self.gru(user)
        attended = functional.scaled_dot_product_attention(item[:, :, :2], states, states)
        return deep, pairs, torch.einsum("bkd,bkd->bd", x, x), self.conv(x), attended


def test_flops_of_users() -> None:
    torch.manual_seed(4)
    inputs = (torch.randn(40, K_USER, D), torch.randn(40, K_CAND, D))
    with quiet():
        found = user_work(capture(Model().eval(), inputs, ["user"]))
    flops: dict[str, float] = defaultdict(float)
    users: dict[str, float] = defaultdict(float)
    for work in found:
        op = re.sub(r"_\d+$", "", work.node)
        flops[op] += work.flops
        users[op] += work.user
    gru = 2 * K_USER * 3 * 2 * (D + 2)  # three gates of width 2, of the input and of the state
    assert {op: round(value, 6) for op, value in flops.items()} == {
        "linear": 2 * K * D * M + 2 * M * 2,
        "bmm": 2 * K * K * D,
        "gru": gru,
        "scaled_dot_product_attention": 2 * 2 * K_CAND * K_USER * 2,
        "einsum": 2 * K * D,
        "conv1d": 2 * K * D * M,
    }
    assert {op: round(value, 6) for op, value in users.items()} == {
        "linear": 2 * K_USER * D * M,
        "bmm": 2 * K_USER**2 * D,
        "gru": gru,
        "scaled_dot_product_attention": 0,
        "einsum": 2 * K_USER * D,
        "conv1d": 2 * K_USER * D * M,
    }
