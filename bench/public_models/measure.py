# SPDX-License-Identifier: Apache-2.0
"""What the pass makes of one public model: status, work moved and left, error, speed."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import ikbo
from bench.in_turn import in_turn, loaded_in_turn
from bench.public_models.case import Case
from ikbo import _inductor
from ikbo.testing.user_work import user_work
from ikbo.transform import TransformedModule
from ikbo.transform.capture import Captured, capture
from ikbo.transform.cost import COUNTER_FORMULAS
from ikbo.transform.errors import TransformError
from ikbo.transform.rules import RULES
from ikbo.transform.verify import in_fp64

# (users, candidates): about as many candidates at each ratio.
SIZES = {1: (512, 512), 10: (51, 510), 64: (8, 512), 500: (1, 500)}
EXAMPLE_ROWS = 64
ERROR_RATIO = 64
ROUNDS, SECONDS = 15, 5.0
COPIES = 4  # of a package, loaded
# An output may be off by so many times what the unmodified model is off from fp64, and by so many
# roundings of the largest value: the bounds of the pass's own verification.
ERROR_FACTOR, ERROR_ROUNDINGS = 4, 32


@dataclass(frozen=True)
class Request:
    """Inputs of one run: as the transformed model takes them, and with users repeated."""

    ours: tuple[tuple[Any, ...], dict[str, Any]]
    replicated: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, captured: Captured, num_users: int, num_candidates: int) -> Request:
        """Rows of the example inputs; candidates in a random order of their users."""
        generator = torch.Generator().manual_seed(5)
        index = torch.arange(num_candidates, dtype=torch.int32) % num_users
        index = index[torch.randperm(num_candidates, generator=generator)]
        counts = {"user": num_users, "candidate": num_candidates}
        index = index.to(captured.device)
        at_users, at_candidates = [], []
        for x, role in zip(captured.flat, captured.flat_roles, strict=True):
            if role is not None:
                x = x[torch.arange(counts[role]) % len(x)]
            at_users.append(x)
            at_candidates.append(x[index.long()] if role == "user" else x)
        args, kwargs = captured.nest(at_users)
        return cls((args, {**kwargs, "cand_to_user": index}), captured.nest_joined(at_candidates))


def exported(model: nn.Module, inputs: Any) -> ExportedProgram:
    """The unmodified model through torch.export alone, any batch size allowed."""
    batch = Dim("batch", min=1)
    shapes = pytree.tree_map(lambda _: {0: batch}, inputs)
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes)


def transformed(case: Case, program: ExportedProgram, inputs: Any) -> TransformedModule:
    """Ours, for the sizes that are measured."""
    most = {"max_users": SIZES[1][0], "max_candidates": 1024}
    return ikbo.transform(program, inputs, case.request_only, **most)


def measured(case: Case, ratios: Sequence[int], *, cured: bool, package: bool) -> dict[str, Any]:
    """The row of a case; `cured` measures the model with its cure applied."""
    model, inputs = case.make(cured=cured), case.rows(EXAMPLE_ROWS)
    row: dict[str, Any] = {
        "case": {"library": case.library, "model": case.model, "cured": cured},
        "unit": "ms",
        "ours": None,
        "peers": {},
    }
    if cured:
        row |= {"cure_error": _difference(model, case.make(), inputs)}
    try:
        program = exported(model, inputs)
    except Exception as error:
        cure = None if case.cure is None else case.cure.text
        return row | {"status": "not_exportable", "reason": first_line(error), "cure": cure}
    # The export leaves its own tensors in attributes that some models set when they run.
    model = case.make(cured=cured)
    captured = capture(program, inputs, list(case.request_only))
    try:
        with used_rules() as rules:
            ours = transformed(case, program, inputs)
    except TransformError as error:
        is_wrong = "differs from the unmodified model" in str(error)
        return row | {"status": "wrong" if is_wrong else "refused", "reason": first_line(error)}
    largest, is_close = errors(captured, model, ours)
    row |= {
        "status": "transformed" if is_close else "wrong",
        "rules": sorted(rules, key=lambda name: int(name[1:])),
        "max_error": largest,
        **work(captured, ours),
        "blocked": sorted({text for r in ours.spec.rows for text in r.blocked}),
    }
    eager = {ratio: timed(captured, model, ours, ratio) for ratio in ratios}
    row |= {"speedup": {str(r): ms["replicated"] / ms["ours"] for r, ms in eager.items()}}
    last = eager[max(ratios)]
    row |= {"ours": last["ours"], "peers": {"replicated": last["replicated"]}}
    if package:
        speed = package_speedups(captured, program, ours, ratios)
        row |= {"package_speedup": {str(ratio): value for ratio, value in speed.items()}}
    return row


def _difference(model: nn.Module, other: nn.Module, inputs: Any) -> float:
    """The largest difference of two models' results."""
    with torch.no_grad():
        pairs = zip(*(pytree.tree_leaves(m(*inputs)) for m in (model, other)), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def first_line(error: Exception) -> str:
    """What went wrong, and where in the library, without the rest of a long text."""
    text = str(error).strip()
    where = re.search(r"\((?:\S*/)?((?:deepctr_torch|torch_rechub|torchrec)/\S+:\d+)", text)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{line} ({where[1]})" if where and where[1] not in line else line


@contextmanager
def used_rules() -> Iterator[set[str]]:
    """Collects the numbers of the rules that apply within it, as their docstrings begin."""
    found: set[str] = set()
    before = {target: list(rules) for target, rules in RULES.items()}

    def noted(rule: Callable[..., Any]) -> Callable[..., Any]:
        numbers = re.match(r"(A\d+(?:, A\d+)*):", rule.__doc__ or "")

        @functools.wraps(rule)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = rule(*args, **kwargs)
            if result is not None and numbers:
                found.update(numbers[1].split(", "))
            return result

        return call

    for target, rules in before.items():
        RULES[target][:] = map(noted, rules)
    try:
        yield found
    finally:
        for target, rules in before.items():
            RULES[target][:] = rules


def errors(captured: Captured, model: nn.Module, ours: nn.Module) -> tuple[float, bool]:
    """The largest error against the unmodified model in fp64, and whether it is small enough."""
    request = Request.of(captured, *SIZES[ERROR_RATIO])
    (args, kwargs), (our_args, our_kwargs) = request.replicated, request.ours
    with torch.no_grad():
        exact = pytree.tree_leaves(in_fp64(model)(args, kwargs))
        got = pytree.tree_leaves(ours(*our_args, **our_kwargs))
        theirs = pytree.tree_leaves(model(*args, **kwargs))
    return compared(got, theirs, exact)


def compared(
    got: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> tuple[float, bool]:
    """The largest error of results, and whether it is small beside that of `theirs`."""
    largest, is_close = 0.0, True
    for a, b, c in zip(got, theirs, exact, strict=True):
        error, peer = (float((x.double() - c).abs().max()) for x in (a, b))
        rounding = ERROR_ROUNDINGS * torch.finfo(a.dtype).eps * float(c.abs().max())
        largest = max(largest, error)
        is_close &= a.shape == b.shape and error <= ERROR_FACTOR * peer + rounding
    return largest, is_close


def work(captured: Captured, ours: TransformedModule) -> dict[str, Any]:
    """FLOPs per candidate: of the unmodified model, the user's of them, and what is left.

    `moved_share` is how much of the user's work left the candidates, `left_over_minimum` what is
    left over what users do not determine; both are null where there is none. Of the transformed
    form, whichever form such a run takes.
    """
    found = user_work(captured)
    before, user = sum(w.flops for w in found), sum(w.user for w in found)
    counts = (10, 30)
    totals = []
    for count in counts:
        args, kwargs = Request.of(captured, 1, count).ours
        counter = FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS)
        with counter, torch.no_grad():
            ours.run_nested(*args, **kwargs)
        totals.append(counter.get_total_flops())
    left = (totals[1] - totals[0]) / (counts[1] - counts[0])
    return {
        "flops": before,
        "user_flops": user,
        "flops_left": left,
        "moved_share": min(1.0, (before - left) / user) if user else None,
        "left_over_minimum": left / (before - user) if before > user else None,
    }


def timed(captured: Captured, model: nn.Module, ours: nn.Module, ratio: int) -> dict[str, float]:
    """Milliseconds of a run, eager, of both."""
    request = Request.of(captured, *SIZES[ratio])

    def run(module: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        with torch.no_grad():
            return module(*inputs[0], **inputs[1])

    contestants = {
        "ours": lambda: run(ours, request.ours),
        "replicated": lambda: run(model, request.replicated),
    }
    return in_turn(contestants, rounds=ROUNDS, seconds=SECONDS)


def package_unmodified(program: ExportedProgram, device: str, path: Path) -> None:
    """The unmodified model as an AOTInductor package, with the options that ours has."""
    with open(path, "w+b") as file:
        _inductor.compile_to({"model": (program, _inductor.compile_options(device))}, file)


def package_speedups(
    captured: Captured, program: ExportedProgram, ours: nn.Module, ratios: Sequence[int]
) -> dict[int, float]:
    """The same of both as AOTInductor packages; ours runs what was faster when it was made."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "ours.pt2"), Path(folder, "unmodified.pt2")
        ikbo.package(ours, paths[0], both_forms="measured")
        package_unmodified(program, "cpu", paths[1])
        fast, plain = loaded_in_turn(paths, COPIES)
        found = {}
        for ratio in ratios:
            request = Request.of(captured, *SIZES[ratio])
            flat = pytree.tree_leaves(request.ours)
            (args, kwargs) = request.replicated
            contestants = {
                "ours": [functools.partial(run, *flat) for run in fast],
                "replicated": [functools.partial(run, *args, **kwargs) for run in plain],
            }
            ms = in_turn(contestants, rounds=ROUNDS, seconds=SECONDS)
            found[ratio] = ms["replicated"] / ms["ours"]
    return found
