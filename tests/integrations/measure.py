"""Print how long a framework's saves and ours block training, side by side.

python tests/integrations/measure.py accelerate|lightning|torchtitan
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(framework: str) -> None:
    from support.blocked import report
    from support.ranks import run_ranks

    with tempfile.TemporaryDirectory(dir=".") as directory:
        out = Path(directory).resolve()
        if framework == "lightning":
            from programs.lightning_saves import measure_files

            warnings.simplefilter("ignore")
            report("one device, 96 MiB", measure_files(out))
        ranks = run_ranks(2, f"{framework}_saves:measure", out, timeout_s=1200)
        report("two ranks, FSDP2, 48 MiB each", ranks[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
