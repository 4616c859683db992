"""State dicts and comparisons that tests share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


def small_state(seed: int = 0) -> dict[str, Any]:
    """A few tensors of different kinds, nested, with objects between them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, 33, generator=generator)
    return {
        "weight": weight,
        "view": torch.randn(100, generator=generator)[10:20],
        "transposed": torch.randn(30, 40, generator=generator).t(),
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "nested": {"list": [torch.full((3,), seed), {"epoch": seed}], "name": f"seed {seed}"},
    }


def schedule(
    queue: AsyncCallsQueue,
    path: Path,
    state: dict[str, Any],
    *,
    planner: SavePlanner | None = None,
    cache: CheckpointMetadataCache | None = None,
    group: dist.ProcessGroup | None = None,
    kind: type[FileSystemWriterAsync] = FileSystemWriterAsync,
    **options: Any,
) -> int:
    """One split save through a queue, as a framework does it; returns the call index."""
    writer = kind(path, **options)
    planned = save_state_dict_async_plan(
        state,
        writer,
        group,
        0,
        planner=planner or DefaultSavePlanner(),
        enable_cache=cache is not None,
        metadata_cache=cache,
    )
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    request = AsyncRequest(
        save_fn, args, [lambda: save_state_dict_async_finalize(*planned)], {}, preload_fn
    )
    return queue.schedule_async_request(request)


def read_metadata(path: Path) -> Metadata:
    """A checkpoint's metadata, read the stock way."""
    with open(path / ".metadata", "rb") as stream:
        metadata = pickle.load(stream)
    assert isinstance(metadata, Metadata)
    return metadata


def blobs(path: Path) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Every item's bytes in a checkpoint, by name and offset."""
    content = {}
    for index, info in read_metadata(path).storage_data.items():
        with open(path / info.relative_path, "rb") as stream:
            stream.seek(info.offset)
            content[index.fqn, tuple(index.offset or ())] = stream.read(info.length)
    return content
