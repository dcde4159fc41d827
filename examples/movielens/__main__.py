# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.movielens`, from the repository's root: the demo."""

import sys

from examples.movielens.demo import main

sys.exit(main())
