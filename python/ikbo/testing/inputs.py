# SPDX-License-Identifier: Apache-2.0
"""Test cases of operators, and their inputs with traps for wrong reads.

A case's ``id`` holds all of it and seeds its inputs: ``make_inputs(Case.from_id(text))`` gives the
tensors of a failure seen elsewhere, on any device.

Always set: rows of users without candidates are NaN; with a layout other than ``contiguous``, so is
everything in memory around the tensor.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# Floating-point arguments of each operator, in schema order, in glossary letters.
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "expand": {"x_user": ("U", "K_user")},
    "linear": {
        "x_user": ("U", "K_user"),
        "x_cand": ("B", "K_cand"),
        "w_user": ("M", "K_user"),
        "w_cand": ("M", "K_cand"),
        "bias": ("M",),
    },
    "lce": {
        "e_user": ("U", "K_user", "N"),
        "e_cand": ("B", "K_cand", "N"),
        "w_user": ("M", "K_user"),
        "w_cand": ("M", "K_cand"),
        "bias": ("M",),
    },
    "bmm": {"a_user": ("U", "P", "R"), "b_cand": ("B", "R", "N")},
    "self_target_attention": {
        "q_user": ("U", "S", "H", "D"),
        "q_cand": ("B", "Q", "H", "D"),
        "k": ("U", "S", "H_kv", "D"),
        "v": ("U", "S", "H_kv", "D"),
    },
    "target_attention": {
        "q": ("B", "Q", "H", "D"),
        "k": ("U", "S", "H_kv", "D"),
        "v": ("U", "S", "H_kv", "D"),
    },
}


def _random_users(num_users: int, num_candidates: int, generator: torch.Generator) -> Tensor:
    return torch.randint(num_users, (num_candidates,), generator=generator)


# Which users the candidates belong to: (U, B, generator) -> int32 [B].
INDEX_PATTERNS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "sorted": lambda u, b, g: _random_users(u, b, g).sort().values,
    "shuffled": _random_users,
    "one_user": lambda u, b, g: torch.full((b,), u - 1),
    "one_each": lambda u, b, g: torch.arange(b) % u,
    # Every second user has no candidate.
    "gaps": lambda u, b, g: _random_users((u + 1) // 2, b, g) * 2,
}

LAYOUTS = ("contiguous", "padded", "transposed")


@dataclass(frozen=True)
class Case:
    """One call of an operator: sizes by glossary letter and options by argument name."""

    op: str
    dtype: str
    index: str
    layout: str
    sizes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        sizes = ",".join(f"{letter}={size}" for letter, size in self.sizes)
        options = "".join(f"-{name}={value}" for name, value in self.options)
        return f"{self.op}-{self.dtype}-{self.index}-{self.layout}-{sizes}{options}"

    @classmethod
    def from_id(cls, text: str) -> "Case":
        op, dtype, index, layout, sizes, *options = text.split("-")
        pairs = [pair.split("=") for pair in sizes.split(",")]
        return cls(
            op,
            dtype,
            index,
            layout,
            tuple((letter, int(size)) for letter, size in pairs),
            tuple((name, _option(value)) for name, value in (o.split("=") for o in options)),
        )

    def size(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    def shape(self, argument: str) -> tuple[int, ...]:
        """Sizes of a floating-point argument."""
        letters = SHAPES[self.op][argument]
        if dict(self.options).get(f"transpose_{argument[0]}"):
            letters = (letters[0], letters[2], letters[1])
        return tuple(self.size(letter) for letter in letters)


def case(
    op: str, dtype: str, index: str, layout: str, sizes: dict[str, int], **options: Any
) -> Case:
    """A case from plain dictionaries."""
    return Case(op, dtype, index, layout, tuple(sizes.items()), tuple(options.items()))


def standard_cases(op: str, sizes: dict[str, int], **options: Any) -> list[Case]:
    """The cases that every operator must pass: ``sizes`` holds all letters but U and B."""
    cases = [
        case(op, dtype, index, layout, {"U": 5, "B": 47, **sizes}, **options)
        for dtype in DTYPES
        for index in INDEX_PATTERNS
        for layout in LAYOUTS
    ]
    for num_users, num_candidates in ((7, 7), (4, 280), (1, 13), (1, 1), (6, 1), (3, 0)):
        batch = {"U": num_users, "B": num_candidates}
        cases += [
            case(op, dtype, "shuffled", "contiguous", {**batch, **sizes}, **options)
            for dtype in DTYPES
        ]
    return cases


def generator_of(this: Case) -> torch.Generator:
    """A generator seeded by the case's id."""
    return torch.Generator().manual_seed(zlib.crc32(this.id.encode()))


