# SPDX-License-Identifier: Apache-2.0
"""Linear maps over inputs of which one part comes from the user and one from the candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikbo import ops
from ikbo.candidate_index import CandidateIndex, as_cand_to_user

if TYPE_CHECKING:
    from typing_extensions import Self


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
    two parts, the candidate's also from a packed copy."""

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
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(
                    f"ikbo.nn.{type(self).__name__}: {name} must be an int of at least 1; got "
                    f"{value!r}"
                )
        super().__init__(k_user + k_cand, out_features, bias=bias, device=device, dtype=dtype)
        self.k_user = k_user
        self.k_cand = k_cand
        self.w_cand_packed: Tensor | None
        self.register_buffer("w_cand_packed", None, persistent=False)
        self._packed_parts: list[int] = []
        self._packed_from: tuple[int, ...] = ()

    @property
    def w_user(self) -> Tensor:
        """The columns of the weight that meet the user's part, `[M, K_user]` (a view)."""
        return self.weight[:, : self.k_user]

    @property
    def w_cand(self) -> Tensor:
        """The columns of the weight that meet the candidate's part, `[M, K_cand]` (a view)."""
        return self.weight[:, self.k_user :]

    def _pack(self, k_parts: Sequence[int]) -> None:
        with torch.no_grad():
            self.w_cand_packed = ops.prepack(self.w_cand, k_parts)
        self._packed_parts, self._packed_from = list(k_parts), self._weight_version()

    def _pack_again(self) -> None:
        if self.w_cand_packed is not None:
            self._pack(self._packed_parts)

    def _weight_version(self) -> tuple[int, ...]:
        """Changes with the weight. Inference tensors do not count their changes."""
        weight = self.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version

    def _weight_for_call(self) -> Tensor:
        """`w_cand` as the operator should take it: packed where that is wanted and possible."""
        if self.w_cand_packed is None or (torch.is_grad_enabled() and self.weight.requires_grad):
            return self.w_cand
        if not torch.compiler.is_compiling() and self._packed_from != self._weight_version():
            self._pack_again()
        return self.w_cand_packed

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`; training drops the packed weight."""
        if mode:
            self.w_cand_packed = None
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._pack_again()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._pack_again()

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
        w_cand, index = self._weight_for_call(), as_cand_to_user(cand_to_user)
        return ops.linear(x_user, x_cand, self.w_user, w_cand, self.bias, index, self.activation)

    def prepack(self) -> Self:
        """Packs the candidate's weight for inference, see `ikbo.prepack`; returns the module.

        The packed weight is used where no gradient of the weight is asked for. The state dict stays
        as it is. `train()` drops it; `to()`, `load_state_dict` and in eager mode any call after a
        change of the weight pack it again. What changes `weight.data` is not seen, nor is, by a
        compiled module, any change but these.
        """
        self._pack([self.k_cand])
        return self

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
        self,
        e_user: Tensor,
        e_cand: Tensor | Sequence[Tensor],
        cand_to_user: CandidateIndex | Tensor,
    ) -> Tensor:
        """Applies the layer.

        Args:
            e_user: `[U, K_user, N]`.
            e_cand: `[B, K_cand, N]`, same dtype; or a list of tensors `[B, K_i, N]` in place of
                their concatenation, read where they lie.
            cand_to_user: the index.
        Returns: `[B, M, N]`.
        Errors: as `ikbo.lce`.
        Cost: `2 M N (U K_user + B K_cand)` FLOPs; see `ikbo.lce`.
        """
        w_cand, index = self._weight_for_call(), as_cand_to_user(cand_to_user)
        return ops.lce(e_user, e_cand, self.w_user, w_cand, self.bias, index)

    def prepack(self, k_cand: Sequence[int] | None = None) -> Self:
        """As `Linear.prepack`.

        Args:
            k_cand: the K_i of the list that `forward` will get; None for one tensor.
        """
        self._pack([self.k_cand] if k_cand is None else k_cand)
        return self
