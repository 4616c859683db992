"""What torchrun starts on each rank: see ``ranks.run_ranks``."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    program, out, *args = sys.argv[1:]
    module, function = program.split(":")
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(f"programs.{module}"), function)(Path(out), *args)
    (Path(out) / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
