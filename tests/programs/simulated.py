"""Real ranks that save what ``python -m benchmarks ranks`` simulates, and what they exchange."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import nostall
from programs.planning import collectives

_ROWS, _COLUMNS = 4, 64


@contextmanager
def lengths() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends up, and that each gets from the coordinator."""
    seen = {"up": 0, "down": 0}
    gather, broadcast = dist.gather_object, dist.broadcast_object_list
    scatter = dist.scatter_object_list
    unpickle: Callable[..., Any] = distributed_c10d._tensor_to_object

    def gathering(**options: Any) -> Any:
        seen["up"] += len(pickle.dumps(options["obj"]))
        return gather(**options)

    def scattering(**options: Any) -> Any:
        given = options["scatter_object_input_list"] or ()
        seen["down"] += max((len(pickle.dumps(each)) for each in given), default=0)
        return scatter(**options)

    def broadcasting(**options: Any) -> Any:
        def arriving(tensor: torch.Tensor, nbytes: int, *more: Any) -> Any:
            seen["down"] += int(nbytes)
            return unpickle(tensor, nbytes, *more)

        # Metadata is sent as a note once; pickled again, here, it would be whole.
        with patch.object(distributed_c10d, "_tensor_to_object", arriving):
            broadcast(**options)

    with (
        patch.object(dist, "gather_object", gathering),
        patch.object(dist, "scatter_object_list", scattering),
        patch.object(dist, "broadcast_object_list", broadcasting),
    ):
        yield seen


def exchanged(out: Path, items: str) -> dict[str, Any]:
    """By way and save: collectives, and lengths of what is sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(_ROWS * dist.get_world_size(), _COLUMNS)
    layers = {
        f"layers.{number}.weight": distribute_tensor(whole, mesh, [Shard(0)])
        for number in range(int(items))
    }
    found: dict[str, Any] = {}
    for way in ("stock", "nostall SavePlanner"):
        for number in range(3):
            path = out / f"{way} {number}"
            writer: dcp.StorageWriter
            planner: SavePlanner
            if way == "stock":
                writer, planner = dcp.FileSystemWriter(path), dcp.DefaultSavePlanner()
            else:
                writer, planner = nostall.FileSystemWriterAsync(path), nostall.SavePlanner()
            with collectives() as said, lengths() as sent:
                dcp.save({"model": layers}, storage_writer=writer, planner=planner)
            sent["collectives"] = sum(said.values())
            found.setdefault(way, {})["later" if number else "first"] = sent
    for by_save in found.values():
        for of_save in by_save.values():
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, of_save["down"])
            of_save["down"] = of_ranks[0] + max(of_ranks[1:])
    return found
