"""Programs for two ranks that save through a local tier."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import nostall
from nostall._tier import promotions
from nostall.core import AsyncCallsQueue
from nostall.errors import DamagedCheckpointError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from support.states import names, schedule


def assert_holds(path: Path, step: int) -> None:
    """Every byte is as it was written, and stock loads the values of the step on all ranks."""
    assert nostall.verify(path).ok
    found = {"w0": torch.zeros(1000), "w1": torch.zeros(1000)}
    dcp.load(found, checkpoint_id=path)
    assert all(torch.equal(each, torch.full((1000,), float(step))) for each in found.values())


def save_steps(out: Path, disk: str) -> None:
    """Steps have directories or overwrite one; the tier is shared, or each rank's own."""
    rank, is_shared = dist.get_rank(), disk == "shared"
    tier = out / ("disk" if is_shared else f"disk-{rank}")
    for step in range(6):
        path = out / ("last" if step % 2 else f"step-{step}")
        writer = FileSystemWriterAsync(path, local_staging_dir=tier, local_staging_shared=is_shared)
        dcp.save({f"w{rank}": torch.full((1000,), float(step))}, storage_writer=writer)
        assert (writer.promotion is None) == (rank != 0)
        if writer.promotion is not None:
            writer.promotion.result(60)
        dist.barrier()
        assert_holds(path, step)
        made = [each.partition("-")[0] for each in names(path)]
        assert made == [".metadata", "__0_0", "__1_0"]
        # The coordinator keeps the newest whole; the last one may be removed in a moment.
        kept = list(tier.glob(f"*/__{rank}_*"))
        assert is_shared or len(kept) <= 2, kept
    promotions.close()  # the next program has its own


def split_saves_by_rank(out: Path) -> None:
    """Known structures, several in progress."""
    rank = dist.get_rank()
    queue, cache = AsyncCallsQueue(), CheckpointMetadataCache()
    for step in range(5):
        own = {"local_staging_dir": out / f"disk-{rank}", "local_staging_shared": False}
        state = {f"w{rank}": torch.full((1000,), float(step))}
        path = out / f"step-{step}"
        schedule(queue, path, state, cache=cache, local_staging_limit=9, **own)
        queue.wait(60)
    for promotion in promotions._missing():
        promotion.result(60)
    dist.barrier()
    for step in range(5):
        assert nostall.verify(out / f"step-{step}").ok
    queue.close()


def _save_to_own_disk(out: Path) -> Path:
    """The tier of this rank, which has its part of a checkpoint; it cannot be promoted yet."""
    rank, far = dist.get_rank(), out / "far"
    tier = out / f"disk-{rank}"
    far.write_text("in the way")
    writer = FileSystemWriterAsync(far / "step", local_staging_dir=tier, local_staging_shared=False)
    dcp.save({f"w{rank}": torch.full((1000,), 1.0)}, storage_writer=writer)
    return tier


def save_by_rank_and_die(out: Path) -> None:
    """Both ranks end, with all their processes, when the save is committed on their disks."""
    _save_to_own_disk(out)
    dist.barrier()
    for process in psutil.Process().children():
        process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def save_with_a_damaged_part(out: Path) -> str:
    """A file of rank 1 is changed on its disk before it is copied; what each rank is told."""
    rank, tier = dist.get_rank(), _save_to_own_disk(out)
    if rank == 1:
        (file,) = tier.glob("*/__1_*")
        content = bytearray(file.read_bytes())
        content[2000] ^= 1
        file.write_bytes(content)
    (promotion,) = promotions._missing()
    dist.barrier()
    if rank == 0:
        (out / "far").unlink()
    try:
        promotion.result(60)
    except DamagedCheckpointError as error:
        dist.barrier()
        promotions.close()  # or this process would end with a failure
        assert not (out / "far" / "step" / ".metadata").exists()
        return str(error)
    raise AssertionError("it was promoted")


class OutOfSight(FileSystemWriterAsync):
    """A writer whose files the coordinator does not see, as in the tier of another host."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        directory = Path(self._rank_save.settings.directory)
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
