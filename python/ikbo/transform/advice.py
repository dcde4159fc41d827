# SPDX-License-Identifier: Apache-2.0
"""What the author of a model could change where a user value had to be broadcast."""

from __future__ import annotations

import re

# From what a reason says to the change that removes it; the first that fits.
_CHANGES = (
    (
        r"split would cost more",
        "Nothing, if runs are as small as that; with more candidates per user (ratio=) the split "
        "is made.",
    ),
    (
        r"not known to treat each row of the batch alone",
        "Rows of the batch meet here, or may: work along another axis than the batch (dim=1, not "
        "dim=0), or write it with operators that treat each row alone.",
    ),
    (
        r"the model returns it for every candidate",
        "The value is the same for all candidates of a user: leave it out of the model's results, "
        "or return it from a model of the user's inputs alone.",
    ),
    (
        r"a product of a user and a candidate value",
        "Sum or project the product right away, (user * cand).sum(-1) or a linear layer over it, "
        "or make the user's value narrower before it.",
    ),
    (
        r"products of user and candidate fields",
        "Let a linear layer, or a convolution of the fields, read the outer products directly.",
    ),
    (
        r"a gain differs from candidate to candidate",
        "Gate the user's and the candidate's features apart, or let a linear layer follow the gate "
        "directly.",
    ),
    (
        r"a norm over user and candidate features",
        "Let a linear layer follow the norm directly, or norm the user's and the candidate's "
        "features apart.",
    ),
    (
        r"cat reads it whole",
        "Concatenate along the axis of the features, and let a linear layer read the result.",
    ),
    (
        r"scores mix user and candidate tokens",
        "Let the mask be a constant of the model in which rows of the history see no candidate "
        "(causal, candidates last), or attend to the user's tokens and to the candidate's apart.",
    ),
    (
        r"(conv|max_pool|avg_pool|fold|interpolate|grid_sampl)",
        "A window spans features of both sides here: convolve or pool the user's and the "
        "candidate's features apart.",
    ),
    (
        r"(softmax|cumsum|cumprod|sort|topk|argsort|argmax|argmin)\b.* mixes user and candidate",
        "All values along this axis are needed at once: apply it to the user's and the candidate's "
        "part apart, or reduce the user's part first.",
    ),
    (
        r"(linear|mm|matmul|bmm|baddbmm|einsum|dot)\b.* mixes user and candidate",
        "The product reads values that are mixed already: keep users and candidates apart up to "
        "here, joined by cat alone, so that it splits.",
    ),
    (
        r" mixes user and candidate values",
        "User and candidate meet here value by value: move what needs the user alone before this "
        "line, and make the user's value narrow (a linear layer) before they meet.",
    ),
)
_ELSE = "Compute what needs the user alone in expressions of its own before this line."


def advice_for(reason: str) -> str:
    """The change that would remove a reason of `Walk.broadcasts`."""
    return next((text for pattern, text in _CHANGES if re.search(pattern, reason)), _ELSE)
