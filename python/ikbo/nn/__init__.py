# SPDX-License-Identifier: Apache-2.0
"""Modules for models that are written with users and candidates apart.

Each module holds the parameters of its plain counterpart under the same names, so that weights
move between the two with `load_state_dict`, and computes what the counterpart computes on user rows
repeated for every candidate. Inputs of users have U rows, inputs of candidates B rows; the index is
a `ikbo.CandidateIndex` or its tensor `cand_to_user`.
"""

from ikbo.nn.attention import SelfTargetAttention, TargetAttention
from ikbo.nn.linear import Expand, Linear, LinearCompression

__all__ = ["Expand", "Linear", "LinearCompression", "SelfTargetAttention", "TargetAttention"]
