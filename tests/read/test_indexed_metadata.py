"""Readers unpickle the metadata of a checkpoint with an index only when it is needed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pickletools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

import nostall
from nostall._describe import description, lazy
from nostall.errors import DamagedCheckpointError
from support.waiting import DEADLINE_S

T = TypeVar("T")
READERS = [nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader]


def state() -> dict[str, Any]:
    """A tensor in a dictionary, and an object."""
    return {"model": {"weight": torch.arange(6.0)}, "epoch": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with an index."""
    path = tmp_path / "checkpoint"
    dcp.save(state(), storage_writer=nostall.FileSystemWriterAsync(path), no_dist=True)
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
        lambda metadata: pickle.loads(pickle.dumps(metadata)),
    ],
)
def test_a_copy_is_plain_metadata_with_what_the_caller_has_set(checkpoint: Path, twin: Any) -> None:
    """Neither of them knows of nostall, and the pickle does not undo a change."""
    metadata = nostall.FileSystemReader(checkpoint).read_metadata()
    metadata.version = "own"
    metadata.state_dict_metadata["more"] = BytesStorageMetadata()
    made = twin(metadata)
    assert type(made) is Metadata
    assert made.version == "own"
    assert "more" in made.state_dict_metadata
    assert made.planner_data == dcp.FileSystemReader(checkpoint).read_metadata().planner_data
    assert dataclasses.fields(metadata) == dataclasses.fields(Metadata)


def test_a_pickle_of_metadata_does_not_name_nostall(checkpoint: Path) -> None:
    """Processes without nostall can unpickle it; every protocol."""
    for protocol in range(2, 6):
        metadata = nostall.FileSystemReader(checkpoint).read_metadata()
        pickled = pickle.dumps(metadata, protocol)
        named = [str(argument) for _, argument, _ in pickletools.genops(pickled)]
        assert not [name for name in named if name.startswith("nostall.")]


def test_callers_of_the_cache_do_not_see_the_changes_of_others(checkpoint: Path) -> None:
    """Each gets entries, places and the rest of its own."""
    reader = nostall.CachedMetadataFileSystemReader(checkpoint)
    one, other = reader.read_metadata(), reader.read_metadata()
    entry: Any = one.state_dict_metadata["model.weight"]
    entry.properties.requires_grad = True
    entry.chunks.clear()
    for place in one.storage_data.values():
        place.offset += 1
    one.planner_data.clear()
    one.storage_meta = StorageMeta(save_id="another")
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    for metadata in (other, reader.read_metadata()):
        assert metadata.state_dict_metadata == stock.state_dict_metadata
        assert metadata.storage_data == stock.storage_data
        assert metadata.planner_data == stock.planner_data
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.save_id != "another"


def at_each_line_of(path: Path) -> Iterator[Callable[[Callable[[], T], Callable[[], object]], T]]:
    """Run one function with another at each line of what the first executes in a module."""
    happened = True
    number = 0
    while happened:
        happened, number = False, number + 1

        def run(first: Callable[[], T], other: Callable[[], object], at: int = number) -> T:
            left = at

            def trace(frame: FrameType, event: str, _: object) -> Any:
                nonlocal left, happened
                if frame.f_code.co_filename != str(path):
                    return None
                if event == "line":
                    left -= 1
                    if left == 0:
                        happened = True
                        sys.settrace(None)
                        with ThreadPoolExecutor(1) as thread:
                            thread.submit(other).result()
                return trace

            def traced() -> T:
                sys.settrace(trace)
                try:
                    return first()
                finally:
                    sys.settrace(None)

            with ThreadPoolExecutor(1) as thread:
                return thread.submit(traced).result()

        yield run


@pytest.mark.parametrize("module", [description, lazy])
def test_another_thread_may_unpickle_at_any_moment(checkpoint: Path, module: ModuleType) -> None:
    """Readers of the cached metadata share a description, whose pickle is read and made once."""
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    runs = 0
    for run in at_each_line_of(Path(str(module.__file__))):
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()
        reader = nostall.CachedMetadataFileSystemReader(checkpoint)
        reader.read_metadata()
        one, other = reader.read_metadata(), reader.read_metadata()
        of = attrgetter("planner_data")
        assert run(partial(of, one), partial(of, other)) == stock.planner_data
        assert other.planner_data == stock.planner_data
        assert one == other
        runs += 1
    assert runs > 5


def test_threads_look_into_one_description_at_the_same_time(checkpoint: Path) -> None:
    """``nostall.load`` of several threads: each sees the items that stock's reader sees."""
    stock = dcp.FileSystemReader(checkpoint).read_metadata()
    for _ in range(20):
        nostall.CachedMetadataFileSystemReader.clear_metadata_cache()
        nostall.CachedMetadataFileSystemReader(checkpoint).read_metadata()
        start = threading.Barrier(4)

        def look(start: threading.Barrier = start) -> None:
            reader = nostall.CachedMetadataFileSystemReader(checkpoint)
            start.wait(DEADLINE_S)
            shared = reader.shared_metadata()
            assert dict(shared.state_dict_metadata) == stock.state_dict_metadata
            assert dict(shared.storage_data) == stock.storage_data
            assert reader.read_metadata().planner_data == stock.planner_data

        with ThreadPoolExecutor(4) as threads:
            for each in [threads.submit(look) for _ in range(4)]:
                each.result()


def test_metadata_may_be_written_anew(checkpoint: Path) -> None:
    """By a program that renames items: both readers read its pickle."""
    metadata = nostall.FileSystemReader(checkpoint).read_metadata()
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    entries["renamed"] = entries.pop("model.weight")
    for index in [index for index in places if index.fqn == "model.weight"]:
        places[dataclasses.replace(index, fqn="renamed")] = places.pop(index)
    metadata.planner_data = {"renamed": ("renamed",), "epoch": ("epoch",)}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    for reader in (dcp.FileSystemReader, nostall.FileSystemReader):
        loaded = {"renamed": torch.zeros(6)}
        dcp.load(loaded, storage_reader=reader(checkpoint), no_dist=True)
        assert loaded["renamed"].tolist() == list(range(6))
