# SPDX-License-Identifier: Apache-2.0
"""The rules: one function per rewrite, found by the ATen operator that it treats.

A rule takes the walk and its operator's own arguments, tensors as forms, and returns the result as
a form, or None where it does not apply. Whatever no rule takes runs at U if it is user-only and
row-wise, else at B. `materialise(rule(op, forms)) == op(materialise(forms))` holds for each.
"""

from ikbo.transform.rules import (  # noqa: F401  (importing a family registers its rules)
    affine,
    attention,
    chains,
    crosses,
    dead_rows,
    gains,
    indexed,
    linear,
    masked,
    norms,
    pairs,
    picks,
    reduce,
    reshape,
    slicing,
    structural,
)
from ikbo.transform.rules.registry import RULES, rule, rules_of

__all__ = ["RULES", "rule", "rules_of"]
