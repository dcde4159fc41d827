# SPDX-License-Identifier: Apache-2.0
"""The operators: typed, documented calls. Each lies in a module with its fake and its gradient.

Shapes use the glossary letters: U users, B candidates, M output rows, N embedding width, K_user and
K_cand input rows. ``cand_to_user`` is always int32 ``[B]`` with values in ``[0, U)``, in any order;
a user may have any number of candidates, also none.
"""

from ikbo._bmm import bmm
from ikbo._expand import expand
from ikbo._lce import lce
from ikbo._linear import linear
from ikbo._prepack import prepack
from ikbo._self_target_attention import self_target_attention
from ikbo._target_attention import target_attention

__all__ = [
    "bmm",
    "expand",
    "lce",
    "linear",
    "prepack",
    "self_target_attention",
    "target_attention",
]
