# SPDX-License-Identifier: Apache-2.0
"""Trains the net on request-grouped batches and measures its AUC on the held-out time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from examples.movielens.data import MovieLens, Request
from examples.movielens.model import LIKED, Ranker
from examples.movielens.split import SplitRanker

SEED = 20
NUM_STEPS = 200
REQUESTS_PER_STEP = 32
NUM_NEGATIVES = 4  # unseen films a training request
NUM_RANKED = 40  # unseen films a held-out request
HELD_OUT_STRIDE = 2  # every other held-out request is measured
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Batch:
    """Requests with their candidates: inputs of `SplitRanker`, and what happened."""

    inputs: dict[str, Tensor]
    watched: Tensor  # [B] 1 for an event, 0 for a drawn film
    liked: Tensor  # [B] 1 where the rating says so


def make_batch(
    data: MovieLens,
    requests: list[Request],
    negatives: int,
    rng: np.random.Generator,
    history: bool,
) -> Batch:
    """Each request's targets, then `negatives` films that its user never rated."""
    items, watched, liked, cand_to_user = [], [], [], []
    for row, request in enumerate(requests):
        targets = data.events[request.user][request.targets]
        drawn = rng.choice(data.unseen(request.user), negatives, replace=False)
        items += [targets[:, 0], drawn]
        watched += [np.ones(len(targets)), np.zeros(negatives)]
        liked += [targets[:, 1] >= LIKED, np.zeros(negatives)]
        cand_to_user += [np.full(len(targets) + negatives, row, dtype=np.int32)]
    inputs = data.user_rows(requests, history) | data.candidate_rows(np.concatenate(items))
    inputs["cand_to_user"] = torch.from_numpy(np.concatenate(cand_to_user))
    labels = (torch.from_numpy(np.concatenate(x).astype(np.float32)) for x in (watched, liked))
    return Batch(inputs, *labels)


def train(data: MovieLens, history: bool = True) -> Ranker:
    """`NUM_STEPS` steps over training requests drawn without repetition; one seed, one net."""
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    net = Ranker()
    grouped = SplitRanker(net)
    requests = data.requests(held_out=False)
    order = rng.permutation(len(requests))
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=NUM_STEPS)
    started = time.monotonic()
    for step in range(NUM_STEPS):
        chosen = order[step * REQUESTS_PER_STEP : (step + 1) * REQUESTS_PER_STEP]
        batch = make_batch(data, [requests[i] for i in chosen], NUM_NEGATIVES, rng, history)
        logits = grouped(**batch.inputs)
        loss = cross_entropy(logits["watch"], batch.watched)
        loss = loss + cross_entropy(logits["like"], batch.liked, weight=batch.watched)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 40 == 0 or step == NUM_STEPS - 1:
            spent = time.monotonic() - started
            progress = f"  step {step + 1}/{NUM_STEPS}  loss {loss.item():.4f}  {spent:.0f} s"
            print(progress, flush=True)
    return net.eval()


def request_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of (positive, negative) pairs in the right order, ties counted half."""
    above = scores[positive][:, None] - scores[~positive][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


@torch.no_grad()
def evaluate(net: Ranker, data: MovieLens, history: bool = True) -> dict[str, float]:
    """Ranks what held-out users watched among films that they never rated.

    Returns:
        `auc` of the net's watch score and `auc_popularity` of the films' number of ratings before
        the split; both are computed per request and averaged.
    """
    rng = np.random.default_rng(SEED + 1)
    grouped = SplitRanker(net)
    requests = data.requests(held_out=True)[::HELD_OUT_STRIDE]
    found: dict[str, list[float]] = {"auc": [], "auc_popularity": []}
    for start in range(0, len(requests), REQUESTS_PER_STEP):
        chosen = requests[start : start + REQUESTS_PER_STEP]
        batch = make_batch(data, chosen, NUM_RANKED, rng, history)
        watch = grouped(**batch.inputs)["watch"].numpy()
        popularity = data.popularity[batch.inputs["item_id"].numpy()]
        positive = batch.watched.numpy() > 0
        for row in range(len(chosen)):
            mine = batch.inputs["cand_to_user"].numpy() == row
            found["auc"].append(request_auc(watch[mine], positive[mine]))
            found["auc_popularity"].append(request_auc(popularity[mine], positive[mine]))
    return {name: float(np.mean(values)) for name, values in found.items()}
