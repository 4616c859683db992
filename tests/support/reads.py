"""Loads of states, and files that tell how they are read or have another bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import nostall
from nostall import filesystem_reader
from nostall._storage.port import Source
from nostall._storage.posix import PosixStorage
from support.states import save_stock_way


def empty_like(value: Any) -> Any:
    """A state of the same structure, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    return [empty_like(each) for each in value] if isinstance(value, list) else None


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Whether states are equal bit by bit; of DTensors, the local part."""
    if isinstance(one, DTensor):
        return same(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def save(path: Path, state: dict[str, Any], who: str = "nostall") -> None:
    """One save, by stock's writer if asked for."""
    if who == "stock":
        save_stock_way(path, state)
    else:
        writer = nostall.FileSystemWriterAsync(path, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


def load(
    state: dict[str, Any], path: Path, planner: dcp.DefaultLoadPlanner | None = None, **options: Any
) -> None:
    reader = nostall.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


def error_of(state: dict[str, Any], path: Path, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(state, path, **options)
    error: BaseException = caught.value.failures[0][0]
    return error


@contextmanager
def flipped(file: Path, at: int) -> Iterator[None]:
    """One bit of a file is another one."""
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[at] ^= 1
    file.write_bytes(damaged)
    try:
        yield
    finally:
        file.write_bytes(content)


@contextmanager
def read_through(wrap: Callable[[Source], Source]) -> Iterator[None]:
    """Shard files are read through something else in the block."""

    class Files(PosixStorage):
        def open(self, name: str) -> Any:
            source = super().open(name)
            return wrap(source) if name.endswith(".distcp") else source

    with patch.multiple(filesystem_reader, PosixStorage=Files, UncachedFiles=Files):
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """The lengths of all reads of shard files in the block."""
    counts: list[int] = []
    with read_through(lambda source: CountedSource(source, counts)):
        yield counts


class CountedSource:
    """A file that adds the length of each read to a list."""

    def __init__(self, source: Source, lengths: list[int]) -> None:
        self._source, self._lengths = source, lengths
        self.stat = source.stat

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = self._source.read_into(offset, *memories)
        self._lengths.append(nbytes)
        return nbytes

    def close(self) -> None:
        self._source.close()
