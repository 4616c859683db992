"""Saves of two ranks, some of which fail, and what they leave."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nostall._storage import posix
from nostall.filesystem_async import FileSystemWriterAsync
from support.crashes import RecordingOs
from support.faults import Fault, inject
from support.states import begin_async, read_metadata


class Stale(RecordingOs):
    """A host that looked before there was a checkpoint, and sees none until it publishes one."""

    has_published = False

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        self.has_published = True

    def stat(self, path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if not self.has_published and str(path).endswith(".metadata"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return os.stat(path, *args, **kwargs)


def _state(seed: int) -> dict[str, torch.Tensor]:
    return {f"of rank {dist.get_rank()}": torch.full((1000,), float(seed))}


def _save(way: str, path: Path, seed: int) -> bool:
    """Whether it was committed."""
    writer = FileSystemWriterAsync(
        path, staging="overlapped" if way == "overlapped" else "blocking"
    )
    try:
        if way == "save":
            dcp.save(_state(seed), storage_writer=writer)
        else:
            begin_async(writer, _state(seed)).result(60)
    except CheckpointException:
        return False
    return True


def _look(path: Path) -> dict[str, list[str]]:
    """Names of the files in a directory, and of those that its checkpoint consists of."""
    dist.barrier()
    there = sorted(os.listdir(path))
    names: set[str] = set()
    if ".metadata" in there:
        names = {info.relative_path for info in read_metadata(path).storage_data.values()}
    dist.barrier()
    return {"there": there, "named": sorted(names)}


def failing(out: Path) -> dict[str, Any]:
    """Every second commit fails, over nothing and over a checkpoint, in each way of saving."""
    facts: dict[str, Any] = {}
    for way in ("save", "async_save", "overlapped"):
        seen = facts[way] = []
        for number in range(4):
            is_full = dist.get_rank() == 0 and number % 2 == 0
            with inject(*([Fault.errno("publish", errno.ENOSPC)] if is_full else [])):
                committed = _save(way, out / way, number)
            seen.append({"committed": committed, **_look(out / way)})
    return facts


def stale(out: Path) -> dict[str, Any]:
    """The second rank misses the checkpoint that is there, and cannot write; then it can."""
    path = out / "saved"
    _save("save", path, 1)
    before = {name: (path / name).read_bytes().hex() for name in _look(path)["there"]}
    host = patch.object(posix, "os", Stale() if dist.get_rank() == 1 else os)
    full = [Fault.errno("chunk", errno.ENOSPC)] if dist.get_rank() == 1 else []
    with host, inject(*full):
        committed = [_save("save", path, 2)]
    left = _look(path)["there"]
    after = {name: (path / name).read_bytes().hex() for name in before if name in left}
    with host:
        committed.append(_save("save", path, 3))
    return {"kept": after == before, "committed": committed, **_look(path)}


def everything(out: Path) -> dict[str, Any]:
    """Both; ranks start slowly."""
    return {"failing": failing(out / "failing"), "stale": stale(out / "stale")}
