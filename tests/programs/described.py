"""Ranks with different rows of one tensor, which the tensors themselves describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import nostall
from nostall import CheckpointManager, FileSystemWriterAsync
from support.described import (
    HAS_ATTRIBUTES,
    Distributed,
    PartParameter,
    WholeSizePart,
    filled,
    part,
    whole,
    with_attributes,
)
from support.states import begin_async, blobs, read_metadata

ROWS = [((0, 0, 5),), ((5, 0, 3),)]
EVEN = [((0, 0, 4),), ((4, 0, 4),)]
"""Rows of a DTensor whose local tensor describes nothing."""


def _state() -> dict[str, Any]:
    rows = ROWS[dist.get_rank()]
    mesh = init_device_mesh("cpu", (2,))

    def distributed(local: torch.Tensor, kind: Any = None) -> DTensor:
        made = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 6]), stride=(6, 1)
        )
        return kind(made._local_tensor, made._spec, requires_grad=False) if kind else made

    inner: Any = distributed(part(rows))
    inner._local_tensor.rows = rows  # which from_local forgets
    shards = LocalShardsWrapper([filled(rows)], [(rows[0][0], 0)])
    state = {
        "part": part(rows, WholeSizePart),
        "parameter": part(rows, PartParameter),
        "distributed": distributed(filled(EVEN[dist.get_rank()])),
        "distributed subclass": distributed(filled(EVEN[dist.get_rank()]), Distributed),
        "distributed shards": distributed(shards),
    }
    if not torch.__version__.startswith("2.9."):  # whose planner cannot save it with stock, either
        state["distributed part"] = inner
    if HAS_ATTRIBUTES:
        state["attributes"] = with_attributes(filled(rows, padding=1), rows)
    return state


def unequal_parts(out: Path) -> dict[str, Any]:
    dcp.save(_state(), checkpoint_id=out / "stock")
    entries = read_metadata(out / "stock").state_dict_metadata
    different, wrong = [], []
    for way in ("save", "async_save", "async_save again", "overlapped"):
        options: dict[str, Any] = {"staging": way} if way == "overlapped" else {}
        writer = FileSystemWriterAsync(out / way, **options)
        if way == "save":
            dcp.save(_state(), storage_writer=writer)
        else:
            begin_async(writer, _state()).result(60)
        dist.barrier()
        if read_metadata(out / way).state_dict_metadata != entries:
            different.append(f"metadata of {way}")
        if blobs(out / way) != blobs(out / "stock"):
            different.append(f"values of {way}")
        loaded = {name: torch.zeros(8, 6) for name in entries}
        nostall.load(loaded, out / way)
        wrong += [(way, name) for name in loaded if not torch.equal(loaded[name], whole())]
    return {"different": different, "wrong": wrong, "restored": _restored(out / "managed")}


def _restored(root: Path) -> bool:
    """Whether a manager restores parts in a dictionary into new ones."""
    names = ("part", "distributed part", "attributes")
    saved, blank = _state(), _state()
    with CheckpointManager(root) as manager:
        manager.save(1, {"dict": {name: saved[name] for name in names if name in saved}})
    held = {name: blank[name] for name in names if name in blank}
    locals_of = {
        name: each.to_local() if isinstance(each, DTensor) else each.as_subclass(torch.Tensor)
        for name, each in held.items()
    }
    for local in locals_of.values():
        local.zero_()
    CheckpointManager(root).restore({"dict": held})
    rows = ROWS[dist.get_rank()]
    expected = filled(rows)
    return all(torch.equal(local[: rows[0][2]], expected) for local in locals_of.values())
