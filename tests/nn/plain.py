# SPDX-License-Identifier: Apache-2.0
"""The plain counterparts of `ikbo.nn`, as a model author would write them on repeated rows."""

import torch
from torch import Tensor
from torch.nn import functional


class PlainLinear(torch.nn.Linear):
    """Linear over the concatenation, then an activation."""

    def __init__(self, k_user: int, k_cand: int, m: int, activation: str = "none") -> None:
        super().__init__(k_user + k_cand, m)
        self.activation = activation

    def forward(self, x_user: Tensor, x_cand: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(torch.cat([x_user, x_cand], dim=1))
        return out if self.activation == "none" else getattr(functional, self.activation)(out)


class PlainCompression(torch.nn.Linear):
    """Linear over the field axis."""

    def __init__(self, k_user: int, k_cand: int, m: int) -> None:
        super().__init__(k_user + k_cand, m)

    def forward(self, e_user: Tensor, e_cand: Tensor) -> Tensor:  # type: ignore[override]
        fields = torch.cat([e_user, e_cand], dim=1)
        return super().forward(fields.transpose(1, 2)).transpose(1, 2)


class PlainAttention(torch.nn.Module):
    """Four projections around scaled_dot_product_attention; a mask is of keys `[B, S]`, or of keys
    by query `[B, 1, Q, S]`."""

    def __init__(self, embed_dim: int, num_heads: int, kv_heads: int, history_dim: int) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = num_heads, kv_heads
        kv_dim = embed_dim // num_heads * kv_heads
        self.q_proj = torch.nn.Linear(embed_dim, embed_dim)
        self.k_proj = torch.nn.Linear(history_dim, kv_dim)
        self.v_proj = torch.nn.Linear(history_dim, kv_dim)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim)

    def forward(self, x_cand: Tensor, history: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q_proj(x_cand).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(history).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(history).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        attn_mask = mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)
        return self.out_proj(out.transpose(1, 2).flatten(-2))
