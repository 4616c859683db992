"""The script of each rank: programs in turn, see ``ranks.run_ranks`` and ``on_ranks``."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from nostall import _engine
from support.ending import end

NOT_MET = "a rank has not met the others"
"""Printed if no rank's program has begun."""
HANGS_AFTER_S = 250.0
"""The stacks of a program that takes longer are printed, and it ends."""
WHOLE_END = "RANKS_HAVE_A_WHOLE_END"
"""In the environment: the program is about the end of the interpreter."""


def main() -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    # Before there is a group: torch.distributed.checkpoint imports modules that bind the default
    # group as it is then as arguments of theirs. Such a group outlives destroy_process_group() with
    # its threads, and one of those that frees a tensor's Python object while the interpreter is
    # ending aborts the process.
    programs = []
    for program, out, *args in json.loads(sys.argv[1]):
        module, function = program.split(":")
        run = getattr(importlib.import_module(f"programs.{module}"), function)
        programs.append((run, out, args))
    try:
        dist.init_process_group("gloo")
        dist.barrier()
    except BaseException:
        print(NOT_MET, flush=True)
        raise
    first = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for number, (run, out, args) in enumerate(programs):
        if number:  # with an engine and a group of its own
            _engine.reset()
            store = dist.PrefixStore(f"program {number}", first)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            dist.barrier()  # a rank that destroys it fails others that are still connecting
            faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
        Path(out).mkdir(parents=True, exist_ok=True)
        result = run(Path(out), *args)
        (Path(out) / f"result-{rank}.json").write_text(json.dumps(result))
        gc.collect()  # of whatever else still holds the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    if not os.environ.get(WHOLE_END):
        end()
