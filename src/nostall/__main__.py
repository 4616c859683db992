"""``python -m nostall``."""

from __future__ import annotations

import sys

from nostall.cli import main

if __name__ == "__main__":
    sys.exit(main())
