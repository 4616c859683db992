"""Counts the modules and functions of nostall that one save or load runs through.

    python reach.py DIRECTORY

In one process, on the trainer's side. Each path runs once to import what it needs, and is counted
when it runs again. Prints a line per path: its name, modules, functions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall import AsyncCallsQueue, CheckpointManager, FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from support.states import begin_async, schedule

SOURCE = f"{Path(nostall.__file__).parent}/"


@contextmanager
def profiled() -> Iterator[set[tuple[str, str]]]:
    """Collect module and qualified name of each function of nostall that is called."""
    called = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(SOURCE):
            called.add((code.co_filename, f"{code.co_firstlineno} {code.co_name}"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def state() -> dict[str, Any]:
    return {"model": {f"w{each}": torch.ones(64, 64) for each in range(8)}, "step": 3}


def paths(root: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each path with its name; a path without one only prepares the next."""
    cache, queue = CheckpointMetadataCache(), AsyncCallsQueue()

    def split(number: int) -> None:
        schedule(queue, f"{root}/split-{number}", state(), cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)

    def background() -> None:
        begin_async(FileSystemWriterAsync(f"{root}/a"), state()).result()

    def manage() -> None:
        with CheckpointManager(f"{root}/steps", save_every=1) as manager:
            manager.save(1, {"model": torch.nn.Linear(16, 4)})
            manager.wait()

    yield "split save, first", lambda: split(0)
    for number in (1, 2, 3):
        yield "", partial(split, number)
    yield "split save, steady", lambda: split(4)
    yield "dcp.async_save", background
    yield "dcp.save", lambda: dcp.save(state(), storage_writer=FileSystemWriterAsync(f"{root}/b"))
    yield "nostall.load", lambda: nostall.load(state(), f"{root}/b")
    yield "manager.save", manage
    queue.close()


def main(directory: str) -> None:
    for _, path in paths(f"{directory}/first"):
        path()
    for name, path in paths(f"{directory}/second"):
        with profiled() as called:
            path()
        if name:
            print(name, len({file for file, _ in called}), len(called), sep="; ")


if __name__ == "__main__":
    main(*sys.argv[1:])
