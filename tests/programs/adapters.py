"""Scenarios, on ranks, for the parts that adapters share."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall.errors import NostallError
from nostall.integrations import _saves
from nostall.integrations._saves import DirectorySaves, Saves
from nostall.integrity import is_complete
from nostall.options import EngineOptions
from nostall.removal import remove_checkpoint
from support.faults import Fault, inject
from support.waiting import HangingOs, wait_until


def before_commit(out: Path) -> dict[str, Any]:
    """A function before the commit fails on rank 0; the next saves succeed, without a poll."""

    def fail() -> None:
        raise OSError("cannot write beside it")

    saves = Saves(remove_checkpoint)
    message = ""
    state = {f"weight {dist.get_rank()}": torch.ones(10)}
    saves.save(dict(state), str(out / "first"), before_commit=fail)
    try:
        saves.poll(wait=True)
    except (CheckpointException, OSError) as error:
        message = str(error)
    threads: list[Any] = []
    for name in ("second", "third", "fourth", "fifth"):
        saves.poll(wait=True)
        saves.save(
            dict(state), str(out / name), before_commit=lambda: threads.append(current_thread())
        )
    wait_until(lambda: is_complete(out / "fifth"))  # nobody polls
    saves.poll(wait=True)
    calls = len(threads)
    full = [Fault.errno("chunk", errno.ENOSPC)] if dist.get_rank() == 1 else []
    with inject(*full), suppress(CheckpointException):
        saves.save(state, str(out / "fifth"), before_commit=lambda: threads.append(None))
        saves.poll(wait=True)
    saves.close()
    names = ("first", "second", "third", "fourth", "fifth")
    return {
        "message": message,
        "committed": [name for name in names if is_complete(out / name)],
        "calls": calls,
        "calls though a rank failed": len(threads) - calls,
        "on the training thread": main_thread() is threads[calls - 1] if calls else False,
    }


def save_directory(
    saves: DirectorySaves,
    path: Path,
    step: int,
    during: Callable[[Path], None] | None = None,
) -> None:
    """Save a model, an optimizer and a file, full of the step, as a framework does.

    ``during`` is called with the directory of the run while the checkpoint is written.
    """
    weight = torch.full((100,), float(step))
    with saves.save(str(path), str(path.parent)) as directory:
        for part in ("model", "optimizer"):
            writer = dcp.FileSystemWriter(Path(directory, part))
            dcp.save({part: weight}, storage_writer=writer)
        Path(directory, "step").write_text(str(step))
        if during is not None:
            during(path.parent)
    weight.zero_()


def commit_directory(
    saves: DirectorySaves,
    path: Path,
    step: int,
    during: Callable[[Path], None] | None = None,
) -> None:
    """Save like :func:`save_directory`, and poll until it has its name: a wait has a deadline."""
    save_directory(saves, path, step, during)

    def is_committed() -> bool:
        saves.poll()
        with suppress(FileNotFoundError):
            return (path / "step").read_text() == str(step)
        return False

    wait_until(is_committed)


def replaced(out: Path, before: str) -> None:
    """The process is killed before a rename of a directory while a checkpoint is replaced."""
    saves = DirectorySaves(None)
    save_directory(saves, out / "last", 1)
    saves.poll(wait=True)
    renamed = 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal renamed
        if event == "os.rename" and os.path.isdir(arguments[0]):
            renamed += 1
            if renamed == int(before):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    save_directory(saves, out / "last", 2)
    saves.poll(wait=True)


def troubled_directories(out: Path, what: str) -> dict[str, Any]:
    """Storage refuses something on one rank, or hangs; then the next save is made."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    saves, path, is_first = DirectorySaves(None), out / "run" / "last", dist.get_rank() == 0
    commit_directory(saves, path, 1)
    storage = HangingOs("rename", "_saving-last/last")
    if is_first and what == "making":
        (out / "run" / "_saving-last").write_text("a file")

    def interfere(run: Path) -> None:
        if is_first and what == "replacing":
            (run / "_saving-last" / "_replaced" / "other").mkdir(parents=True)
        if not is_first and what == "fsync":
            (run / "_saving-last" / "last" / "rng_state_1.pth").symlink_to("nowhere")

    with patch.object(_saves, "os", storage if is_first and what == "publishing" else os):
        try:
            facts = _failure_of(partial(commit_directory, saves, path, 2, interfere))
        finally:
            storage.answer()
    assert what == "publishing" or (path / "step").read_text() == "1"
    if is_first and what == "making":
        (out / "run" / "_saving-last").unlink()
    commit_directory(saves, path, 3)
    saves.close()
    return facts


def _failure_of(save: Callable[[], None]) -> dict[str, Any]:
    """The error that a save raises, with its place and code; empty if it raises none."""
    try:
        save()
    except NostallError as error:
        found: BaseException = error
    except CheckpointException as error:
        ((found, _),) = error.failures.values()
    else:
        return {}
    names = ("rank", "phase", "path", "errno")
    return {"kind": type(found).__name__, **{name: getattr(found, name, None) for name in names}}
