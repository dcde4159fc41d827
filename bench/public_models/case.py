# SPDX-License-Identifier: Apache-2.0
"""What a public model is to the benchmark, and what the libraries' models share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 3
# Width of an embedding, values per table, rows of a history.
WIDTH, VOCABULARY, HISTORY = 16, 1000, 50
# Categorical and numeric features of users and of candidates.
USER_FIELDS, CANDIDATE_FIELDS = 13, 13
USER_NUMBERS, CANDIDATE_NUMBERS = 7, 6


@dataclass(frozen=True)
class Cure:
    """The smallest change of a model's source that lets torch.export take it.

    `apply` patches an object of the unmodified class; `text` says what it changes.
    """

    text: str
    apply: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Case:
    """A model class of a library with its inputs.

    Attributes:
        library, model: the names; `model` has the class, and what else tells two cases apart.
        build: makes the model, in its library's way.
        inputs: of n rows, as the model takes them, from a generator.
        request_only: the user's inputs, as `ikbo.transform` takes them.
        cure: for a model that torch.export does not take.
    """

    library: str
    model: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]
    request_only: tuple[str, ...]
    cure: Cure | None = None

    @property
    def name(self) -> str:
        return f"{self.library}.{self.model}"

    def make(self, *, cured: bool = False) -> nn.Module:
        """The model in evaluation, its weights random."""
        torch.manual_seed(SEED)
        model = self.build()
        randomise(model)
        if cured:
            assert self.cure is not None
            self.cure.apply(model)
        return model.eval()

    def rows(self, count: int) -> Any:
        return self.inputs(count, torch.Generator().manual_seed(SEED))


def randomise(model: nn.Module) -> None:
    """Weights as after training: the libraries start some so small that an error would not show."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        elif isinstance(module, nn.Linear | nn.RNNBase):
            module.reset_parameters()
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            # Products of embeddings are small; a bias that outweighs them would decide alone which
            # of the outputs are 0.
            module.reset_parameters()
            assert module.bias is not None
            nn.init.normal_(module.bias, std=0.01)
        elif isinstance(module, nn.BatchNorm1d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
