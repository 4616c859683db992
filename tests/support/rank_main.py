"""What torchrun starts on each rank: see ``ranks.run_ranks``."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from support.ending import end

NOT_MET = "a rank has not met the others"
"""Printed if this rank's program has not begun."""
WHOLE_END = "RANKS_HAVE_A_WHOLE_END"
"""In the environment: the program is about the end of the interpreter."""


def main() -> None:
    faulthandler.dump_traceback_later(90, exit=True)
    program, out, *args = sys.argv[1:]
    module, function = program.split(":")
    # Before there is a group: torch.distributed.checkpoint imports modules that bind the default
    # group as it is then as arguments of theirs. Such a group outlives destroy_process_group() with
    # its threads, and one of those that frees a tensor's Python object while the interpreter is
    # ending aborts the process.
    run = getattr(importlib.import_module(f"programs.{module}"), function)
    try:
        dist.init_process_group("gloo")
    except BaseException:
        print(NOT_MET, flush=True)
        raise
    result = run(Path(out), *args)
    (Path(out) / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    gc.collect()  # of whatever else still holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if not os.environ.get(WHOLE_END):
        end()
