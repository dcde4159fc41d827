# SPDX-License-Identifier: Apache-2.0
"""Linear maps over inputs of which one part comes from the user and one from the candidate."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo import ops
from ikbo.candidate_index import CandidateIndex, as_cand_to_user


class Expand(torch.nn.Module):
    """User rows repeated for their candidates: `out[b] = x_user[cand_to_user[b]]`.

    The explicit boundary, for what no other module of this package covers.
    """

    def forward(self, x_user: Tensor, cand_to_user: CandidateIndex | Tensor) -> Tensor:
        """Repeats rows.

        Args:
            x_user: `[U, ...]`.
            cand_to_user: the index, B candidates.
        Returns: `[B, ...]`, the dtype of `x_user`.
        Errors: as `ikbo.expand`.
        """
        return ops.expand(x_user, as_cand_to_user(cand_to_user))


class _SplitLinear(torch.nn.Linear):
    """A `torch.nn.Linear` over K_user + K_cand inputs, the user's first, whose weight is read in
    two parts."""

    def __init__(
        self,
        k_user: int,
        k_cand: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("k_user", k_user), ("k_cand", k_cand), ("out_features", out_features)):
            if value < 1:
                raise ValueError(
                    f"ikbo.nn.{type(self).__name__}: {name} must be at least 1; got {value}"
                )
        super().__init__(k_user + k_cand, out_features, bias=bias, device=device, dtype=dtype)
        self.k_user = k_user
        self.k_cand = k_cand

    @property
    def w_user(self) -> Tensor:
        """The columns of the weight that meet the user's part, `[M, K_user]` (a view)."""
        return self.weight[:, : self.k_user]

    @property
    def w_cand(self) -> Tensor:
        """The columns of the weight that meet the candidate's part, `[M, K_cand]` (a view)."""
        return self.weight[:, self.k_user :]

    def extra_repr(self) -> str:
        return (
            f"k_user={self.k_user}, k_cand={self.k_cand}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class Linear(_SplitLinear):
    """`act(W [x_user[i(b)]; x_cand[b]] + bias)`, the user's part of it computed once per user.

    Plain counterpart: `torch.nn.Linear(k_user + k_cand, out_features)` on
    `torch.cat([x_user[cand_to_user], x_cand], dim=1)`, then the activation. The state dict is that
    of `torch.nn.Linear`: `weight` `[M, K_user + K_cand]`, the user's columns first, and `bias`
    `[M]`.

    Args:
        k_user: width of the user's part.
        k_cand: width of the candidate's part.
        out_features: M.
        bias: whether there is a bias.
        activation: "none", "relu", "gelu", "silu" or "sigmoid".
        device, dtype: of the parameters.
    Errors: ValueError when a size is not positive.
    """

    def __init__(
        self,
        k_user: int,
        k_cand: int,
        out_features: int,
        *,
        bias: bool = True,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(k_user, k_cand, out_features, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(  # type: ignore[override]  # one input more than the plain module
        self, x_user: Tensor, x_cand: Tensor, cand_to_user: CandidateIndex | Tensor
    ) -> Tensor:
        """Applies the layer.

        Args:
            x_user: `[U, K_user]`.
            x_cand: `[B, K_cand]`, same dtype.
            cand_to_user: the index.
        Returns: `[B, M]`.
        Errors: as `ikbo.linear`.
        Cost: `2 M (U K_user + B K_cand)` FLOPs; see `ikbo.linear`.
        """
        index = as_cand_to_user(cand_to_user)
        return ops.linear(
            x_user, x_cand, self.w_user, self.w_cand, self.bias, index, self.activation
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class LinearCompression(_SplitLinear):
    """Linear compression of embeddings (LCE): K_user + K_cand embeddings of width N to M of them.

    `out[b] = W [e_user[i(b)]; e_cand[b]] + bias`, the user's part computed once per user.

    Plain counterpart: `torch.nn.Linear(k_user + k_cand, out_features)` over the field axis, i.e.
    `plain(e.transpose(1, 2)).transpose(1, 2)` with
    `e = torch.cat([e_user[cand_to_user], e_cand], dim=1)`. The state dict is that of
    `torch.nn.Linear`: `weight` `[M, K_user + K_cand]`, the user's columns first, and `bias` `[M]`.

    Args:
        k_user: number of the user's embeddings.
        k_cand: number of the candidate's embeddings.
        out_features: M.
        bias: whether there is a bias.
        device, dtype: of the parameters.
    Errors: ValueError when a size is not positive.
    """

    def forward(  # type: ignore[override]  # one input more than the plain module
        self, e_user: Tensor, e_cand: Tensor, cand_to_user: CandidateIndex | Tensor
    ) -> Tensor:
        """Applies the layer.

        Args:
            e_user: `[U, K_user, N]`.
            e_cand: `[B, K_cand, N]`, same dtype.
            cand_to_user: the index.
        Returns: `[B, M, N]`.
        Errors: as `ikbo.lce`.
        Cost: `2 M N (U K_user + B K_cand)` FLOPs; see `ikbo.lce`.
        """
        return ops.lce(
            e_user, e_cand, self.w_user, self.w_cand, self.bias, as_cand_to_user(cand_to_user)
        )
