"""Saves of two ranks whose operations on storage are written down, each rank's for itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import nostall
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from support.crashes import Disk, recorded
from support.faults import Fault, inject
from support.states import planned

LENGTH = 3000


def share_of(rank: int, seed: int) -> dict[str, Any]:
    """The state that one rank saves."""
    return {f"of rank {rank}": torch.full((LENGTH,), float(seed)), "epoch": seed}


def by_save(path: Path, seed: int) -> None:
    """``dcp.save``. Collective."""
    dcp.save(share_of(dist.get_rank(), seed), storage_writer=FileSystemWriterAsync(path))


def by_split(path: Path, seed: int) -> None:
    """The split functions; the request runs in this process as in the writer. Collective."""
    planned(path, share_of(dist.get_rank(), seed))[1].execute_sync()


WAYS: dict[str, Callable[[Path, int], None]] = {"save": by_save, "split": by_split}
PLACES = {"new": False, "overwritten": True}


def everything(out: Path) -> None:
    """Each way to save, over nothing and over a checkpoint; rank 1's storage is slow. Collective.

    Leaves ``before.pickle``, the disk before the save, and ``rank-N.pickle``, the operations of
    each rank.
    """
    nostall.configure(EngineOptions(chunk_nbytes=8192, io_threads=1))
    rank = dist.get_rank()
    for way, save in WAYS.items():
        for place, overwritten in PLACES.items():
            here = out / f"{way}-{place}"
            if rank == 0:
                (here / "root").mkdir(parents=True)
            dist.barrier()
            if overwritten:
                save(here / "root" / "checkpoint", 1)
            dist.barrier()
            if rank == 0:
                (here / "before.pickle").write_bytes(pickle.dumps(Disk.holding(here / "root")))
            dist.barrier()
            # A coordinator that did not wait for the second rank would be seen to publish before
            # it.
            slow = [Fault.delay("fsync", 0.1)] if rank == 1 else []
            with inject(*slow), recorded() as operations:
                save(here / "root" / "checkpoint", 2)
            (here / f"rank-{rank}.pickle").write_bytes(pickle.dumps(operations))
            dist.barrier()
