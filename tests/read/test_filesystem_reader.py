"""``nostall.FileSystemReader``: what stock's reader hands to a planner, in a fraction of the time.

Stock is the judge: for the same plan, both readers must call the same functions of a planner with
the same tensors.
"""

from __future__ import annotations

import io
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import nostall
from nostall._read.archives import Unusual, require_simple
from nostall._storage.port import Source, between
from nostall.errors import DamagedCheckpointError, OptionError
from programs.streams import Zlib
from support.reads import counted, empty_like, error_of, flipped, load, read_through, same, save
from support.states import read_metadata, save_stock_way


def test_of_a_slice_only_its_rows_are_read(tmp_path: Path) -> None:
    """An eighth of the rows is an eighth of the bytes, plus a few kilobytes."""
    saved, loaded = torch.randn(8 << 10, 256), torch.zeros(8 << 10, 256)
    save(tmp_path, {"x": saved})

    class Slice(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            (item,) = super().create_local_plan().items
            begin, lengths = torch.Size((3 << 10, 0)), torch.Size((1 << 10, 256))
            return LoadPlan([replace(item, storage_offsets=begin, lengths=lengths)])

    with counted() as counts:
        load({"x": loaded}, tmp_path, Slice())
    assert torch.equal(loaded[: 1 << 10], saved[3 << 10 : 4 << 10])
    assert sum(counts) <= (1 << 20) + (32 << 10)


def test_small_items_are_read_together(tmp_path: Path) -> None:
    """A thousand tensors in a few reads, each byte once."""
    state = {f"x{number}": torch.full((64,), number) for number in range(1000)}
    save(tmp_path, state)
    loaded = empty_like(state)
    with counted() as counts:
        load(loaded, tmp_path)
    assert len(counts) <= 10
    assert sum(counts) <= (tmp_path / "__0_0.distcp").stat().st_size
    assert same(loaded, state)


class Turned:
    """A file of which one byte is right only when it is read for the first time."""

    def __init__(self, source: Source, at: int) -> None:
        self._source, self._at, self._times = source, at, 0
        self.stat, self.close = source.stat, source.close

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = self._source.read_into(offset, *memories)
        if offset <= self._at < offset + nbytes:
            self._times += 1
            if self._times > 1:
                (byte,) = between(memories, self._at - offset, self._at - offset + 1)
                byte[0] ^= 0xFF
        return nbytes


@pytest.mark.parametrize("shape", [(20, 30), (300, 400)], ids=["small", "large"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_what_is_compared_is_what_is_loaded(
    tmp_path: Path, shape: tuple[int, int], *, is_plain: bool
) -> None:
    """Also of a tensor that only torch can load: storage may answer otherwise the next time."""
    stored = torch.arange(float(shape[0] * shape[1])).view(shape)
    save(tmp_path, {"x": stored if is_plain else stored.t().contiguous().t()})
    file = tmp_path / "__0_0.distcp"
    values = (stored if is_plain else stored.t()).contiguous().numpy().tobytes()
    at = file.read_bytes().index(values) + len(values) // 2
    loaded = {"x": torch.zeros(shape)}
    with read_through(lambda source: Turned(source, at)):
        load(loaded, tmp_path, verify="crc")
    assert torch.equal(loaded["x"], stored)
    with flipped(file, at):
        error = error_of(loaded, tmp_path, verify="crc")
    assert isinstance(error, DamagedCheckpointError)
    assert "CRC-32" in str(error)


class Recorder(dcp.DefaultLoadPlanner):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []

    def _called(self, what: str, item: ReadItem) -> None:
        self.calls.append((what, item.storage_index.fqn, threading.get_ident()))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._called("load_bytes", read_item)
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        self._called("resolve_tensor", read_item)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._called("commit_tensor", read_item)


def test_the_planner_is_called_as_by_stock(tmp_path: Path) -> None:
    """On the caller's thread, once for each item, each tensor's commit after its resolve."""
    state = {"a": torch.ones(3), "b": 5, "c": torch.ones(700, 800), "d": "x" * 500_000}
    save(tmp_path, state)
    calls = []
    for kind in (nostall.FileSystemReader, dcp.FileSystemReader):
        planner, loaded = Recorder(), empty_like(state)
        dcp.load(loaded, storage_reader=kind(tmp_path), planner=planner, no_dist=True)
        assert same(loaded, state)
        calls.append(planner.calls)
    ours, stock = calls
    assert sorted(ours) == sorted(stock)
    assert {thread for *_, thread in ours} == {threading.get_ident()}
    order = [call[:2] for call in ours]
    for name in ("a", "c"):
        assert order.index(("resolve_tensor", name)) < order.index(("commit_tensor", name))


@pytest.mark.parametrize("descriptors", [40, 3])
def test_many_files_are_not_open_at_once(tmp_path: Path, descriptors: int) -> None:
    """A checkpoint of many more ranks than a process may open files."""
    state = {f"x{number}": torch.full((8,), number) for number in range(400)}
    save_stock_way(tmp_path, state, thread_count=400)
    assert len(list(tmp_path.glob("*.distcp"))) == 400
    loaded = empty_like(state)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + descriptors, hard)
    )
    try:
        load(loaded, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert same(loaded, state)


@pytest.mark.parametrize("extensions", [[], [Zlib()]], ids=["plain", "transformed"])
def test_a_link_that_is_switched_meanwhile_is_followed_once(
    tmp_path: Path, extensions: list[Any]
) -> None:
    """Metadata and values are from one checkpoint; the next load follows the link again."""
    for step in (1, 2):
        writer = dcp.FileSystemWriter(tmp_path / f"{step}", _extensions=extensions)
        state = {"a": torch.full((step,), float(step)), "b": torch.full((100_000,), float(step))}
        dcp.save(state, storage_writer=writer, no_dist=True)
    link = tmp_path / "latest"
    link.symlink_to("1")

    class Switching(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            link.unlink()
            link.symlink_to("2")
            return super().create_local_plan()

    registry = ExtensionRegistry()
    registry.extensions[Zlib.registry_name()] = Zlib
    reader = nostall.FileSystemReader(link)
    reader.transforms = dcp.FileSystemReader(link, _extension_registry=registry).transforms
    for step in (1, 2):
        loaded = {"a": torch.zeros(step), "b": torch.zeros(100_000)}
        dcp.load(loaded, storage_reader=reader, planner=Switching(), no_dist=True)
        assert [value.unique().tolist() for value in loaded.values()] == [[step], [step]]


def test_nothing_is_written_after_an_error(tmp_path: Path) -> None:
    """An error of the planner ends all reads before it is raised, and closes the files."""
    save(tmp_path, {f"x{number}": torch.ones(600, 700) for number in range(8)})

    class Failing(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            raise ZeroDivisionError(read_item.storage_index.fqn)

    before = os.listdir("/proc/self/fd")
    state = {f"x{number}": torch.zeros(600, 700) for number in range(8)}
    assert isinstance(error_of(state, tmp_path, planner=Failing()), ZeroDivisionError)
    assert not [each for each in threading.enumerate() if each.name.startswith("nostall-read")]
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("shape", [(8,), (600, 700)], ids=["small", "large"])
def test_damage_names_the_file_and_the_item(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A missing file, a truncated one, and with ``verify="crc"`` a flipped bit in the values."""
    state = {"x": torch.ones(shape), "y": torch.ones(5)}
    save(tmp_path, state)
    file = tmp_path / "__0_0.distcp"
    place = read_metadata(tmp_path).storage_data[MetadataIndex("x", torch.Size([0] * len(shape)))]
    with flipped(file, file.read_bytes().index(b"\0\0\x80\x3f" * 8, place.offset) + 7):
        load(empty_like(state), tmp_path)
        error = error_of(empty_like(state), tmp_path, verify="crc")
        assert isinstance(error, DamagedCheckpointError)
        assert error.path == str(file)
        assert "CRC-32 of the values" in str(error)
        assert "(items x)" in str(error)
    os.truncate(file, place.offset + place.length - 1)
    error = error_of(empty_like(state), tmp_path)
    assert isinstance(error, DamagedCheckpointError)
    assert "x" in error.message
    file.unlink()
    error = error_of(empty_like(state), tmp_path)
    assert isinstance(error, DamagedCheckpointError)
    assert "the file is missing (items x, y)" in str(error)


@pytest.mark.parametrize("kind", [nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader])
def test_wrong_arguments_are_refused_at_once(
    tmp_path: Path, kind: type[nostall.FileSystemReader]
) -> None:
    """By one typed error each."""
    for options in ({"verify": "sha"}, {"threads": 0}, {"threads": "4"}):
        with pytest.raises(OptionError):
            kind(tmp_path, **options)
    with pytest.raises(OptionError):
        kind("nowhere://bucket/checkpoint")


@pytest.mark.parametrize(
    "pickled", [b"\x80\x02Nr\xff\xff\xff\x0f.", b"\x80\x02)2\x86."], ids=["memo", "twice"]
)
def test_pickles_that_take_much_for_few_bytes_are_not_run(pickled: bytes) -> None:
    """Memo indices beyond the length, and nested tuples of shared parts."""
    with pytest.raises(Unusual):
        require_simple(pickled)
