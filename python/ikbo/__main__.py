# SPDX-License-Identifier: Apache-2.0
"""`python -m ikbo`: the command line."""

import sys

from ikbo.cli import main

sys.exit(main())
