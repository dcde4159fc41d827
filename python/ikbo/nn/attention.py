# SPDX-License-Identifier: Apache-2.0
"""Attention of candidates over the history of their user."""

from __future__ import annotations

from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor

from ikbo import ops
from ikbo.candidate_index import CandidateIndex, as_cand_to_user

_Module = TypeVar("_Module", bound="_Attention")


class _Attention(torch.nn.Module):
    """The projections of an attention layer; the modules below say what they project."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        history_dim: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        history_dim = embed_dim if history_dim is None else history_dim
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for name, value in sizes.items():
            if not isinstance(value, Integral):
                raise ValueError(f"{self._name()}: {name} must be an int; got {value!r}")
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(
                f"{self._name()}: embed_dim must be a positive multiple of num_heads; "
                f"got embed_dim = {embed_dim}, num_heads = {num_heads}"
            )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"{self._name()}: num_heads must be a multiple of num_kv_heads; "
                f"got num_heads = {num_heads}, num_kv_heads = {num_kv_heads}"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        kv_dim = num_kv_heads * self.head_dim

        def linear(k: int, m: int) -> torch.nn.Linear:
            return torch.nn.Linear(k, m, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(embed_dim, embed_dim)
        self.k_proj = linear(history_dim, kv_dim)
        self.v_proj = linear(history_dim, kv_dim)
        self.out_proj = linear(embed_dim, embed_dim)

    @classmethod
    def from_multihead_attention(cls: type[_Module], plain: torch.nn.MultiheadAttention) -> _Module:
        """A module with a copy of the weights of `plain`.

        Args:
            plain: without dropout, `add_bias_kv` and `add_zero_attn`, and with `kdim == vdim`.
        Errors: ValueError when `plain` uses one of these.
        """
        if plain.bias_k is not None or plain.add_zero_attn or plain.dropout:
            raise ValueError(
                f"{cls._name()}.from_multihead_attention: add_bias_kv, add_zero_attn and "
                f"dropout are not supported; got add_bias_kv = {plain.bias_k is not None}, "
                f"add_zero_attn = {plain.add_zero_attn}, dropout = {plain.dropout}"
            )
        if plain.kdim != plain.vdim:
            raise ValueError(
                f"{cls._name()}.from_multihead_attention: kdim must equal vdim; "
                f"got kdim = {plain.kdim}, vdim = {plain.vdim}"
            )
        if plain.in_proj_weight is not None:
            weights = plain.in_proj_weight.chunk(3)
        else:
            weights = (plain.q_proj_weight, plain.k_proj_weight, plain.v_proj_weight)
        has_bias = plain.in_proj_bias is not None
        module = cls(
            plain.embed_dim,
            plain.num_heads,
            history_dim=plain.kdim,
            bias=has_bias,
            device=weights[0].device,
            dtype=weights[0].dtype,
        )
        projections = (module.q_proj, module.k_proj, module.v_proj)
        with torch.no_grad():
            for projection, weight in zip(projections, weights, strict=True):
                projection.weight.copy_(weight)
            if has_bias:
                for projection, b in zip(projections, plain.in_proj_bias.chunk(3), strict=True):
                    projection.bias.copy_(b)
        module.out_proj.load_state_dict(plain.out_proj.state_dict())
        return module

    @classmethod
    def _name(cls) -> str:
        return f"ikbo.nn.{cls.__name__}"

    def _queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))

    def _keys_and_values(self, history: Tensor) -> tuple[Tensor, Tensor]:
        heads = (self.num_kv_heads, self.head_dim)
        return self.k_proj(history).unflatten(-1, heads), self.v_proj(history).unflatten(-1, heads)

    def _candidate_rows(self, x_cand: Tensor, history: Tensor) -> Tensor:
        """`[B, Q, embed_dim]`."""
        for name, tensor in (("x_cand", x_cand), ("history", history)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self._name()}: {name} must be a torch.Tensor; got {type(tensor).__name__}"
                )
        if x_cand.dim() not in (2, 3):
            raise ValueError(
                f"{self._name()}: x_cand must be [B, embed_dim] or [B, Q, embed_dim]; "
                f"got shape {tuple(x_cand.shape)}"
            )
        return x_cand if x_cand.dim() == 3 else x_cand.unsqueeze(1)

    def _candidate_results(self, out: Tensor, x_cand: Tensor) -> Tensor:
        out = self.out_proj(out.flatten(-2))
        return out if x_cand.dim() == 3 else out.squeeze(1)


class TargetAttention(_Attention):
    """Multi-head attention: queries from the candidate, keys and values from the user's history.

    `out[b] = W_o concat_h softmax(q_h k_h^T / sqrt(D)) v_h + b_o` with `q = W_q x_cand[b] + b_q`,
    `k = W_k history[i(b)] + b_k`, `v = W_v history[i(b)] + b_v`. Keys and values are projected once
    per user and read in place by the kernel: nothing of size `B x S` is stored.

    Plain counterpart: four `torch.nn.Linear` named `q_proj`, `k_proj`, `v_proj`, `out_proj` around
    `scaled_dot_product_attention` on `history[cand_to_user]`; their state dicts are the same.
    `from_multihead_attention` takes the weights of a `torch.nn.MultiheadAttention`.

    A candidate whose user has no valid key gets `out_proj(0)`.

    Args:
        embed_dim: width of queries and result; H * D.
        num_heads: H; divides `embed_dim`.
        num_kv_heads: H_kv, heads of keys and values; divides H. None means H.
        history_dim: width of the history; None means `embed_dim`.
        bias: whether the projections have biases.
        device, dtype: of the parameters.
    Errors: ValueError when the sizes do not divide as stated.
    """

    def forward(
        self,
        x_cand: Tensor,
        history: Tensor,
        cand_to_user: CandidateIndex | Tensor,
        user_lengths: Tensor | None = None,
        user_mask: Tensor | None = None,
        *,
        user_offsets: Tensor | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            x_cand: `[B, embed_dim]`, or `[B, Q, embed_dim]` for Q queries per candidate.
            history: `[U, S, history_dim]`, same dtype; packed: `[T, history_dim]`, the histories
                of all users one after the other.
            cand_to_user: the index.
            user_lengths: int32 `[U]`, valid history rows of each user; None means S.
            user_mask: bool `[U, S]`, True where a history row counts; None means everywhere.
            user_offsets: int32 `[U + 1]`: the history is packed, user u has its rows
                `user_offsets[u]` to `user_offsets[u + 1] - 1`; lengths and mask must be None.
        Returns: the shape of `x_cand`.
        Errors: TypeError when `x_cand` or `history` is no tensor; ValueError when `x_cand` has
            neither two nor three dimensions; else as `ikbo.target_attention`.
        Cost: projections `4 U S history_dim H_kv D + 4 B Q embed_dim^2` FLOPs, attention
            `4 B Q S H D`, packed T for `U S`; see `ikbo.target_attention`.
        """
        queries = self._candidate_rows(x_cand, history)
        out, _ = ops.target_attention(
            self._queries(queries),
            *self._keys_and_values(history),
            as_cand_to_user(cand_to_user),
            user_lengths=user_lengths,
            user_mask=user_mask,
            user_offsets=user_offsets,
        )
        return self._candidate_results(out, x_cand)


