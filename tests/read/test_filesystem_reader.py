"""``nostall.FileSystemReader``: what stock's reader hands to a planner, in a fraction of the time.

Stock is the judge: for the same plan, both readers must call the same functions of a planner with
the same tensors.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import resource
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

import nostall
from nostall._model.progress import ReadCounter
from nostall._read.archives import Unusual, require_simple
from nostall._read.plan import Wanted
from nostall._read.reading import read_items
from nostall._storage.port import between
from nostall._storage.posix import PosixSource, PosixStorage
from nostall.errors import DamagedCheckpointError, OptionError, UntrustedObjectError
from nostall.filesystem_reader import Verify
from programs.streams import Zlib
from support.parts import save_in_halves
from support.reads import CountedSource
from support.states import read_metadata, save_stock_way, small_state

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
]
KINDS = [nostall.FileSystemReader, nostall.CachedMetadataFileSystemReader]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Different bytes in every element; of bools and floats none that changes by loading."""
    count = math.prod(shape)
    return (
        (torch.arange(count) % 2 if dtype is torch.bool else torch.arange(count) % 97)
        .to(dtype)
        .reshape(shape)
    )


def save(path: Path, state: dict[str, Any], who: str = "nostall") -> None:
    if who == "stock":
        save_stock_way(path, state)
        return
    writer = nostall.FileSystemWriterAsync(path, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(
    state: dict[str, Any],
    path: Path,
    kind: type[nostall.FileSystemReader] = nostall.FileSystemReader,
    **options: Any,
) -> None:
    dcp.load(state, storage_reader=kind(path, **options), no_dist=True)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def empty_like(value: Any) -> Any:
    """A state of the same structure, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    return [empty_like(each) for each in value] if isinstance(value, list) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Recorder(LoadPlanner):
    """Gives every item a tensor of its own, and keeps what it was called with."""

    def __init__(self, make: Callable[[ReadItem], torch.Tensor]) -> None:
        self._make = make
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.tensors: dict[ReadItem, torch.Tensor] = {}
        self.objects: dict[ReadItem, bytes] = {}

    def _called(self, what: str, item: ReadItem) -> None:
        self.calls.append((what, item.storage_index.fqn))
        self.threads.add(threading.get_ident())

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._called("load_bytes", read_item)
        self.objects[read_item] = value.read()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._called("resolve_tensor", read_item)
        self.tensors[read_item] = self._make(read_item)
        return self.tensors[read_item]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._called("commit_tensor", read_item)
        assert tensor.data_ptr() == self.tensors[read_item].data_ptr()

    def set_up_planner(self, *_: Any, **__: Any) -> None: ...
    def create_local_plan(self) -> Any: ...
    def create_global_plan(self, global_plan: Any) -> Any: ...
    def finish_plan(self, central_plan: Any) -> Any: ...


def read(reader: dcp.FileSystemReader, items: list[ReadItem], planner: Recorder) -> None:
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    reader.read_data(LoadPlan(items), planner).wait()


def item_of(name: str, offsets: tuple[int, ...], lengths: tuple[int, ...], at: Any) -> ReadItem:
    zeros = torch.Size([0] * len(lengths))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, zeros),
        dest_offsets=zeros,
        storage_index=MetadataIndex(name, at),
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )


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


# --- what is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("who", ["nostall", "stock"])
def test_every_dtype_and_layout_is_loaded_bit_by_bit(tmp_path: Path, who: str, verify: str) -> None:
    """Small and large, in parts of a region and alone, with objects in between."""
    state: dict[str, Any] = small_state()
    for dtype in DTYPES:
        state[f"small {dtype}"] = tensor_of(dtype, (3, 5))
        state[f"large {dtype}"] = tensor_of(dtype, (700, 801))
    state["scalar"] = torch.tensor(7, dtype=torch.int16)
    state["large object"] = "x" * 400_000
    save(tmp_path, state, who)
    loaded = empty_like(state)
    load(loaded, tmp_path, verify=verify)
    assert same(loaded, state)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_not_plain_is_loaded_by_torch(tmp_path: Path) -> None:
    """A quantised tensor, among plain ones."""
    quantised = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 2, torch.qint8)
    state = {"quantised": quantised, "plain": torch.ones(3)}
    save(tmp_path, state)
    other = torch.quantize_per_tensor(torch.zeros(6), 0.5, 2, torch.qint8)
    loaded = {"quantised": other, "plain": torch.zeros(3)}
    load(loaded, tmp_path)
    assert same(loaded["quantised"].int_repr(), quantised.int_repr())
    assert torch.equal(loaded["plain"], torch.ones(3))


def test_transformed_items_are_loaded_by_stock(tmp_path: Path) -> None:
    """Only it knows the extensions of the stream."""
    state = small_state()
    writer = dcp.FileSystemWriter(tmp_path, sync_files=False, _extensions=[Zlib()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    loaded = empty_like(state)
    reader = nostall.FileSystemReader(tmp_path)
    reader.transforms = dcp.FileSystemReader(tmp_path, _extension_registry=_registry()).transforms
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert same(loaded, state)


def _registry() -> Any:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    registry = ExtensionRegistry()
    registry.extensions[Zlib.registry_name()] = Zlib
    return registry


def test_targets_of_other_dtypes_layouts_and_kinds(tmp_path: Path) -> None:
    """Values are converted and placed as ``copy_`` does it; a parameter stays one."""
    large = tensor_of(torch.float32, (600, 700))
    save(tmp_path, {"a": large, "b": large, "c": large, "d": large})
    parameter = torch.nn.Parameter(torch.zeros(600, 700))
    loaded = {
        "a": torch.zeros(600, 700, dtype=torch.float64),
        "b": torch.zeros(700, 600).t(),
        "c": parameter,
        "d": torch.zeros(600, 1400)[:, ::2],
    }
    load(loaded, tmp_path)
    assert all(torch.equal(each.detach(), large.to(each.dtype)) for each in loaded.values())
    assert loaded["c"] is parameter


def test_a_tensor_that_is_filled_counts_as_changed(tmp_path: Path) -> None:
    """Autograd must not take it for what it had saved."""
    large = torch.ones(600, 700)
    save(tmp_path, {"x": large})
    target = torch.zeros(600, 700)
    before = target._version
    load({"x": target}, tmp_path)
    assert target._version > before
    assert torch.equal(target, large)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    scale=st.sampled_from([1, 60]),
    dtype=st.sampled_from(DTYPES),
    verify=st.sampled_from(["none", "crc"]),
)
def test_any_slice_is_what_stock_reads(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: list[int],
    scale: int,
    dtype: torch.dtype,
    verify: Verify,
) -> None:
    """Random slices of small and large stored tensors get the values that stock's reader gives."""
    path = tmp_path_factory.mktemp("slices")
    size = (shape[0] * scale, *shape[1:])
    save(path, {"x": tensor_of(dtype, size)})
    slices = []
    for _ in range(3):
        begins = [data.draw(st.integers(0, length - 1)) for length in size]
        lengths = [
            data.draw(st.integers(1, length - begin))
            for length, begin in zip(size, begins, strict=True)
        ]
        slices.append(item_of("x", tuple(begins), tuple(lengths), torch.Size([0] * len(size))))

    def make(item: ReadItem) -> torch.Tensor:
        return torch.zeros(item.lengths, dtype=dtype)

    slices = list(dict.fromkeys(slices))
    ours, stock = Recorder(make), Recorder(make)
    read(nostall.FileSystemReader(path, verify=verify), slices, ours)
    read(dcp.FileSystemReader(path), slices, stock)
    assert ours.tensors.keys() == stock.tensors.keys()
    assert all(same(ours.tensors[each], stock.tensors[each]) for each in slices)
    shutil.rmtree(path)


def test_parts_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """Halves of rows, saved by two ranks, load as whole tensors."""
    state = {"x": tensor_of(torch.float32, (900, 700)), "y": tensor_of(torch.int32, (9, 4))}
    save_in_halves(tmp_path, state)
    loaded = empty_like(state)
    load(loaded, tmp_path)
    assert same(loaded, state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_tensors_are_not_loaded_by_torch(
    tmp_path: Path,
    dtype: torch.dtype,
    kind: type[nostall.FileSystemReader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No dtype needs ``torch.load``, which would make every item slow."""
    state = {"x": tensor_of(dtype, (3, 5)), "y": tensor_of(dtype, (600, 1000))}
    save(tmp_path, state)

    def refuse(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("loaded by torch")

    monkeypatch.setattr(torch, "load", refuse)
    loaded = empty_like(state)
    load(loaded, tmp_path, kind)
    assert same(loaded, state)


# --- how it is read -------------------------------------------------------------------------------


class _CountingFiles(PosixStorage):
    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.counts: list[int] = []

    def open(self, name: str) -> Any:
        return CountedSource(super().open(name), self.counts)


def _wanted(path: Path, items: list[ReadItem]) -> list[Wanted]:
    places = read_metadata(path).storage_data
    return [
        Wanted(item=each, file=place.relative_path, offset=place.offset, nbytes=place.length)
        for each in items
        for place in [places[each.storage_index]]
    ]


def test_of_a_slice_only_its_rows_are_read(tmp_path: Path) -> None:
    """An eighth of the rows is an eighth of the bytes, plus a few kilobytes."""
    save(tmp_path, {"x": tensor_of(torch.float32, (8 << 10, 256))})
    files = _CountingFiles(tmp_path)
    item = item_of("x", (3 << 10, 0), (1 << 10, 256), torch.Size([0, 0]))
    planner = Recorder(lambda item: torch.zeros(item.lengths))
    counter = ReadCounter(0)
    wanted = _wanted(tmp_path, [item])
    read_items(wanted, planner, files, threads=2, verify=False, counter=counter)
    assert sum(files.counts) <= (1 << 20) + (32 << 10)


def test_small_items_are_read_together(tmp_path: Path) -> None:
    """A thousand tensors in a few reads, each byte once."""
    save(tmp_path, {f"x{number}": torch.full((64,), number) for number in range(1000)})
    files = _CountingFiles(tmp_path)
    items = [item_of(f"x{number}", (0,), (64,), torch.Size([0])) for number in range(1000)]
    planner = Recorder(lambda _: torch.zeros(64, dtype=torch.int64))
    counter = ReadCounter(0)
    wanted = _wanted(tmp_path, items)
    read_items(wanted, planner, files, threads=2, verify=False, counter=counter)
    assert len(files.counts) <= 10
    assert sum(files.counts) <= (tmp_path / "__0_0.distcp").stat().st_size
    assert all(bool((planner.tensors[each] == number).all()) for number, each in enumerate(items))


class _Turned(PosixSource):
    """A file of which one byte is right only when it is read for the first time."""

    def __init__(self, path: str, at: int) -> None:
        super().__init__(path)
        self._at = at
        self._times = 0

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = super().read_into(offset, *memories)
        if offset <= self._at < offset + nbytes:
            self._times += 1
            if self._times > 1:
                (byte,) = between(memories, self._at - offset, self._at - offset + 1)
                byte[0] ^= 0xFF
        return nbytes


class _TurnedFiles(PosixStorage):
    def __init__(self, directory: Path, at: int) -> None:
        super().__init__(str(directory))
        self._at = at

    def open(self, name: str) -> PosixSource:
        return _Turned(self.where(name), self._at)


@pytest.mark.parametrize("shape", [(20, 30), (300, 400)], ids=["small", "large"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_what_is_compared_is_what_is_loaded(
    tmp_path: Path, shape: tuple[int, int], *, is_plain: bool
) -> None:
    """Also of a tensor that only torch can load: storage may answer otherwise the next time."""
    stored = torch.arange(float(shape[0] * shape[1])).view(shape)
    save(tmp_path, {"x": stored if is_plain else stored.t().contiguous().t()})
    content = (tmp_path / "__0_0.distcp").read_bytes()
    values = (stored if is_plain else stored.t()).contiguous().numpy().tobytes()
    at = content.index(values) + len(values) // 2
    target = torch.zeros(shape)
    item = item_of("x", (0, 0), shape, torch.Size([0, 0]))
    wanted = _wanted(tmp_path, [item])
    planner, counter = Recorder(lambda _: target), ReadCounter(0)
    read = partial(read_items, wanted, planner, threads=2, verify=True, counter=counter)
    read(_TurnedFiles(tmp_path, at))
    assert torch.equal(target, stored)
    changed = bytearray(content)
    changed[at] ^= 0xFF
    (tmp_path / "__0_0.distcp").write_bytes(changed)
    with pytest.raises(DamagedCheckpointError, match="CRC-32"):
        read(PosixStorage(str(tmp_path)))


def test_the_planner_is_called_as_by_stock(tmp_path: Path) -> None:
    """On the caller's thread, once for each item, each tensor's commit after its resolve."""
    state = {"a": torch.ones(3), "b": 5, "c": torch.ones(700, 800), "d": "x" * 500_000}
    save(tmp_path, state)
    metadata = read_metadata(tmp_path)
    items = [
        item_of(name, (0,) * len(entry.size), tuple(entry.size), torch.Size([0] * len(entry.size)))
        if isinstance(entry, TensorStorageMetadata)
        else replace(item_of(name, (0,), (0,), None), type=LoadItemType.BYTE_IO)
        for name, entry in metadata.state_dict_metadata.items()
    ]
    ours = Recorder(lambda item: torch.zeros(item.lengths))
    stock = Recorder(lambda item: torch.zeros(item.lengths))
    read(nostall.FileSystemReader(tmp_path), items, ours)
    read(dcp.FileSystemReader(tmp_path), items, stock)
    assert ours.threads == {threading.get_ident()}
    assert sorted(ours.calls) == sorted(stock.calls)
    assert ours.objects == stock.objects
    for name in ("a", "c"):
        assert ours.calls.index(("resolve_tensor", name)) < ours.calls.index(
            ("commit_tensor", name)
        )


@pytest.mark.parametrize("descriptors", [40, 3])
def test_many_files_are_not_open_at_once(tmp_path: Path, descriptors: int) -> None:
    """A checkpoint of many more ranks than a process may open files."""
    state = {f"x{number}": torch.full((8,), number) for number in range(400)}
    save_stock_way(tmp_path, {})
    metadata = read_metadata(tmp_path)
    for number, (name, value) in enumerate(state.items()):
        save(tmp_path / "one", {name: value})
        (tmp_path / "one" / "__0_0.distcp").rename(tmp_path / f"__{number}_0.distcp")
        part = read_metadata(tmp_path / "one")
        metadata.state_dict_metadata |= part.state_dict_metadata
        for index, place in part.storage_data.items():
            metadata.storage_data[index] = replace(place, relative_path=f"__{number}_0.distcp")
        shutil.rmtree(tmp_path / "one")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
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

    reader = nostall.FileSystemReader(link)
    reader.transforms = dcp.FileSystemReader(link, _extension_registry=_registry()).transforms
    for step in (1, 2):
        loaded = {"a": torch.zeros(step), "b": torch.zeros(100_000)}
        dcp.load(loaded, storage_reader=reader, planner=Switching(), no_dist=True)
        assert [value.unique().tolist() for value in loaded.values()] == [[step], [step]]


def test_nothing_is_written_after_an_error(tmp_path: Path) -> None:
    """An error of the planner ends all reads before it is raised, and closes the files."""
    save(tmp_path, {f"x{number}": torch.ones(600, 700) for number in range(8)})
    items = [item_of(f"x{number}", (0, 0), (600, 700), torch.Size([0, 0])) for number in range(8)]

    class Failing(Recorder):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            raise ZeroDivisionError(read_item.storage_index.fqn)

    before = os.listdir("/proc/self/fd")
    planner = Failing(lambda item: torch.zeros(item.lengths))
    with pytest.raises(ZeroDivisionError):
        read(nostall.FileSystemReader(tmp_path), items, planner)
    assert not [each for each in threading.enumerate() if each.name.startswith("nostall-read")]
    assert os.listdir("/proc/self/fd") == before


# --- damage and hostility -------------------------------------------------------------------------


def _error_of(path: Path, state: dict[str, Any], **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(empty_like(state), path, **options)
    error: BaseException = caught.value.failures[0][0]
    return error


@pytest.mark.parametrize("shape", [(8,), (600, 700)], ids=["small", "large"])
def test_damage_names_the_file_and_the_item(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A missing file, a truncated one, and with ``verify="crc"`` a flipped bit in the values."""
    state = {"x": torch.ones(shape), "y": torch.ones(5)}
    save(tmp_path, state)
    file = tmp_path / "__0_0.distcp"
    place = read_metadata(tmp_path).storage_data[MetadataIndex("x", torch.Size([0] * len(shape)))]
    with flipped(file, file.read_bytes().index(b"\0\0\x80\x3f" * 8, place.offset) + 7):
        load(empty_like(state), tmp_path)
        error = _error_of(tmp_path, state, verify="crc")
        assert isinstance(error, DamagedCheckpointError)
        assert error.path == str(file)
        assert "CRC-32 of the values" in str(error)
        assert "(items x)" in str(error)
    os.truncate(file, place.offset + place.length - 1)
    error = _error_of(tmp_path, state)
    assert isinstance(error, DamagedCheckpointError)
    assert "x" in error.message
    file.unlink()
    error = _error_of(tmp_path, state)
    assert isinstance(error, DamagedCheckpointError)
    assert "the file is missing (items x, y)" in str(error)


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("count", [4, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("lie", ["code", "length", "shape", "noise"])
def test_hostile_archives_are_refused(tmp_path: Path, lie: str, count: int) -> None:
    """Code, a tensor longer than its values, one of another shape, no archive at all."""
    state = {"x": torch.ones(count)}
    save(tmp_path, state)
    metadata = read_metadata(tmp_path)
    buffer = io.BytesIO()
    torch.save(state["x"], buffer)
    evil = io.BytesIO()
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(evil, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = pickle.dumps(Evil(tmp_path / "pwned"), 2) if lie == "code" else content
                found, wanted = pickle.dumps(count, 2)[2:-1], pickle.dumps(count - 1, 2)[2:-1]
                content = content.replace(found, wanted) if lie == "shape" else content
            if entry.filename.endswith("data/0") and lie == "length":
                content = content[:-4]
            target.writestr(entry.filename, content)
    archive = bytes(len(evil.getvalue())) if lie == "noise" else evil.getvalue()
    (tmp_path / "__0_0.distcp").write_bytes(archive)
    metadata.storage_data = {
        index: replace(place, offset=0, length=len(archive))
        for index, place in metadata.storage_data.items()
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = UntrustedObjectError if lie == "code" else DamagedCheckpointError
    assert isinstance(_error_of(tmp_path, state), expected)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_refused_at_once(
    tmp_path: Path, kind: type[nostall.FileSystemReader]
) -> None:
    """By one typed error each."""
    for options in ({"verify": "sha"}, {"threads": 0}, {"threads": "4"}):
        with pytest.raises(OptionError):
            kind(tmp_path, **options)
    with pytest.raises(OptionError):
        kind("nowhere://bucket/checkpoint")


@pytest.mark.parametrize("shape", [(4, 4, 3, 3), (64, 64, 5, 5)], ids=["small", "large"])
def test_damage_of_what_torch_loads_is_found(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Tensors that were saved with other strides are verified, too."""
    state = {"x": torch.randn(shape).to(memory_format=torch.channels_last)}
    save(tmp_path, state, "stock")
    loaded = empty_like(state)
    load(loaded, tmp_path, verify="crc")
    assert same(loaded, state)
    file = tmp_path / "__0_0.distcp"
    with flipped(file, file.stat().st_size // 2):
        error = _error_of(tmp_path, empty_like(state), verify="crc")
    assert isinstance(error, DamagedCheckpointError)


@pytest.mark.parametrize("count", [3, 100_000], ids=["small", "large"])
def test_planners_may_use_one_buffer_for_all_tensors(tmp_path: Path, count: int) -> None:
    """Each value is there when its tensor is committed."""
    state = {f"{each}": torch.full((count,), float(each)) for each in range(6)}
    save(tmp_path, state)
    buffer = torch.zeros(count)
    found: dict[str, list[float]] = {}

    class Scratch(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return buffer

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            found[read_item.dest_index.fqn] = tensor.unique().tolist()

    reader = nostall.FileSystemReader(tmp_path)
    dcp.load(state, storage_reader=reader, planner=Scratch(), no_dist=True)
    assert found == {f"{each}": [float(each)] for each in range(6)}


@pytest.mark.parametrize("count", [3, 100_000], ids=["small", "large"])
def test_conjugate_targets(tmp_path: Path, count: int) -> None:
    """A target with the conjugate bit receives the saved values."""
    state = {"x": torch.randn(count, dtype=torch.complex64), "y": torch.randn(3)}
    save(tmp_path, state)
    loaded = {"x": torch.zeros(count, dtype=torch.complex64).conj(), "y": torch.zeros(3)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["x"], state["x"])


@pytest.mark.parametrize(
    "pickled", [b"\x80\x02Nr\xff\xff\xff\x0f.", b"\x80\x02)2\x86."], ids=["memo", "twice"]
)
def test_pickles_that_take_much_for_few_bytes_are_not_run(pickled: bytes) -> None:
    """Memo indices beyond the length, and nested tuples of shared parts."""
    with pytest.raises(Unusual):
        require_simple(pickled)
