# SPDX-License-Identifier: Apache-2.0
"""What each operator means: the replicated form, in plain PyTorch, in the dtype of its inputs.

Signatures are those of the operators. Every user tensor is replicated to the candidate batch first
and one ordinary operator follows, which is what a model does without ikbo. Called with fp64 inputs
these are the truth that tests compare with; called in a test's own dtype they give the error that
PyTorch itself makes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


def expand(x_user: Tensor, cand_to_user: Tensor) -> Tensor:
    """``x_user[cand_to_user]``."""
    return x_user[cand_to_user.long()]


def linear(
    x_user: Tensor,
    x_cand: Tensor,
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
    activation: str = "none",
) -> Tensor:
    """A linear layer over ``[x_user of the candidate's user, x_cand]``, then the activation."""
    x = torch.cat([expand(x_user, cand_to_user), x_cand], dim=1)
    w = torch.cat([w_user, w_cand], dim=1)
    return ACTIVATIONS[activation](functional.linear(x, w, bias))


def lce(
    e_user: Tensor,
    e_cand: Tensor | Sequence[Tensor],
    w_user: Tensor,
    w_cand: Tensor,
    bias: Tensor | None,
    cand_to_user: Tensor,
) -> Tensor:
    """Both weights side by side times the embeddings of user and candidate on top of each other."""
    parts = [e_cand] if isinstance(e_cand, Tensor) else e_cand
    e = torch.cat([expand(e_user, cand_to_user), *parts], dim=1)
    out = torch.cat([w_user, w_cand], dim=1) @ e
    return out if bias is None else out + bias[:, None]


def bmm(
    a_user: Tensor,
    b_cand: Tensor,
    cand_to_user: Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Tensor:
    """The batched product of the replicated user matrices with the candidates' matrices."""
    a = expand(a_user, cand_to_user)
    return (a.mT if transpose_a else a) @ (b_cand.mT if transpose_b else b_cand)


def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    user_mask: Tensor | None = None,
    scale: float | None = None,
    *,
    user_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the replicated keys and values; keys that do not count are masked.

    A row without any key gives output 0 and log-sum-exp -inf. Packed histories are padded first.
    """
    if user_offsets is not None:
        k, v = padded(k, user_offsets), padded(v, user_offsets)
        user_lengths = user_offsets.diff()
    group = q.size(2) // k.size(2)
    keys = expand(k, cand_to_user).repeat_interleave(group, dim=2)
    values = expand(v, cand_to_user).repeat_interleave(group, dim=2)
    position = torch.arange(k.size(1), device=k.device)
    counts = torch.ones(q.size(0), k.size(1), dtype=torch.bool, device=k.device)
    if user_lengths is not None:
        counts &= position < expand(user_lengths, cand_to_user)[:, None]
    if cand_lengths is not None:
        counts &= position < cand_lengths[:, None]
    if user_mask is not None:
        counts &= expand(user_mask, cand_to_user)
    # Masked keys and values may hold anything, NaN too.
    keys = torch.where(counts[:, :, None, None], keys, 0)
    values = torch.where(counts[:, :, None, None], values, 0)
    scores = torch.einsum("bqhd,bshd->bhqs", q, keys)
    scores = scores * (1 / math.sqrt(q.size(3)) if scale is None else scale)
    scores = scores.masked_fill(~counts[:, None, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.where(lse[..., None] == -math.inf, 0, torch.exp(scores - lse[..., None]))
    out = torch.einsum("bhqs,bshd->bqhd", weights, values)
    return out, lse if lse.dtype == torch.float64 else lse.float()


def self_target_attention(
    q_user: Tensor,
    q_cand: Tensor,
    k: Tensor,
    v: Tensor,
    cand_to_user: Tensor,
    user_lengths: Tensor | None = None,
    cand_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Target attention of each row of a history, as a candidate of its user, and of candidates."""
    num_users, num_keys, num_heads, _ = q_user.shape
    user = torch.arange(num_users, device=k.device).repeat_interleave(num_keys)
    row = torch.arange(num_keys, device=k.device).repeat(num_users)
    seen = row + 1 if is_causal else torch.full_like(row, num_keys)
    if user_lengths is not None:
        is_row = row < expand(user_lengths, user)
        seen = torch.where(is_row, seen, 0)
        # Rows that are no queries may hold anything, NaN too.
        q_user = torch.where(is_row.view(num_users, num_keys, 1, 1), q_user, 0)
    rows = q_user.flatten(0, 1).unsqueeze(1)
    out_user, lse_user = target_attention(rows, k, v, user, user_lengths, seen, scale=scale)
    out_cand, lse_cand = target_attention(
        q_cand, k, v, cand_to_user, user_lengths, cand_lengths, scale=scale
    )
    lse_user = lse_user.view(num_users, num_keys, num_heads).transpose(1, 2)
    return out_user.view(q_user.shape), out_cand, lse_user, lse_cand


def padded(rows: Tensor, user_offsets: Tensor) -> Tensor:
    """Packed histories ``[T, ...]`` as ``[U, S, ...]``, S the longest; what fills them up is some
    row's."""
    lengths = user_offsets.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    position = user_offsets[:-1, None] + torch.arange(longest, device=rows.device)
    return rows[position.clamp(max=rows.size(0) - 1)]