class SelfTargetAttention(_Attention):
    """Multi-head attention of a history to itself, and of each candidate to its user's history.

    The layer of a sequence model whose candidates stand behind the history and see it, but neither
    each other nor themselves. With `q = W_q x + b_q`, and k and v likewise from the history,
    `out = W_o concat_h softmax(q_h k_h^T / sqrt(D)) v_h + b_o` for every history row, once per
    user, and for every candidate. Nothing of size `B x S` is stored.

    Plain counterpart: as of `TargetAttention`, with the same `q_proj` for history and candidates.

    Args: as of `TargetAttention`, but for `history_dim`: the history is as wide as the candidates.
    Errors: ValueError when the sizes do not divide as stated, or for another `history_dim`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        history_dim: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if history_dim not in (None, embed_dim):
            raise ValueError(
                f"{self._name()}: history_dim must be embed_dim = {embed_dim} or None; "
                f"got {history_dim!r}"
            )
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, bias=bias, device=device, dtype=dtype
        )

    def forward(
        self,
        x_cand: Tensor,
        history: Tensor,
        cand_to_user: CandidateIndex | Tensor,
        user_lengths: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attends.

        Args:
            x_cand: `[B, embed_dim]`, or `[B, Q, embed_dim]` for Q queries per candidate.
            history: `[U, S, embed_dim]`, same dtype.
            cand_to_user: the index.
            user_lengths: int32 `[U]`, valid history rows of each user; None means S.
            is_causal: whether a history row sees no later one.
        Returns: `(out_user, out_cand)` in the shapes of `history` and `x_cand`; rows that see no
            key, such as those at or past a history's length, are `out_proj(0)`.
        Errors: TypeError when `x_cand` or `history` is no tensor; ValueError when `x_cand` has
            neither two nor three dimensions; else as `ikbo.self_target_attention`.
        Cost: projections `4 U S embed_dim (embed_dim + H_kv D) + 4 B Q embed_dim^2` FLOPs,
            attention `4 (U S + B Q) S H D`; see `ikbo.self_target_attention`.
        """
        queries = self._candidate_rows(x_cand, history)
        out_user, out_cand, _, _ = ops.self_target_attention(
            self._queries(history),
            self._queries(queries),
            *self._keys_and_values(history),
            as_cand_to_user(cand_to_user),
            user_lengths,
            is_causal=is_causal,
        )
        return self.out_proj(out_user.flatten(-2)), self._candidate_results(out_cand, x_cand)
