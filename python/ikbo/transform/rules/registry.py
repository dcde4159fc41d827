# SPDX-License-Identifier: Apache-2.0
"""Where rules are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]

# Per ATen operator, the rules to try, in order of registration.
RULES: dict[Any, list[Rule]] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for the given ATen operators."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES.setdefault(target, []).append(function)
        return function

    return register


def rules_of(target: Any) -> list[Rule]:
    return RULES.get(target, [])
