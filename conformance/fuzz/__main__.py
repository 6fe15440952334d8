"""`python -m conformance.fuzz`."""

from __future__ import annotations

import sys

from conformance.fuzz.cli import main

if __name__ == "__main__":
    sys.exit(main())
