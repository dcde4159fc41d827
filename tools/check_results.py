# SPDX-License-Identifier: Apache-2.0
"""Lists the files of bench/results/ whose sources changed since they were measured."""

from __future__ import annotations

import sys

from ikbo.testing.bench import stale_results


def main() -> int:
    stale = stale_results()
    for line in stale:
        print(line)
    print(f"results: {len(stale)} stale" if stale else "results: all are current")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
