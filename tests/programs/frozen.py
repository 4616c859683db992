"""Saves of sharded frozen tensors; see ``tests/save/test_frozen.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nostall.core import AsyncCallsQueue
from nostall.state_dict_saver import CheckpointMetadataCache
from support.states import schedule


def save_and_load(out: Path) -> tuple[bool, list[bool]]:
    """Three saves; whether the last one is loaded bitwise, and which have linked a file."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    values = {"base": torch.randn(64, 500), "adapter": torch.randn(64, 4)}
    state: dict[str, Any] = {
        name: distribute_tensor(value.clone(), mesh, [Shard(0)]) for name, value in values.items()
    }
    name = f"frozen__{dist.get_rank()}_1.distcp"
    cache, linked = CheckpointMetadataCache(), []
    with AsyncCallsQueue() as queue:
        for step in range(3):
            schedule(queue, out / f"step-{step}", state, cache=cache, frozen="base")
            queue.maybe_finalize_async_calls(blocking=True)
            linked.append((out / f"step-{step}" / name).stat().st_nlink > 1)
            with torch.no_grad():
                state["adapter"].add_(1)
            dist.barrier()
    found = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])
        for name, value in values.items()
    }
    dcp.load(found, checkpoint_id=out / "step-2")
    wanted = {"base": values["base"], "adapter": values["adapter"] + 1 + 1}
    return all(torch.equal(found[each].full_tensor(), wanted[each]) for each in wanted), linked
