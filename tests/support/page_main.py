"""Run the programs of documentation pages: ``page_main.py RANKS:PROGRAM...``, each a file.

Each rank of each program is a process, forked when torch is already loaded, as loading it takes
much longer than most programs. Ranks get the environment that torchrun gives them.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

# Loaded once, for all forked processes; steps of optimizers import the former.
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401  # as said

from support.ending import end

TIMEOUT_S = 60


def main() -> None:
    """Run all programs, and write the exit status of each rank to a file beside it."""
    for argument in sys.argv[1:]:
        ranks, _, name = argument.partition(":")
        program, world = Path(name).resolve(), environment(int(ranks))
        processes = []
        for rank in range(int(ranks)):
            pid = os.fork()
            if pid == 0:
                os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
                end(run(program, log=program.with_suffix(f".{rank}.log")))
            processes.append(pid)
        for rank, pid in enumerate(processes):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            program.with_suffix(f".{rank}.status").write_text(str(status))


def environment(ranks: int) -> dict[str, str]:
    """Environment variables of all ranks of a program; none if there is only one rank."""
    if ranks == 1:
        return {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run(program: Path, log: Path) -> int:
    """Run one program in its directory; what it prints goes to a file."""
    with log.open("a") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    directory = program.with_suffix("")
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    sys.argv = [str(program)]
    sys.path[0] = str(directory)
    try:
        runpy.run_path(str(program), run_name="__main__")
    except BaseException:  # as an interpreter ends
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
