"""Saves on a torch that lacks private names."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from nostall import _torch
from programs.entry_points import (
    async_save_in_thread,
    group_state,
    loaded_wrong,
    queue_persistent,
    save,
)
from support.states import blobs


def a_torch_that_lacks_the_rest_saves_the_same(out: Path) -> dict[str, list[str]]:
    """Differences from stock, by path, after two saves in each of three ways. Collective."""
    _torch._foreach_copy = None
    _torch._get_default_store = None
    _torch.without_modes = nullcontext
    _torch.KNOWS_DTENSORS = False
    wrong = {}
    for seed in (1, 2):
        stock = out / f"stock-{seed}"
        dcp.save(group_state(seed), storage_writer=FileSystemWriter(stock))
        for way in (save, async_save_in_thread, queue_persistent):
            path = out / f"{way.__name__}-{seed}"
            way(path, group_state(seed))
            dist.barrier()
            found = loaded_wrong(path, group_state(seed), group_state(seed))
            found += ["bytes differ"] * (blobs(path) != blobs(stock))
            if found:
                wrong[path.name] = found
    return wrong
