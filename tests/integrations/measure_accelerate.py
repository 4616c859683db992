"""Print how long sharded saves block training: the Trainer's, Accelerate's, nostall's for both."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    from support.blocked import report
    from support.ranks import run_ranks

    with tempfile.TemporaryDirectory(dir=".") as directory:
        out = Path(directory).resolve()
        ranks = run_ranks(2, "accelerate_saves:measure", out, timeout_s=1200)
        report("two ranks, FSDP2, 48 MiB each", ranks[0])


if __name__ == "__main__":
    main()
