# SPDX-License-Identifier: Apache-2.0
"""A training step of `late_ranking`: with `ikbo.nn`, and plain on repeated user rows.

Both start from the same weights and see the same batches, in bf16 on a GPU. Their losses may differ
at any step by no more than rounding explains, which is measured as the distance of the plain net
from itself in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.nets import NETS
from examples.nets import contestants as forms
from examples.nets.net import Config, Replicated, make_inputs

NET = "late_ranking"
STEPS = 20
LEARNING_RATE = 0.02
# Sums in another order and sums in another precision are errors of the same size; the factor
# leaves room for chance.
MAX_ROUNDINGS = 3.0

Times = Callable[[dict[str, Callable[[], None]]], dict[str, float]]


class Training:
    """A net that takes users once, its optimizer and its batches; `step` takes the next one."""

    def __init__(
        self, net: nn.Module, config: Config, ratio: int, dtype: torch.dtype, device: str
    ) -> None:
        self.net = net.to(device=device, dtype=dtype).train()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)
        users = forms.users_at(config, ratio)
        self.index = forms.index_of(users, ratio, device)
        self.losses: list[Tensor] = []
        self.batches = []
        for seed in range(4):
            # Drawn in fp32, so that every type sees the same numbers as far as it can hold them.
            user, item = make_inputs(config, users, users * ratio, torch.float32, device, seed)
            label = (item["fields"][:, :4, 0] > 0).to(dtype)
            cast = [{name: x.to(dtype) for name, x in side.items()} for side in (user, item)]
            self.batches.append((*cast, label))

    def step(self) -> None:
        user, item, label = self.batches[len(self.losses) % len(self.batches)]
        logits = self.net(user, item, self.index)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), label.float())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())


def largest_difference(a: Training, b: Training) -> float:
    pairs = zip(a.losses[:STEPS], b.losses[:STEPS], strict=True)
    return max(abs(float(x) - float(y)) for x, y in pairs)


def training_rows(
    config: Config, ratios: tuple[int, ...], device: str, times: Times
) -> Iterator[dict[str, Any]]:
    """One row for each ratio: milliseconds of a step, and how far the losses are apart.

    Args:
        times: from steps to their medians in milliseconds, the contestants in turn.

    Errors:
        AssertionError: the losses differ by more than rounding explains.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    wider = torch.float32 if device == "cuda" else torch.float64
    torch.set_float32_matmul_precision("high")  # of the backward passes that sum in fp32

    for ratio in ratios:

        def made(adopted: bool, dtype: torch.dtype, ratio: int = ratio) -> Training:
            plain, direct = NETS[NET].build(config)
            net = direct if adopted else Replicated(plain)
            return Training(net, config, ratio, dtype, device)

        contestants = {"ours": made(True, dtype), "replicated": made(False, dtype)}
        exact = made(False, wider)
        for training in (*contestants.values(), exact):
            for _ in range(STEPS):
                training.step()
        difference = largest_difference(contestants["ours"], contestants["replicated"])
        rounding = largest_difference(contestants["replicated"], exact)
        assert difference <= MAX_ROUNDINGS * rounding, (
            f"the losses of {NET} at ratio {ratio} differ by {difference:.2g}; rounding explains "
            f"{rounding:.2g}"
        )
        del exact
        ms = times({name: training.step for name, training in contestants.items()})
        users = forms.users_at(config, ratio)
        case = {"net": NET, "what": "training step", "ratio": ratio, "U": users, "B": users * ratio}
        yield {
            "case": case | {"dtype": str(dtype).removeprefix("torch.")},
            "unit": "ms",
            "ours": ms["ours"],
            "peers": {"replicated": ms["replicated"]},
            "largest_difference_of_losses": difference,
            "replicated_from_wider_type": rounding,
        }
