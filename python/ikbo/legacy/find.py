# SPDX-License-Identifier: Apache-2.0
"""Which inputs and columns of a recorded batch are the user's, found by value."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ikbo.candidate_index import CandidateIndex
from ikbo.legacy.rows import arguments, bits_of, index_of
from ikbo.transform import inputs
from ikbo.transform.packed import apart, ranges

# What varies in at most this share of the requests is called nearly constant.
_NEARLY = 0.05


@dataclass(frozen=True)
class Finding:
    """What a batch says about an input, or about columns of one.

    Attributes:
        name: as `request_only` takes it.
        verdict: "user" (constant within every request, and not by accident); "undecided" (constant,
            but so might a candidate's value be, that often is the same); "nearly" (varies within
            at most 5 % of the requests: a user's value with errors in the record, or a candidate's
            that seldom changes); or "candidate".
        varying: requests within which it varies.
        example: two rows of one request that differ, where there are any.
        chance: how likely it would be constant within every request if each row drew its value from
            all values of the batch, as an upper bound over the columns; 1 where it varies.
    """

    name: str
    verdict: str
    varying: int
    example: tuple[int, int] | None
    chance: float


@dataclass(frozen=True)
class Proposal:
    """What `find_request_only` found.

    Attributes:
        request_only: names for `ikbo.transform`; what was found to be the user's.
        findings: of every input, or of runs of columns of one where they differ.
        num_requests: requests with two candidates or more, the only ones that prove anything.
    """

    request_only: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_requests: int

    def table(self) -> str:
        """The findings, one a line."""
        lines = [f"{self.num_requests} requests with two candidates or more"]
        for found in self.findings:
            rows = f", rows {found.example[0]} and {found.example[1]}" if found.example else ""
            varies = f"varies in {found.varying} requests{rows}"
            text = varies if found.varying else f"constant, by accident at odds {found.chance:.1g}"
            lines.append(f"{found.verdict:9}  {found.name}: {text}")
        return "\n".join(lines)


def find_request_only(
    batch: tuple[Any, ...] | Mapping[str, Any],
    request_ids: Tensor | Iterable[Hashable],
    *,
    columns: Mapping[str, Any] | None = None,
    row_counts: Mapping[str, int] | None = None,
    model: nn.Module | None = None,
    max_chance: float = 1e-6,
) -> Proposal:
    """Finds the inputs and columns whose value is the same for all candidates of each request.

    An input that is constant as a whole is judged as a whole; of others each column is, along the
    axis that has most constant columns.

    Args:
        batch: inputs of the unmodified model, as `ikbo.transform` takes them; many requests, since
            few prove little.
        request_ids: `[B]`, the request of each row: an integer tensor or hashable values.
        columns, row_counts: as in `ikbo.transform`; columns with a name are judged by name.
        model: gives positional inputs their names; needed for a tuple.
        max_chance: largest `Finding.chance` at which a constant is taken for the user's.

    Returns:
        The proposal. It is evidence, not proof: look at `table()`.

    Errors:
        TypeError, ValueError: an argument is not as described; no request has two candidates.

    Cost:
        Some passes over the batch, on the CPU.
    """
    args, kwargs, signature = arguments(batch, model)
    named = apart(inputs.named_leaves(signature, args, kwargs), row_counts)
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}
    index = index_of(tensors, request_ids)
    first = index.first_candidates()[index.cand_to_user.long()].cpu()
    num_requests = int((index.counts() > 1).sum())
    if not num_requests:
        raise ValueError(
            "ikbo.legacy: requests with one candidate prove nothing; at least one of the "
            f"{index.num_users} requests must have two"
        )
    judge = _Judge(index, first, max_chance)
    places = ranges(columns, tensors)
    findings: list[Finding] = []
    names: list[str] = []
    for name, x in tensors.items():
        units = {text: place for text, (of, place) in places.items() if of == name}
        found, chosen = _judge_input(judge, name, x, units)
        findings += found
        names += chosen
    return Proposal(tuple(names), tuple(findings), num_requests)


@dataclass(frozen=True)
class _Judge:
    """Judges groups of elements of an input; `first` is the first row of each row's request."""

    index: CandidateIndex
    first: Tensor
    max_chance: float

    def varying(self, bits: Tensor) -> tuple[int, tuple[int, int] | None]:
        """Requests within which `bits` `[B, ...]` vary, and rows that show it."""
        wrong = (bits != bits[self.first]).flatten(1).any(1)
        if not wrong.any():
            return 0, None
        row = int(wrong.nonzero()[0])
        return len(self.index.cand_to_user[wrong].unique()), (int(self.first[row]), row)

    def chance(self, bits: Tensor) -> float:
        """The chance that rows of each request agree, if all draw from the values of the batch.

        With p_v the share of rows with value v: the product over requests with n rows of the sum
        over v of p_v^n. The values are those of each request's first row, weighted by its rows.
        """
        counts = self.index.counts().double()
        values = CandidateIndex.from_request_ids(
            row.tobytes() for row in bits[self.index.first_candidates()].flatten(1).numpy()
        )
        shares = torch.zeros(values.num_users, dtype=torch.float64)
        shares.index_add_(0, values.cand_to_user.long(), counts / counts.sum())
        total = 0.0
        for rows, requests in zip(*counts.unique(return_counts=True), strict=True):
            # In logarithms: of many rows the powers are too small for a float.
            total += float(requests) * float(torch.logsumexp(rows * shares.log(), 0))
        return math.exp(max(min(total, 0.0), -700.0))

    def find(self, name: str, bits: Tensor) -> Finding:
        varying, example = self.varying(bits)
        if not varying:
            chance = self.chance(bits)
            verdict = "user" if chance <= self.max_chance else "undecided"
            return Finding(name, verdict, 0, None, chance)
        requests = int((self.index.counts() > 1).sum())
        verdict = "nearly" if varying <= _NEARLY * requests else "candidate"
        return Finding(name, verdict, varying, example, 1.0)


