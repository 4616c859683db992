"""One rank of ``mounted_saves.py``: obeys JSON objects on its input, answers on its output."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import nostall
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from support.processes import descendants, open_files
from support.states import begin_async, schedule
from support.waiting import wait_until

_FLOATS = 300_000
_CLOSING_S = 10.0
_LEFT_BEHIND = ("nostall-storage", "nostall-writer", "nostall-io")

_KNOWN = CheckpointMetadataCache()
"""Cache for all saves whose structure is to be recognised."""


def _state(rank: int, seed: int) -> dict[str, Any]:
    """The state of a rank: several chunks of a tensor, a small and a shared one, and an object."""
    return {
        f"rank{rank}.weight": torch.randn(
            _FLOATS, generator=torch.Generator().manual_seed(seed * 2 + rank)
        ),
        f"rank{rank}.step": torch.tensor(seed),
        "shared": torch.full((1000,), float(seed)),
        f"rank{rank}.object": {"seed": seed},
    }


def _save(how: str, path: Path, seed: int) -> None:
    state = _state(dist.get_rank(), seed)
    match how:
        case "dcp.save":
            dcp.save(state, storage_writer=FileSystemWriterAsync(path))
        case "dcp.async_save":
            begin_async(FileSystemWriterAsync(path), state).result()
        case "split" | "split, known":
            cache = _KNOWN if how == "split, known" else None
            with AsyncCallsQueue() as queue:
                schedule(queue, path, state, cache=cache)
                queue.maybe_finalize_async_calls(blocking=True)


def _save_and_tell(how: str, path: str, seed: int) -> dict[str, Any]:
    began_s = time.monotonic()
    error = None
    try:
        _save(how, Path(path), seed)
    except (Exception, CheckpointException) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - began_s}


def _content(path: str) -> int | str | None:
    """The seed of what stock loads from there; else what is wrong, or ``None`` for nothing."""
    if not os.path.exists(f"{path}/.metadata"):
        return None
    try:
        with open(f"{path}/.metadata", "rb") as file:
            metadata: Metadata = pickle.load(file)
        loaded: dict[str, Any] = {
            name: torch.full(tuple(item.size), -1, dtype=item.properties.dtype)
            if isinstance(item, TensorStorageMetadata)
            else {"seed": -1}
            for name, item in metadata.state_dict_metadata.items()
        }
        dcp.load(loaded, storage_reader=FileSystemReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    seed = int(loaded["rank0.step"])
    for rank in range(dist.get_world_size()):
        for name, value in _state(rank, seed).items():
            if isinstance(value, torch.Tensor):
                found = loaded.get(name)
                if not isinstance(found, torch.Tensor) or not torch.equal(found, value):
                    return f"a mixture: {name} is not that of seed {seed}"
    return seed


def _settle(mount: str) -> dict[str, Any]:
    """Wait for what was left, and return what these processes still have open below the mount."""

    def is_quiet() -> bool:
        return not any(thread.name.startswith(_LEFT_BEHIND) for thread in threading.enumerate())

    wait_until(is_quiet)
    gc.collect()
    deadline_s = time.monotonic() + _CLOSING_S
    while (held := _held(mount)) and time.monotonic() < deadline_s:
        os.sched_yield()  # the writer process closes what was removed when it has the time
    return {"held": held}


def _held(mount: str) -> list[str]:
    pids = (os.getpid(), *descendants())
    return [f"{pid}: {file}" for pid in pids for file in open_files(pid) if file.startswith(mount)]


def main(rank: str, world_size: str, meeting: str, mount: str, options: str) -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)  # for who wants to know where it is stuck
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    nostall.configure(EngineOptions(**json.loads(options)))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=60),
    )
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        match request.pop("do"):
            case "save":
                answer = _save_and_tell(**request)
            case "content":
                answer = _content(**request)
            case _:
                answer = _settle(mount)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
