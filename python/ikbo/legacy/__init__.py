# SPDX-License-Identifier: Apache-2.0
"""Recorded requests with user rows repeated: which columns are the user's, and taking them apart.

Rows are compared bit by bit, so that NaN equals itself and 0 does not equal -0.
"""

from ikbo.legacy.deduplicate import SharedBatch, deduplicate
from ikbo.legacy.find import Finding, Proposal, find_request_only

__all__ = ["Finding", "Proposal", "SharedBatch", "deduplicate", "find_request_only"]
