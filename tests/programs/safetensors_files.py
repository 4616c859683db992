"""Ranks that save parts of tensors as safetensors; see ``tests/save/test_safetensors_files.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import nostall
from nostall.core import AsyncCallsQueue
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from support.states import begin_async, schedule

State = dict[str, Any]
FORM = SerializationFormat.SAFETENSORS


def whole() -> State:
    """The unsharded state, equal on all ranks."""
    torch.manual_seed(1)
    return {
        "rows": torch.randn(301, 700),
        "few": torch.arange(3, dtype=torch.bfloat16),
        "bytes": torch.arange(60, dtype=torch.uint8).reshape(12, 5),
        "flags": torch.tensor([[True, False], [False, False]]),
    }


def sharded(state: State, dimension: int) -> State:
    """Parts along a dimension, or along the only one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(each.clone(), mesh, [Shard(min(dimension, each.ndim - 1))])
        for name, each in state.items()
    }


def _files(path: Path) -> list[tuple[Any, bytes]]:
    found = []
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        found.append((json.loads(content[8:end]), content[end:]))
    return found


def _save_split(path: Path, state: State) -> None:
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(4):  # from the third on, the structure is known
            at = path if number == 3 else path.with_name(f"{path.name}-{number}")
            schedule(queue, at, state, cache=cache, serialization_format=FORM)
            queue.maybe_finalize_async_calls(blocking=True)


WAYS: dict[str, Callable[[Path, State], None]] = {
    "dcp.save": lambda path, state: dcp.save(
        state, storage_writer=FileSystemWriterAsync(path, serialization_format=FORM)
    ),
    "dcp.async_save": lambda path, state: begin_async(
        FileSystemWriterAsync(path, serialization_format=FORM), state
    ).result(60),
    "split": _save_split,
}


def everything(out: Path) -> list[str]:
    state, wrong = whole(), []
    stock = HuggingFaceStorageWriter(str(out / "stock"), save_distributed=True)
    dcp.save(sharded(state, 0), storage_writer=stock)
    for name, way in WAYS.items():
        path = out / name
        way(path, sharded(state, 0))
        dist.barrier()
        if _files(path) != _files(out / "stock"):
            wrong.append(f"{name}: other files than stock's")
        if not nostall.verify(path).ok:
            wrong.append(f"{name}: damaged")
    path = out / "split"
    readers: dict[str, Any] = {
        "stock": HuggingFaceStorageReader(str(path)),
        "nostall": nostall.FileSystemReader(path),
        "nostall, together": nostall.FileSystemReader(path, process_group=dist.group.WORLD),
    }
    for who, reader in readers.items():
        found = sharded({each: torch.zeros_like(value) for each, value in state.items()}, 1)
        dcp.load(found, storage_reader=reader)
        wrong += [
            f"read by {who}: {each}"
            for each, value in state.items()
            if not torch.equal(found[each].full_tensor(), value)
        ]
    floats = {name: each for name, each in state.items() if each.is_floating_point()}
    WAYS["dcp.save"](out / "floats", sharded(floats, 0))
    if dist.get_rank() == 0 and not _is_consolidated(out / "floats", floats):
        wrong.append("not consolidated")
    return wrong


def _is_consolidated(path: Path, state: State) -> bool:
    """Whether torch makes files of whole tensors, as it does with floating-point ones."""
    target = path.with_name(f"{path.name}, whole")
    target.mkdir()
    consolidate_safetensors_files(str(path), str(target), dict.fromkeys(state, 1))
    (file,) = target.glob("*.safetensors")
    found = safetensors.torch.load_file(file)
    return all(torch.equal(found[name], each) for name, each in state.items())
