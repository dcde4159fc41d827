# SPDX-License-Identifier: Apache-2.0
"""The error of the pass."""


class TransformError(RuntimeError):
    """The model cannot be transformed; the text names the operator, its source line and the fix."""
