"""Print how long Lightning's saves and ours block training, side by side."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    from programs.lightning_saves import measure_files
    from support.blocked import report
    from support.ranks import run_ranks

    warnings.simplefilter("ignore")
    wanted = sys.argv[1:] or ["file", "shards"]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        out = Path(directory).resolve()
        if "file" in wanted:
            report("one device, 96 MiB", measure_files(out))
        if "shards" in wanted:
            ranks = run_ranks(2, "lightning_saves:measure_shards", out, timeout_s=600)
            report("two ranks, FSDP2, 48 MiB each", ranks[0])


if __name__ == "__main__":
    main()
