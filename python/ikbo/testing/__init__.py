# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks share: cases and inputs, comparison, cost formulas, timers."""
