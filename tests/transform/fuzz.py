# SPDX-License-Identifier: Apache-2.0
"""Random models out of the rewrites' blocks, with random roles: transformed and compared in fp64.

usage: python -m tests.transform.fuzz [--seeds N] [--first N] [--exported N] [--results]

Prints one line per mismatch and a summary as JSON: seeds, mismatches, and which share of the FLOPs
that users alone determine was moved to them. What they determine is found by numbers: the model is
run again with other candidates, and what never changes is theirs. `--results` writes the summary to
bench/results/fuzz-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ikbo
from ikbo.testing.bench import write_results
from ikbo.transform import forms as f
from ikbo.transform.cost import COUNTER_FORMULAS
from ikbo.transform.device_costs import FREE
from ikbo.transform.forms import Cand, Concat, Rows, Scores
from tests.transform.random_forms import Draw
from tests.transform.test_compositions import STEPS, Run, Value, grown
from tests.transform.truth import marked

aten = torch.ops.aten
WIDTH = 3
SOURCES = [
    "python/ikbo/transform/**/*.py",
    *(f"tests/transform/{name}.py" for name in ("fuzz", "random_forms", "test_compositions")),
    "tests/transform/truth.py",
]
# What is picked by value, such as the best row, is the user's by chance: not in all of these.
RESAMPLES = 5


class OtherCandidates(Draw):
    """The same draws, but for the values of candidates."""

    def __init__(self, seed: str, noise: int) -> None:
        super().__init__(seed)
        self.noise = torch.Generator().manual_seed(noise)
        self.num_users, self.num_candidates = 3, 7
        self.index = torch.tensor([0, 2, 1, 0, 2, 1, 0], dtype=torch.int32)

    def cand(self, *shape: int) -> Cand:
        drawn = torch.randn(self.num_candidates, *shape, generator=self.noise)
        return Cand(drawn.double(), Rows())


@dataclass(frozen=True)
class Op:
    """An operator of the unmodified model: its FLOPs, its result, and what the pass made of it."""

    flops: int
    result: Tensor
    form: Any


def counted(compute: Callable[[], Any]) -> tuple[int, Any]:
    with FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS) as counter:
        out = compute()
    return counter.get_total_flops(), out


class Fuzzed(Run):
    """One run of a random model: forms through the pass, and tensors through the operators.

    Attributes:
        out: the result; `transformed` is that of the pass.
        ops: of the unmodified model.
    """

    def __init__(self, seed: int, noise: int = 0) -> None:
        self.draw = OtherCandidates(f"fuzz/{seed}", noise)
        self.walk = self.draw.walk()
        # Every step keeps the batch first; of an exported model the pass reads it off the shapes.
        self.walk.node_rows = Rows()
        self.ops: list[Op] = []
        self.out = model(self).tensor

    def weight(self, *shape: int) -> Value:
        drawn = self.draw.tensor(*shape) / max(1, shape[-1]) ** 0.5
        return self.value(self.walk.fold(lambda: drawn, "weight"))

    def __call__(self, target: Any, *args: Any) -> Any:
        forms = f.map_leaves(lambda x: x.form if isinstance(x, Value) else x, args)
        forms = self.walk.apply(target, *forms)
        flops, out = counted(lambda: self.plain(target, *args))
        if isinstance(out, tuple | list):
            return [Value(*pair) for pair in zip(forms, out, strict=True)]
        self.ops.append(Op(flops, out, forms))
        return Value(forms, out)

    def finish(self, x: Value) -> Value:
        self.transformed = self.walk.materialise(x.form)
        return x


def model(run: Any) -> Value:
    """The random model of a run: features of both sides, then some of the steps."""
    choose, draw = run.draw.choose, run.draw
    kinds = [draw.user, draw.cand]
    kinds += choose.choices([draw.user, draw.cand], k=choose.randint(0, 3))
    choose.shuffle(kinds)
    parts = tuple(kind(choose.randint(1, 3), WIDTH) for kind in kinds)
    x = run.value(Concat(1, parts, Rows()))
    for name in choose.choices(list(STEPS), k=choose.randint(2, 5)):
        x = STEPS[name](run, grown(run, x))
        x = run(aten.slice.Tensor, x, 1, 0, 6)
    return run.finish(x)


class Replayed(Draw):
    """Draws of a kind that a trace can follow: users and candidates are given, with one batch."""

    def __init__(self, seed: str, inputs: Any, num_candidates: Any) -> None:
        self.choose = random.Random(seed)
        self.inputs, self.num_candidates = inputs, num_candidates

    def user(self, *shape: int) -> Any:
        return Cand(self.inputs("user", shape), Rows())

    def cand(self, *shape: int) -> Any:
        return Cand(self.inputs("item", shape), Rows())


class Plain(Run):
    """A run of the operators alone."""

    def __init__(self, seed: int, inputs: Any, weights: Any, num_candidates: Any) -> None:
        self.draw = Replayed(f"fuzz/{seed}", inputs, num_candidates)
        self.weights = weights
        self.out = model(self).tensor

    def value(self, form: Any) -> Value:
        return Value(None, self.draw.meaning(form))

    def weight(self, *shape: int) -> Value:
        return Value(None, self.weights(shape))

    def __call__(self, target: Any, *args: Any) -> Any:
        out = self.plain(target, *args)
        return [Value(None, x) for x in out] if isinstance(out, tuple | list) else Value(None, out)

    def finish(self, x: Value) -> Value:
        return x


class Model(nn.Module):
    """The random model of a seed as a module that takes lists of user and candidate features."""

    def __init__(self, seed: int, rows: int = 24) -> None:
        super().__init__()
        self.seed, self.count = seed, 0
        self.inputs: dict[str, list[Tensor]] = {"user": [], "item": []}
        generator = torch.Generator().manual_seed(seed)

        def drawn(side: str, shape: Sequence[int]) -> Tensor:
            self.inputs[side].append(torch.randn(rows, *shape, generator=generator).double())
            return self.inputs[side][-1]

        def stored(shape: Sequence[int]) -> Tensor:
            drawn = torch.randn(*shape, generator=generator).double() / max(1, shape[-1]) ** 0.5
            self.register_buffer(f"weight_{self.count}", drawn)
            self.count += 1
            return drawn

        Plain(seed, drawn, stored, rows)

    def forward(self, user: list[Tensor], item: list[Tensor]) -> Tensor:
        sides = {"user": iter(user), "item": iter(item)}
        weights = (self.get_buffer(f"weight_{i}") for i in range(self.count))
        batch = user[0].shape[0]
        return Plain(self.seed, lambda s, _: next(sides[s]), lambda _: next(weights), batch).out


def mismatch(seed: int) -> str | None:
    """How the transformed model differs; None if it does not."""
    run = Fuzzed(seed)
    error = (run.transformed - run.out).abs().max() / run.out.abs().max().clamp(min=1)
    same = run.transformed.shape == run.out.shape and (error < 1e-9 or bool(run.out.isnan().any()))
    return None if same else f"seed {seed}: off by {float(error):.3g} of the largest value"


def shares(seed: int) -> tuple[float, float]:
    """FLOPs per candidate that users alone determine, and how many of them are at users."""
    run = Fuzzed(seed)
    others = [Fuzzed(seed, noise=noise).ops for noise in range(1, RESAMPLES)]
    found = moved = 0.0
    for op, *again in zip(run.ops, *others, strict=True):
        if not op.flops or isinstance(op.form, Scores):  # what becomes of these shows later
            continue
        same = torch.stack([op.result == other.result for other in again]).all(0)
        at_users = run.draw.meaning(marked(op.form, run.draw.num_candidates))
        found += op.flops * float(same.double().mean())
        moved += op.flops * float((same & at_users).double().mean())
    return found, moved


def exported(seed: int) -> None:
    """The whole transformation, with its verification, which raises on a difference."""
    module = Model(seed)
    inputs = (module.inputs["user"], module.inputs["item"])
    ikbo.transform(module, inputs, ["user"], max_users=8, device_costs=FREE)


def summary(seeds: Sequence[int]) -> dict[str, Any]:
    mismatches, found, moved = 0, 0.0, 0.0
    for done, seed in enumerate(seeds, 1):
        if text := mismatch(seed):
            mismatches += 1
            print(text, file=sys.stderr)
        user_work, at_users = shares(seed)
        found, moved = found + user_work, moved + at_users
        if done % 100 == 0:
            print(f"{done} of {len(seeds)} seeds", file=sys.stderr)
    share = moved / found if found else 1.0
    return {"seeds": len(seeds), "mismatches": mismatches, "moved_share": share}


def write(result: dict[str, Any]) -> None:
    """The result file; `ours` is the share of the users' FLOPs that was moved to them."""
    case = {key: result[key] for key in ("seeds", "exported")}
    share, mismatches = result["moved_share"], result["mismatches"]
    row = {"case": case, "unit": "share", "ours": share, "peers": {}, "mismatches": mismatches}
    print(write_results("fuzz", [row], sources=SOURCES), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--exported", type=int, default=50)
    parser.add_argument("--results", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    result = summary(seeds) | {"exported": options.exported}
    for seed in seeds[: options.exported]:
        exported(seed)
    print(json.dumps(result))
    if options.results:
        write(result)
    return 1 if result["mismatches"] else 0


if __name__ == "__main__":
    sys.exit(main())