def _judge_input(
    judge: _Judge, name: str, x: Tensor, units: Mapping[str, range]
) -> tuple[list[Finding], list[str]]:
    """Findings of one input, and the names of what is the user's; `units` are named columns."""
    bits = bits_of(x)
    whole = judge.find(name, bits)
    if not whole.varying or x.ndim == 1:
        return [whole], [name] if whole.verdict == "user" else []
    if units:
        shaped = bits.reshape(*x.shape, -1)
        findings = [
            judge.find(text, shaped.narrow(x.ndim - 1, place.start, len(place)))
            for text, place in units.items()
        ]
        return findings, [found.name for found in findings if found.verdict == "user"]
    axis = _best_axis(judge, bits, x)
    shaped = bits.reshape(*x.shape, -1)
    each = [judge.find("", shaped.select(axis, place)) for place in range(x.shape[axis])]
    if {found.verdict for found in each} <= {"candidate"}:
        return [whole], []
    runs = []
    for _, run in groupby(range(len(each)), lambda place: each[place].verdict):
        chosen = list(run)
        runs.append(_joined(_subscript(name, axis, [chosen]), [each[i] for i in chosen]))
    users = [
        list(run)
        for is_user, run in groupby(range(len(each)), lambda i: each[i].verdict == "user")
        if is_user
    ]
    return runs, [_subscript(name, axis, users)] if users else []


def _best_axis(judge: _Judge, bits: Tensor, x: Tensor) -> int:
    """The axis behind the batch along which most columns are constant within every request."""
    constant = (bits == bits[judge.first]).all(2).all(0).reshape(x.shape[1:])

    def covered(axis: int) -> int:
        rest = [other for other in range(constant.ndim) if other != axis - 1]
        whole = constant.all(rest) if rest else constant
        return int(whole.sum()) * constant.numel() // max(constant.shape[axis - 1], 1)

    return max(range(1, x.ndim), key=lambda axis: (covered(axis), axis))


def _joined(name: str, found: Sequence[Finding]) -> Finding:
    """Findings with one verdict as one: that with the weakest evidence."""
    worst = max(found, key=lambda each: (each.chance, each.varying))
    return Finding(name, worst.verdict, worst.varying, worst.example, worst.chance)


def _subscript(name: str, axis: int, runs: Sequence[Sequence[int]]) -> str:
    """Columns as Python writes them: x[:, 3:7], x[:, [0, 5:8]]."""
    texts = [f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else str(run[0]) for run in runs]
    inside = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    return f"{name}[{', '.join([':'] * axis)}, {inside}]"
