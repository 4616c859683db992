"""Identical faults for nostall's writer and for stock's, and what is left of the checkpoint.

No function of either is replaced: files meet a size limit, processes are killed with SIGKILL at
events of the interpreter's audit log. What was committed before is full of ones, what is saved then
of twos.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from nostall.filesystem_async import FileSystemWriterAsync
from support.states import save_now

State = dict[str, Any]
Aftermath = dict[str, str]
"""``ended``: how the save did, ``found``: what is in the directory."""

WRITERS: dict[str, type[FileSystemWriter]] = {
    "nostall": FileSystemWriterAsync,
    "stock": FileSystemWriter,
}
OLD, NEW = 1, 2
LIMIT_NBYTES = 1 << 20
ATTEMPTS = 2
"""Which of stock's threads gets the file that fails is up to the scheduler."""


def state_of(seed: int) -> State:
    """One file of it is larger than the limit, if there are several."""
    tensors = {"large": 3 * LIMIT_NBYTES // 4, "middle": 30_000, "small": 5_000, "tiny": 7}
    return {
        **{name: torch.full((length,), float(seed)) for name, length in tensors.items()},
        "epoch": seed,
    }


def two_tensors(seed: int) -> State:
    return {name: torch.full((100,), float(seed)) for name in ("one", "other")}


def found_in(path: Path, template: State) -> str:
    """Result of a resume with stock's ``dcp.load``: one save, a mixture, an error, or nothing."""
    if not (path / ".metadata").exists():
        return "none"
    try:
        dcp.load(template, checkpoint_id=path, no_dist=True)
    except CheckpointException:
        return "unreadable"
    values: set[int] = set()
    for value in template.values():
        values.update(map(int, torch.as_tensor(value).unique()))
    if len(values) > 1:
        return "mixture"
    return {OLD: "old", NEW: "new"}[values.pop()]


def aftermath(path: Path, run: Callable[[], None], template: State) -> Aftermath:
    """How a process of its own ends, which returns, raises, or is killed, and what it leaves."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except CheckpointException:
            code = 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = {0: "returned", 2: "raised", -signal.SIGKILL: "killed"}[code]
    return {"ended": ended, "found": found_in(path, template)}


def limited(kind: str, path: Path, *, overwritten: bool, thread_count: int) -> Aftermath:
    """No file may be larger than a limit, which one of the new ones would have to be."""
    save = partial(save_now, path, kind=WRITERS[kind], thread_count=thread_count)

    def run() -> None:
        if overwritten:
            save(state_of(OLD))
        limits = (LIMIT_NBYTES, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save(state_of(NEW))

    return aftermath(path, run, state_of(0))


def killed_before(path: Path, number: int) -> None:
    """From now on SIGKILL ends this process just before its n-th change in a directory."""
    left = number
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        if not str(arguments[0]).startswith(str(path)):
            return
        if event == "open" and not arguments[2] & writing:
            return
        if left <= 0:  # threads may have counted at the same time
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


def killed_at_every_step(kind: str, out: Path) -> list[Aftermath]:
    """SIGKILL before the first change of an overwriting save, the second, ...; the last is done."""
    found: list[Aftermath] = []
    while not found or found[-1]["ended"] == "killed":
        path = out / f"{len(found)}"

        def run(path: Path = path, number: int = len(found)) -> None:
            save = partial(save_now, path, kind=WRITERS[kind], single_file_per_rank=False)
            save(two_tensors(OLD))
            killed_before(path, number)
            save(two_tensors(NEW))

        found.append(aftermath(path, run, two_tensors(0)))
    return found


def main(out: Path) -> None:
    """Print what came of every fault, by writer; of several threads' more than once."""
    torch.set_num_threads(1)  # children are forked from this process, which must not have threads
    # Lets torch import here, and not in every child.
    save_now(out / "imports", two_tensors(0), kind=FileSystemWriter)
    found = {
        kind: {
            "one file of four fails": [
                limited(kind, out / kind / f"fresh {n}", overwritten=False, thread_count=4)
                for n in range(ATTEMPTS)
            ],
            "one file of four fails while overwriting": [
                limited(kind, out / kind / f"overwritten {n}", overwritten=True, thread_count=4)
                for n in range(ATTEMPTS)
            ],
            "the only file fails while overwriting": [
                limited(kind, out / kind / "one", overwritten=True, thread_count=1)
            ],
            "killed at every step of overwriting": killed_at_every_step(kind, out / kind),
        }
        for kind in WRITERS
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
