"""State dicts and comparisons that tests share."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

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


def planned(
    path: Path | str,
    state: dict[str, Any],
    *,
    planner: SavePlanner | None = None,
    cache: CheckpointMetadataCache | None = None,
    group: dist.ProcessGroup | None = None,
    kind: type[FileSystemWriterAsync] = FileSystemWriterAsync,
    before: Sequence[Callable[[], Any]] = (),
    after: Sequence[Callable[[], Any]] = (),
    **options: Any,
) -> tuple[FileSystemWriterAsync, AsyncRequest]:
    """A split save as frameworks plan it, with functions around its commit: writer and request."""
    writer = kind(path, **options)
    plan = save_state_dict_async_plan(
        state,
        writer,
        group,
        0,
        planner=planner or DefaultSavePlanner(),
        enable_cache=cache is not None,
        metadata_cache=cache,
    )
    save_fn, preload_fn, args = writer.get_save_function_and_args()
    commit: Callable[[], Any] = partial(save_state_dict_async_finalize, *plan)
    return writer, AsyncRequest(save_fn, args, [*before, commit, *after], {}, preload_fn)


def schedule(
    queue: AsyncCallsQueue, path: Path | str, state: dict[str, Any], **options: Any
) -> int:
    """One split save through a queue, with options of :func:`planned`; returns the call index."""
    return queue.schedule_async_request(planned(path, state, **options)[1])


def save_now(
    path: Path | str,
    state: dict[str, Any],
    *,
    planner: SavePlanner | None = None,
    kind: type[dcp.FileSystemWriter] = FileSystemWriterAsync,
    **options: Any,
) -> None:
    dcp.save(state, storage_writer=kind(path, **options), planner=planner, no_dist=True)


def begin_async(writer: dcp.StorageWriter, state: dict[str, Any], **options: Any) -> Future[Any]:
    """Begin a save by ``dcp.async_save``; done when it is committed."""
    response = dcp.async_save(state, storage_writer=writer, **options)
    return response if isinstance(response, Future) else response.upload_completion


def save_async(
    writer: FileSystemWriterAsync, state: dict[str, Any], planner: SavePlanner | None = None
) -> None:
    """One save by ``dcp.async_save``, waited for."""
    begin_async(writer, state, planner=planner, no_dist=True).result(60)


def save_in_background(
    path: Path, state: dict[str, Any], *, planner: SavePlanner | None = None, **options: Any
) -> None:
    """One ``dcp.async_save`` by a writer with these options, awaited."""
    save_async(FileSystemWriterAsync(path, **options), state, planner)


def save_split(path: Path, state: dict[str, Any], **options: Any) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, state, **options)


WAYS: dict[str, Callable[..., None]] = {
    "dcp.save": save_now,
    "dcp.async_save": save_in_background,
    "dcp.async_save, staged in place": save_in_background,
    "dcp.async_save, overlapped": partial(save_in_background, staging="overlapped"),
    "split": save_split,
    "split, overlapped": partial(save_split, staging="overlapped"),
}
"""Every way to save, in an order: ``dcp.async_save`` stages a second save in place."""
PLAIN_WAYS = {"save": save_now, "async_save": save_in_background, "split save": save_split}
"""One of each kind."""


def save_stock_way(
    path: Path, state: dict[str, Any], *, planner: SavePlanner | None = None, **options: Any
) -> None:
    """One save by stock's writer, as without an accelerator: with one, it sorts tensors by size."""
    writer = dcp.FileSystemWriter(path, sync_files=False, **options)
    with patch.object(torch.cuda, "is_available", return_value=False):
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def local_values(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of this rank's parts."""
    own = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return [each.detach().clone() for each in own]


def all_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def names(path: Path) -> list[str]:
    """Names in a directory; none if it does not exist."""
    return sorted(os.listdir(path)) if path.exists() else []


def shard_files(path: Path) -> dict[str, bytes]:
    """Content of a checkpoint's files but the metadata, by name."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".metadata"}


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


def blobs_by_stock(path: Path, state: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """Every item's bytes in a checkpoint that stock's writer makes."""
    save_stock_way(path, state)
    return blobs(path)
