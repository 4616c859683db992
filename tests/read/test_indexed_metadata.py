"""Readers unpickle the metadata of a checkpoint with an index only when it is needed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import nostall
from nostall._commit import description
from nostall.errors import DamagedCheckpointError

T = TypeVar("T")
READERS = [nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    state = {"model": {"weight": torch.arange(6.0)}, "epoch": 3}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)
    return path


@pytest.fixture
def broken(checkpoint: Path) -> Path:
    """A checkpoint with an index, whose pickle cannot be read."""
    file = checkpoint / ".metadata"
    content = file.read_bytes()
    end = content.index(b"\n#nostall-index")
    file.write_bytes(bytes(end) + content[end:])
    return checkpoint


@pytest.mark.parametrize("reader", READERS)
def test_a_load_does_not_unpickle(broken: Path, reader: Any) -> None:
    """``dcp.load`` needs names, sizes and places, which the index has."""
    loaded: dict[str, Any] = {"model": {"weight": torch.zeros(6)}, "epoch": 0}
    dcp.load(loaded, storage_reader=reader(broken), no_dist=True)
    assert loaded["model"]["weight"].tolist() == list(range(6))
    assert loaded["epoch"] == 3
    loaded = {"model": {"weight": torch.zeros(6)}, "epoch": 0}
    nostall.load(loaded, broken)
    assert loaded["model"]["weight"].tolist() == list(range(6))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["planner_data", "storage_meta", "version", "all_local_plans"])
def test_a_damaged_pickle_is_an_error_when_it_is_needed(
    broken: Path, reader: Any, name: str
) -> None:
    """The error names the file."""
    metadata = reader(broken).read_metadata()
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata"):
        getattr(metadata, name)


@pytest.mark.parametrize("reader", READERS)
def test_metadata_is_what_stock_reads(checkpoint: Path, reader: Any) -> None:
    """All attributes, but the number that each reader gives to its load."""
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    own = reader(checkpoint)
    metadata = own.read_metadata()
    assert isinstance(metadata, Metadata)
    assert metadata.storage_meta is not None
    assert stock.storage_meta is not None
    assert metadata.storage_meta.load_id == own.load_id
    stock.storage_meta.load_id = own.load_id
    assert metadata == stock
    assert stock == own.read_metadata()
    assert vars(metadata) == vars(stock)
    assert not hasattr(metadata, "anything")


@pytest.mark.parametrize(
    "twin",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        *(partial(pickle.dumps, protocol=number) for number in range(2, 6)),
    ],
)
def test_a_copy_is_plain_metadata_with_what_the_caller_has_set(checkpoint: Path, twin: Any) -> None:
    """Neither it nor a pickle knows of nostall, which other processes may not have."""
    metadata = nostall.FileSystemReader(checkpoint).read_metadata()
    metadata.version = "own"
    metadata.state_dict_metadata["more"] = BytesStorageMetadata()
    made = twin(metadata)
    if isinstance(made, bytes):
        assert b"nostall." not in made
        made = pickle.loads(made)
    assert type(made) is Metadata
    assert made.version == "own"
    assert "more" in made.state_dict_metadata
    assert made.planner_data == dcp.FileSystemReader(checkpoint).read_metadata().planner_data
    assert dataclasses.fields(metadata) == dataclasses.fields(Metadata)


def in_a_thread(run: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def at_each_line_of(
    module: ModuleType, make: Callable[[], tuple[Callable[[], T], Callable[[], T]]]
) -> Iterator[list[T]]:
    """Results of two functions, one of them run at each line that the other has in a module."""
    for number in count(1):
        (one, other), left = make(), number
        found: list[T] = []

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != module.__file__:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    found.append(in_a_thread(other))  # noqa: B023  # it has run when these change
            return trace

        def traced() -> T:
            sys.settrace(trace)  # the same
            try:
                return one()  # noqa: B023  # the same
            finally:
                sys.settrace(None)

        yield [in_a_thread(traced), *found]
        if left > 0:
            return


def items_of(reader: Any) -> Any:
    shared = reader.shared_metadata()
    return dict(shared.state_dict_metadata), dict(shared.storage_data)


@pytest.mark.parametrize("of", [lambda reader: reader.read_metadata().planner_data, items_of])
def test_another_thread_may_read_at_any_moment(checkpoint: Path, of: Callable[[Any], Any]) -> None:
    """Readers of the cached metadata share a description, whose parts are made once."""
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    expected = stock.planner_data, (stock.state_dict_metadata, stock.storage_data)

    def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()
        nostall.CachedMetadataFileSystemReader(checkpoint).read_metadata()
        one, other = (nostall.CachedMetadataFileSystemReader(checkpoint) for _ in range(2))
        return partial(of, one), partial(of, other)

    found = list(at_each_line_of(description, make))
    assert all(each in expected for both in found for each in both)
    assert len(found) > 5
