"""Ranks that save DTensors, and other numbers of ranks that load them with other placements."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import nostall

CASES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "small": (torch.float32, (7, 5)),
    "few rows": (torch.bfloat16, (3, 4)),
    "one row": (torch.int64, (1, 9)),
    "vector": (torch.bool, (13,)),
    "large": (torch.float32, (301, 703)),
    "bytes": (torch.uint8, (5, 6, 7)),
}
"""Shapes that no number of ranks divides, some of fewer rows than ranks."""
PLACEMENTS = ("rows", "columns", "both", "replicated")
WRITERS: dict[str, Any] = {
    "nostall": nostall.FileSystemWriterAsync,
    "safetensors": partial(
        nostall.FileSystemWriterAsync, serialization_format=SerializationFormat.SAFETENSORS
    ),
    "stock": dcp.FileSystemWriter,
}


def value(name: str) -> torch.Tensor:
    """A tensor, the same on all ranks."""
    dtype, shape = CASES[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count) % (2 if dtype is torch.bool else 251)).to(dtype).reshape(shape)


class Ranks:
    """The first ranks of all. Collective of all."""

    def __init__(self, count: int) -> None:
        ranks = list(range(count))
        self.count = count
        self.group = dist.new_group(ranks)
        self._line = DeviceMesh("cpu", ranks)
        half = max(1, count // 2)
        self._square = DeviceMesh("cpu", torch.arange(count).reshape(-1, half))

    @property
    def has_this(self) -> bool:
        """Whether this rank is among them."""
        return dist.get_rank() < self.count

    def distributed(self, placement: str, *, blank: bool) -> dict[str, DTensor]:
        """All tensors in one placement, on a mesh of one or two dimensions."""
        found = {}
        for name in CASES:
            whole = torch.zeros_like(value(name)) if blank else value(name)
            last = whole.ndim - 1
            where: dict[str, tuple[DeviceMesh, list[Placement]]] = {
                "rows": (self._line, [Shard(0)]),
                "columns": (self._line, [Shard(last)]),
                "both": (self._square, [Shard(0), Shard(last)]),
                "replicated": (self._square, [Replicate(), Shard(0)]),
            }
            found[name] = distribute_tensor(whole, *where[placement])
        return found


def save(root: Path, ranks: Ranks) -> None:
    """Save every placement, by both writers. Collective."""
    for who, writer in WRITERS.items():
        for placement in PLACEMENTS:
            dcp.save(
                ranks.distributed(placement, blank=False),
                storage_writer=writer(root / f"{who} {placement}", sync_files=False),
                process_group=ranks.group,
            )


def load(root: Path, ranks: Ranks) -> list[str]:
    """Load each checkpoint in another placement, in every way; what was wrong. Collective."""
    wrong, group = [], ranks.group
    readers: dict[str, dict[str, Any]] = {
        "alone": {"verify": "crc"},
        "shared": {"process_group": group},
    }
    for number, (who, placement) in enumerate(itertools.product(WRITERS, PLACEMENTS)):
        path = root / f"{who} {placement}"
        to = PLACEMENTS[(number + number // len(PLACEMENTS) + 1) % len(PLACEMENTS)]
        expected = ranks.distributed(to, blank=False)
        for way in (*readers, "nostall.load", "nostall.load together"):
            loaded: dict[str, Any] = ranks.distributed(to, blank=True)
            if way in readers:
                reader = nostall.FileSystemReader(path, **readers[way])
                dcp.load(loaded, storage_reader=reader, process_group=group)
            elif way == "nostall.load":
                nostall.load(loaded, path)
            else:
                nostall.load(loaded, path, process_group=group, read_once=True)
            wrong += [
                f"{who}, {placement} to {to}, {way}: {name}"
                for name in CASES
                if not torch.equal(loaded[name].to_local(), expected[name].to_local())
            ]
        whole: dict[str, Any] = {name: torch.zeros_like(value(name)) for name in CASES}
        nostall.load(whole, path)
        wrong += [
            f"{who}, {placement} to plain tensors: {name}"
            for name in CASES
            if not torch.equal(whole[name], value(name))
        ]
    return wrong


def everything(out: Path) -> dict[str, list[str]]:
    """Save on some of the ranks and load on others; what was wrong."""
    ranks = {count: Ranks(count) for count in range(1, dist.get_world_size() + 1)}
    found = {}
    for saving, loading in ((4, 2), (2, 4), (3, 1)):
        root = out / f"{saving}"
        if ranks[saving].has_this:
            save(root, ranks[saving])
        dist.barrier()
        if ranks[loading].has_this:
            found[f"from {saving} to {loading}"] = load(root, ranks[loading])
        dist.barrier()
    return found
