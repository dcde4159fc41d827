# SPDX-License-Identifier: Apache-2.0
"""The forms of a net that are compared: the same weights, ranges and compile options for each."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import ikbo
from examples.nets import NETS
from examples.nets.net import Config, Inputs, Ranker, Replicated, Split, make_inputs

OURS = ("ours", "ours_adopted")
PEERS = ("replicated_aoti", "net_split_aoti")
REPLICATED, PIECES = COMPILED = ("replicated_compile", "public_pieces_compile")
MIN_USERS = 2
# Rows that the transformation is verified on, and packages are checked with.
EXAMPLES = 64


def users_at(config: Config, ratio: int) -> int:
    return max(MIN_USERS, config.candidates // ratio)


def limits_of(config: Config, ratios: tuple[int, ...]) -> tuple[int, int]:
    """The largest U and B of the runs."""
    users = [users_at(config, ratio) for ratio in ratios]
    return max(users), max(u * ratio for u, ratio in zip(users, ratios, strict=True))


def plain_net(name: str, config: Config, dtype: torch.dtype, device: str) -> Ranker:
    plain = NETS[name].build(config)[0]
    plain.to(device=device, dtype=dtype)
    return plain


def transformed(
    net: Ranker, config: Config, limits: tuple[int, int], dtype: torch.dtype, device: str
) -> ikbo.transform.TransformedModule:
    """The unmodified net through the pass."""
    example = make_inputs(config, EXAMPLES, EXAMPLES, dtype, device)
    return ikbo.transform(net, example, ["user"], max_users=limits[0], max_candidates=limits[1])


def form_of(
    name: str, contestant: str, config: Config, dtype: torch.dtype, device: str
) -> nn.Module:
    """A contestant that takes users once, but for the transformed one."""
    if contestant == "ours_adopted":
        adopted = NETS[name].build(config)[1]
        return adopted.to(device=device, dtype=dtype)
    net = plain_net(name, config, dtype, device)
    if contestant == PIECES:
        pieces = NETS[name].pieces
        assert pieces is not None, f"{name} has no such form"
        by_hand = pieces(config).to(device=device, dtype=dtype)
        by_hand.load_state_dict(net.state_dict())
        return by_hand.eval()
    return (Split(net) if contestant == "net_split_aoti" else Replicated(net)).eval()


def compiled_forms(name: str) -> tuple[str, ...]:
    """Those of `COMPILED` that a net has."""
    return COMPILED if NETS[name].pieces else (REPLICATED,)


def package(
    name: str,
    contestant: str,
    config: Config,
    limits: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    path: Path,
) -> None:
    """Writes the package of a contestant.

    Args:
        name: of the net.
        contestant: one of `OURS` or `PEERS`.
        limits: the largest U and B.
    """
    # What 16-bit products of several layers round in another order.
    tolerance = None if dtype == torch.float32 else 0.03
    if contestant == "ours":
        net = plain_net(name, config, dtype, device)
        module: nn.Module = transformed(net, config, limits, dtype, device)
        ikbo.package(module, path, name=name, tolerance=tolerance)
        return
    example = *make_inputs(config, EXAMPLES, EXAMPLES, dtype, device), index_of(1, EXAMPLES, device)
    ikbo.package(
        form_of(name, contestant, config, dtype, device),
        path,
        example_inputs=example,
        roles=roles_of(config),
        max_users=limits[0],
        max_candidates=limits[1],
        name=name,
        tolerance=tolerance,
    )


def roles_of(config: Config) -> dict[str, str]:
    roles = {f"user.{name}": "user" for name in config.user_inputs}
    roles |= {f"item.{name}": "candidate" for name in config.item_inputs}
    return roles | {"cand_to_user": "index"}


def index_of(num_users: int, ratio: int, device: str) -> Tensor:
    """`ratio` neighbouring candidates for each user."""
    return (torch.arange(num_users * ratio, device=device) // ratio).int()


def flat(user: Inputs, item: Inputs, index: Tensor) -> list[Tensor]:
    """Inputs in the order of a package."""
    return [*user.values(), *item.values(), index]
