# SPDX-License-Identifier: Apache-2.0
"""What `bench.bench_serve` measures with: programs in C++, and how they are driven."""