def make_inputs(this: Case, device: str = "cpu") -> dict[str, Any]:
    """The arguments of one call by name: float tensors, ``cand_to_user``, then the options.

    Users without candidates are NaN, unless the operator has a result for each user.
    Two options are none of the operators': ``parts`` makes ``e_cand`` a list of so many views,
    ``packed`` makes ``k`` and ``v`` packed histories of mixed lengths.
    """
    generator = generator_of(this)
    num_users, num_candidates = this.size("U"), this.size("B")
    pattern = INDEX_PATTERNS[this.index]
    cand_to_user = pattern(num_users, num_candidates, generator).to(torch.int32)
    idle = torch.ones(num_users, dtype=torch.bool)
    idle[cand_to_user.long()] = False
    arguments: dict[str, Any] = {}
    for name, letters in SHAPES[this.op].items():
        shape = this.shape(name)
        # Weights keep the sum near 1, so that one scale of error fits all sizes.
        width = math.sqrt(shape[-1]) if name.startswith("w_") and shape[-1] else 1.0
        value = torch.randn(shape, generator=generator, dtype=torch.float64) / width
        if letters[0] == "U" and this.op != "self_target_attention":
            value[idle] = math.nan
        arguments[name] = in_layout(value.to(DTYPES[this.dtype]), this.layout).to(device)
    arguments["cand_to_user"] = in_layout(cand_to_user, this.layout).to(device)
    options = dict(this.options)
    if "parts" in options:
        arguments["e_cand"] = in_parts(arguments["e_cand"], options.pop("parts"))
    if options.pop("packed", False):
        offsets = history_offsets(num_users, this.size("S"), generator)
        for name in ("k", "v"):
            arguments[name] = in_layout(packed(arguments[name].cpu(), offsets), this.layout)
            arguments[name] = arguments[name].to(device)
        arguments["user_offsets"] = in_layout(offsets, this.layout).to(device)
    return {**arguments, **options}


def history_offsets(num_users: int, longest: int, generator: torch.Generator) -> Tensor:
    """``user_offsets`` of histories of random lengths, 0, 1 and ``longest`` among them."""
    lengths = torch.randint(longest + 1, (num_users,), generator=generator)
    for first, length in enumerate((longest, 0, min(1, longest))):
        lengths[first::5] = length
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def packed(histories: Tensor, user_offsets: Tensor) -> Tensor:
    """The first rows of histories ``[U, S, ...]`` one after the other, then NaN: no user's rows."""
    rows = [history[:n] for history, n in zip(histories, user_offsets.diff(), strict=True)]
    return torch.cat([*rows, histories.new_full((3, *histories.shape[2:]), math.nan)])


def in_parts(e_cand: Tensor, num_parts: int) -> list[Tensor]:
    """Views of ``[B, K_cand, N]`` along K_cand: the first of one row, the last with the rest."""
    rows = e_cand.size(1)
    width = max(1, rows // num_parts)
    bounds = [min(rows, 1 + width * i) for i in range(num_parts - 1)]
    return list(e_cand.tensor_split(bounds, dim=1))


def in_layout(value: Tensor, layout: str) -> Tensor:
    """A copy of ``value`` in memory as the layout says, NaN (or -1) around it."""
    if layout == "contiguous" or value.dim() == 0:
        return value.contiguous()
    filler = math.nan if value.is_floating_point() else -1
    if layout == "transposed" and value.dim() > 1:
        return in_layout(value.mT, "padded").mT
    padded = value.new_full((*value.shape[:-1], value.size(-1) + 3), filler)
    padded[..., 1:-2] = value
    return padded[..., 1:-2]


def _option(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
