"""Ranks of gloo whose state is on one device, which they share: saves off it and loads onto it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import nostall
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from programs.entry_points import differing, leaves
from support.states import begin_async, schedule

State = dict[str, Any]
SAVES = 5
"""Enough to reach the steady state."""
SHAPE = (1024, 1024)


def state_of(version: int, device: str, mesh: DeviceMesh, *, blank: bool = False) -> State:
    """Tensors that all ranks have, slices of one, and one of this rank alone."""
    rank, count = dist.get_rank(), dist.get_world_size()

    def made(seed: int) -> torch.Tensor:
        if blank:
            return torch.zeros(SHAPE, device=device)
        generator = torch.Generator().manual_seed(1000 * version + seed)
        return torch.randn(SHAPE, generator=generator).to(device)

    return {
        **{f"replicated.{number}": made(number) for number in range(4)},
        "half": made(10).to(torch.bfloat16),
        "sharded": DTensor.from_local(made(20).chunk(count)[rank], mesh, [Shard(0)]),
        f"own.{rank}": made(30 + rank),
        "step": torch.tensor(0.0 if blank else float(version), device=device),
    }


def advance(state: State) -> None:
    """A step, of which kernels are still to run when this returns."""
    for _, value in leaves(state):
        value.add_(1)


def wrongly_loaded(path: Path, version: int, device: str, mesh: DeviceMesh) -> list[str]:
    """Tensors that differ from a version, by load: stock's, and nostall's together and alone."""
    expected = state_of(version, device, mesh)
    wrong = []
    for load in ("stock", "reader", "load", "load once"):
        found = state_of(version, device, mesh, blank=True)
        if load == "stock":
            dcp.load(found, checkpoint_id=path)
        elif load == "reader":
            dcp.load(found, storage_reader=nostall.FileSystemReader(path))
        else:
            once = load == "load once"
            nostall.load(found, path, process_group=dist.group.WORLD, read_once=once)
        wrong += [f"{load}: {name}" for name in differing(found, expected)]
    return wrong


def everything(out: Path, device: str) -> dict[str, list[str]]:
    """Save as frameworks do, both ways, and load each checkpoint; what differs."""
    torch.ones(3, device=device)  # the mesh takes the device in use, or else that of its own number
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    wrong = {}
    with AsyncCallsQueue() as queue:
        for staging in ("blocking", "overlapped"):
            for number in range(SAVES):
                state = state_of(number, device, mesh)
                path = out / f"{staging}-{number}"
                schedule(queue, path, state, staging=staging)
                if staging == "overlapped":
                    nostall.wait_staged()
                advance(state)
                while queue.get_num_unfinalized_calls():
                    queue.maybe_finalize_async_calls()
                wrong[path.name] = wrongly_loaded(path, number, device, mesh)
    for number in range(SAVES):
        state = state_of(number, device, mesh)
        path = out / f"async-{number}"
        saving = begin_async(FileSystemWriterAsync(path), state)
        advance(state)
        saving.result()
        wrong[path.name] = wrongly_loaded(path, number, device, mesh)
    return wrong
