"""A manager of two ranks; see ``tests/manager/test_manager_in_s3.py``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nostall import CheckpointManager, KeepLatest


def save_and_restore(out: Path, root: str) -> tuple[int, bool]:
    """Three steps; the one that is restored, and whether its values are those that were saved."""
    del out
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = dist.group.WORLD
    state = {"x": distribute_tensor(torch.arange(1000.0), mesh, [Shard(0)])}
    with CheckpointManager(root, keep=KeepLatest(2), process_group=group) as manager:
        for step in range(3):
            manager.save(step, state)
            state["x"].add_(1)
        manager.wait()
        found = {"x": distribute_tensor(torch.zeros(1000), mesh, [Shard(0)])}
        restored = manager.restore(found)
    assert restored is not None
    return restored.step, torch.equal(found["x"].full_tensor(), torch.arange(1000.0) + 1 + 1)
