# SPDX-License-Identifier: Apache-2.0
"""Models of public libraries, unmodified, at sizes of the field; `bench.bench_models` runs them."""
