# SPDX-License-Identifier: Apache-2.0
"""Where rules are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[..., Any]

# Per ATen operator, the rules to try, in order of registration but for those that come first.
RULES: dict[Any, list[Rule]] = {}


def rule(*targets: Any, first: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for the given ATen operators; `first` puts it before the others."""

    def register(function: Rule) -> Rule:
        for target in targets:
            rules = RULES.setdefault(target, [])
            rules.insert(0 if first else len(rules), function)
        return function

    return register


def rules_of(target: Any) -> list[Rule]:
    return RULES.get(target, [])
