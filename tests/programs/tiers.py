"""Programs for two ranks that save through a local tier."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import nostall
from nostall.filesystem_async import FileSystemWriterAsync


def save_and_wait(out: Path) -> None:
    """Three steps; the coordinator has the handle, and verifies each destination."""
    rank = dist.get_rank()
    for step in range(3):
        path = out / f"step-{step}"
        writer = FileSystemWriterAsync(path, local_staging_dir=out / "tier")
        dcp.save({f"w{rank}": torch.full((1000,), float(step))}, storage_writer=writer)
        assert (writer.promotion is None) == (rank != 0)
        if writer.promotion is not None:
            writer.promotion.result(60)
        dist.barrier()
        assert nostall.verify(path).ok
        found = {"w0": torch.zeros(1000), "w1": torch.zeros(1000)}
        dcp.load(found, checkpoint_id=path)
        assert all(torch.equal(each, torch.full((1000,), float(step))) for each in found.values())


class OutOfSight(FileSystemWriterAsync):
    """A writer whose files the coordinator does not see, as in the tier of another host."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write them, and move them away."""
        results = super().write_data(plan, planner)
        (directory,) = Path(self._own.local_staging_dir or "").iterdir()
        for each in directory.glob("__1_*"):
            each.unlink()
        return results


def save_out_of_sight(out: Path) -> str:
    """Rank 1 writes to a tier of its own; the error's text."""
    rank = dist.get_rank()
    kind = OutOfSight if rank else FileSystemWriterAsync
    writer = kind(out / "far", local_staging_dir=out / "tier")
    try:
        dcp.save({f"w{rank}": torch.zeros(10)}, storage_writer=writer)
    except CheckpointException as error:
        assert not (out / "far").exists()
        return str(error)
    raise AssertionError("the save succeeded")
