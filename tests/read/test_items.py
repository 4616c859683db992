"""How items get into tensors: memory that tensors share, planners, checksums, errors, Ctrl-C.

Stock is the judge of what is loaded.
"""

from __future__ import annotations

import gc
import inspect
import io
import os
import signal
import subprocess
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import nostall
from nostall._memory.uploads import Uploads
from nostall._read.archives import Archives, OpenFile
from nostall._read.inflight import Workers
from nostall._read.plan import Wanted
from nostall._read.reading import PIECE_NBYTES
from nostall._read.targets import overlapping, span_of
from nostall.errors import DamagedCheckpointError, OptionError
from nostall.filesystem_reader import Verify
from support import loaded
from support.interrupts import interrupted, takes_a_lock
from support.states import read_metadata

SIZES = pytest.mark.parametrize("count", [6, 100_000], ids=["small", "large"])


def save(path: Path, state: dict[str, Any], *, files: int = 1) -> None:
    writer = dcp.FileSystemWriter(path, sync_files=False, thread_count=files)
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


def archive_of(path: Path, name: str) -> tuple[Path, int, bytes]:
    """The file that has an item, where the item's archive begins in it, and the archive."""
    place = next(
        place for index, place in read_metadata(path).storage_data.items() if index.fqn == name
    )
    file = path / place.relative_path
    return file, place.offset, file.read_bytes()[place.offset : place.offset + place.length]


def values_end(archive: bytes) -> int:
    """Where the values end in an archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        values = next(each for each in opened.infolist() if each.filename.endswith("data/0"))
    at = values.header_offset
    name_nbytes = int.from_bytes(archive[at + 26 : at + 28], "little")
    extra_nbytes = int.from_bytes(archive[at + 28 : at + 30], "little")
    return at + 30 + name_nbytes + extra_nbytes + values.file_size


def overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


# --- alignment ------------------------------------------------------------------------------------

_ALL_CONVERSIONS = """
import sys, warnings
import torch
import torch.distributed.checkpoint as dcp
import nostall

warnings.simplefilter("ignore")
path, count = sys.argv[1], 37
dtypes = [torch.complex128, torch.complex64, torch.float64, torch.bfloat16, torch.int16, torch.bool]
state = {}
for number in range(16):  # objects of many lengths, so that archives begin at any address
    state[f"object {number}"] = "x" * number
    for dtype in dtypes:
        state[f"{number} {dtype}"] = torch.arange(count).to(dtype)
writer = dcp.FileSystemWriter(path, sync_files=False)
dcp.save(state, storage_writer=writer, no_dist=True)
for target_dtype in dtypes:
    for conjugated in (False, True):
        targets = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                targets[name] = torch.zeros(count, dtype=target_dtype)
                if conjugated and target_dtype.is_complex:
                    targets[name] = targets[name].conj()
        dcp.load(targets, storage_reader=nostall.FileSystemReader(path), no_dist=True)
        for name, target in targets.items():
            expected = torch.zeros(count, dtype=target_dtype).copy_(state[name])
            assert torch.equal(target.resolve_conj(), expected), (name, target_dtype, conjugated)
"""


def test_values_at_any_address_are_converted(tmp_path: Path) -> None:
    """Archives begin at any byte of a file; instructions for whole vectors need aligned memory."""
    command = [*loaded.python(), "-c", _ALL_CONVERSIONS, str(tmp_path / "saved")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


# --- planners -------------------------------------------------------------------------------------


class _OnePending(dcp.DefaultLoadPlanner):
    """Keeps one item between ``resolve_tensor`` and ``commit_tensor``."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: tuple[ReadItem, torch.Tensor] | None = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self._pending is None
        target = super().resolve_tensor(read_item)
        self._pending = read_item, target
        return torch.empty_like(target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert self._pending is not None
        pending, target = self._pending
        assert pending == read_item
        target.copy_(tensor)
        self._pending = None


class _Scratch(dcp.DefaultLoadPlanner):
    """Gives out one buffer for all tensors, with other content each time."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(0)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        return self._buffer.resize_(read_item.lengths).fill_(-1)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.lookup_tensor(read_item.dest_index).copy_(tensor)


class _Looked(dcp.DefaultLoadPlanner):
    """Looks tensors up in its own way, and gives out zeros at first."""

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return super().lookup_tensor(index).zero_()


@SIZES
@pytest.mark.parametrize("kind", [_OnePending, _Scratch, _Looked])
def test_planners_may_act_on_each_tensor(
    tmp_path: Path, count: int, kind: Callable[[], dcp.DefaultLoadPlanner]
) -> None:
    """A tensor is committed before the planner is asked for the next one."""
    state = {f"{number}": torch.full((count + number,), float(number)) for number in range(1, 7)}
    save(tmp_path, state)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    load(loaded, tmp_path, kind())
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_a_method_of_one_planner_counts(tmp_path: Path) -> None:
    """Also one that was set on the object."""
    state = {f"{number}": torch.full((100_000,), float(number)) for number in range(5)}
    save(tmp_path, state)
    planner, buffer, found = dcp.DefaultLoadPlanner(), torch.empty(100_000), {}

    def commit(read_item: ReadItem, tensor: torch.Tensor) -> None:
        found[read_item.dest_index.fqn] = tensor.clone()

    vars(planner).update(resolve_tensor=lambda _: buffer, commit_tensor=commit)
    load({name: torch.zeros(100_000) for name in state}, tmp_path, planner)
    assert all(torch.equal(found[name], value) for name, value in state.items())


# --- memory that targets share --------------------------------------------------------------------

_ROWS, _COLUMNS = 6, 8


View: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


def _part(whole: torch.Tensor, *, first: int, last: int) -> torch.Tensor:
    return whole.flatten(0, 1)[first:last]


def _box(whole: torch.Tensor, *, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    return whole[slice(*rows), slice(*columns)]


@st.composite
def _views(draw: st.DrawFn) -> list[View]:
    """Ways to view a matrix: slices of it, and of its memory."""

    def bounds(length: int) -> tuple[int, int]:
        pair = st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True)
        first, last = sorted(draw(pair))
        return first, last

    views: list[View] = []
    for _ in range(draw(st.integers(2, 5))):
        if draw(st.booleans()):
            first, last = bounds(_ROWS * _COLUMNS)
            views.append(partial(_part, first=first, last=last))
        else:
            views.append(partial(_box, rows=bounds(_ROWS), columns=bounds(_COLUMNS)))
    return views


@settings(max_examples=40, deadline=None)
@given(
    views=_views(),
    unit=st.sampled_from([1, 30_000]),
    files=st.integers(1, 3),
    data=st.data(),
)
def test_targets_that_share_memory_get_what_stock_gives_them(
    tmp_path_factory: pytest.TempPathFactory,
    views: list[View],
    unit: int,
    files: int,
    data: st.DataObject,
) -> None:
    """Each is overwritten by those after it in stock's order, whatever was read first."""
    path = tmp_path_factory.mktemp("shared")
    shape = (_ROWS, _COLUMNS, unit)
    state = {
        f"{number}": torch.full_like(view(torch.empty(shape)), float(number))
        for number, view in enumerate(views, 1)
    }
    save(path, state, files=files)
    names = data.draw(st.permutations(sorted(state)))

    def targets(whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: views[int(name) - 1](whole) for name in names}

    ours, stock = torch.zeros(shape), torch.zeros(shape)
    load(targets(ours), path)
    dcp.load(targets(stock), storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert torch.equal(ours, stock)


@SIZES
def test_tied_tensors_get_what_stock_gives_them(tmp_path: Path, count: int) -> None:
    """One tensor under two names that have other values in the checkpoint."""
    save(tmp_path, {"a": torch.full((count,), 1.0), "b": torch.full((count,), 2.0)}, files=2)
    ours, stock = torch.zeros(count), torch.zeros(count)
    load({"a": ours, "b": ours}, tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    dcp.load({"a": stock, "b": stock}, storage_reader=reader, no_dist=True)
    assert torch.equal(ours, stock)


Box: TypeAlias = "tuple[str, tuple[int, ...]]"
"""The name of a tensor, and where a part of it begins."""


def overlapping_of(
    targets: Sequence[torch.Tensor], boxes: Sequence[Box] | None = None
) -> list[bool]:
    """Whether targets share memory, if each is a tensor, or the part of one that a box says."""
    items = [
        Wanted(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name),
                dest_offsets=torch.Size(begin),
                storage_index=MetadataIndex(name),
                storage_offsets=torch.Size(begin),
                lengths=target.shape,
            ),
            "file",
            0,
            0,
        )
        for target, (name, begin) in zip(
            targets,
            boxes or [(f"{n}", (0,) * each.dim()) for n, each in enumerate(targets)],
            strict=True,
        )
    ]
    return overlapping(items, targets, [span_of(target) for target in targets])


def _elements(tensor: torch.Tensor) -> set[int]:
    """Addresses of a tensor's elements."""
    if not tensor.numel():
        return set()
    places = [0]
    for length, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + at * step for place in places for at in range(length)]
    return {tensor.data_ptr() + place * tensor.element_size() for place in places}


@settings(max_examples=300, deadline=None)
@given(views=_views())
def test_no_overlap_is_overlooked(views: list[View]) -> None:
    """Targets that count as apart have no element in common with any other."""
    whole = torch.zeros(_ROWS, _COLUMNS, 1)
    targets = [view(whole) for view in views]
    found = overlapping_of(targets)
    elements = [_elements(each) for each in targets]
    for one, shares in enumerate(found):
        if not shares:
            assert not any(
                elements[one] & elements[other] for other in range(len(targets)) if other != one
            )


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), parts=st.integers(1, 4))
def test_parts_of_one_tensor_are_apart(rows: int, columns: int, parts: int) -> None:
    """Tiles of a matrix, which span the same addresses, are read at the same time."""
    whole = torch.zeros(rows * parts, columns * parts)
    tiles = [tile for band in whole.split(rows, dim=0) for tile in band.split(columns, dim=1)]
    boxes = [("x", (row * rows, at * columns)) for row in range(parts) for at in range(parts)]
    assert not any(overlapping_of(tiles, boxes))
    assert all(overlapping_of([*tiles, whole], [*boxes, ("x", (0, 0))]))
    assert all(overlapping_of([*tiles, whole], [*boxes, ("y", (0, 0))]))


def test_parts_of_an_expanded_tensor_share_memory() -> None:
    """Though they are beside each other."""
    rows = torch.zeros(1, 8).expand(6, 8).split(1)
    assert all(overlapping_of(rows, [("x", (row, 0)) for row in range(6)]))


def test_parts_of_a_tensor_that_overlaps_itself_share_memory() -> None:
    """By its strides, where each part alone does not."""
    rows = torch.zeros(8).as_strided((2, 4), (2, 1)).split(1)
    assert all(overlapping_of(rows, [("x", (0, 0)), ("x", (1, 0))]))


def test_unknown_memory_counts_as_shared() -> None:
    """That of sparse tensors and subclasses; tensors without elements share nothing."""
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert overlapping_of([sparse, parameter, torch.zeros(0), torch.zeros(2)]) == [
        True,
        True,
        False,
        False,
    ]


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [600, 3_000_000], ids=["small", "large"])
def test_a_failed_load_counts_as_a_change(tmp_path: Path, count: int) -> None:
    """Autograd must not use values that were overwritten before the load failed."""
    save(tmp_path, {"x": torch.ones(count)})
    file, begin, archive = archive_of(tmp_path, "x")
    overwrite(file, begin + values_end(archive) - 1, b"\xff")
    target = torch.zeros(count)
    weight = torch.ones(count, requires_grad=True)
    product = (weight * target).sum()
    assert isinstance(error_of({"x": target}, tmp_path, verify="crc"), DamagedCheckpointError)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@SIZES
def test_tensors_made_in_inference_mode_are_loaded(tmp_path: Path, count: int) -> None:
    """They have no count of changes."""
    save(tmp_path, {"x": torch.ones(count)})
    with torch.inference_mode():
        target = torch.zeros(count)
        load({"x": target}, tmp_path)
    assert target.unique().tolist() == [1.0]


# --- checksums ------------------------------------------------------------------------------------


def _without_checksum(archive: bytes) -> bytes:
    """The archive as it is saved after ``torch.serialization.set_crc32_options(False)``."""
    end = values_end(archive)
    crc32 = archive[end + 4 : end + 8]
    assert archive.count(crc32) == 2
    return archive.replace(crc32, bytes(4))


@SIZES
def test_each_archive_has_its_own_checksum(tmp_path: Path, count: int) -> None:
    """One without a checksum says nothing of others of the same form."""
    save(tmp_path, {name: torch.full((count,), float(ord(name))) for name in "abc"})
    file, begin, archive = archive_of(tmp_path, "a")
    overwrite(file, begin, _without_checksum(archive))
    loaded = {name: torch.zeros(count) for name in "abc"}
    load(loaded, tmp_path, verify="crc")
    assert [loaded[name].unique().item() for name in "abc"] == [97.0, 98.0, 99.0]
    file, begin, archive = archive_of(tmp_path, "c")
    overwrite(file, begin + values_end(archive) - 2, b"\x01")
    error = error_of(loaded, tmp_path, verify="crc")
    assert isinstance(error, DamagedCheckpointError)
    assert "(items c)" in str(error)


@SIZES
def test_an_overwritten_checksum_is_damage(tmp_path: Path, count: int) -> None:
    """Zeros, as a page that was never written has them, are not taken for no checksum."""
    save(tmp_path, {name: torch.full((count,), float(ord(name))) for name in "ab"})
    file, begin, archive = archive_of(tmp_path, "b")
    overwrite(file, begin + values_end(archive) - 16, bytes(32))
    loaded = {name: torch.zeros(count) for name in "ab"}
    error = error_of(loaded, tmp_path, verify="crc")
    assert isinstance(error, DamagedCheckpointError)
    assert "(items b)" in str(error)


@pytest.mark.parametrize("count", [1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_sums_of_pieces_are_the_sum(tmp_path: Path, count: int) -> None:
    """A tensor of several pieces that several threads read; and any damaged byte is found."""
    save(tmp_path, {"x": torch.arange(count, dtype=torch.int32)})
    loaded = {"x": torch.zeros(count, dtype=torch.int32)}
    load(loaded, tmp_path, verify="crc")
    assert torch.equal(loaded["x"], torch.arange(count, dtype=torch.int32))
    file, begin, archive = archive_of(tmp_path, "x")
    end = begin + values_end(archive)
    for at in {end - 1, end - 2 * count, end - 4 * count}:
        before = file.read_bytes()[at : at + 1]
        overwrite(file, at, bytes([before[0] ^ 1]))
        assert isinstance(error_of(loaded, tmp_path, verify="crc"), DamagedCheckpointError)
        overwrite(file, at, before)


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("names", [("x", "y"), ("y", "x")])
def test_an_archive_is_not_taken_for_one_like_it(
    tmp_path: Path, names: tuple[str, str], verify: Verify
) -> None:
    """Another dtype may have the same length of archive, and the shape that the target has."""
    first, second = names
    values = torch.arange(200_000)
    save(tmp_path, {first: values.to(torch.float32), second: values.to(torch.int32)})
    assert len({len(archive_of(tmp_path, name)[2]) for name in names}) == 1
    target = {name: torch.zeros(200_000) for name in names}
    load(target, tmp_path, verify=verify, threads=1)
    assert all(torch.equal(target[name], values.to(torch.float32)) for name in names)


@pytest.mark.parametrize("verify", ["none", "crc"])
def test_an_archive_that_only_torch_reads_is_not_taken_for_one_like_it(
    tmp_path: Path, verify: Verify
) -> None:
    """That of a square matrix and of its transposed have one length."""
    square = torch.arange(700.0 * 700).reshape(700, 700)
    state = {"x": square, "y": square.t()}
    save(tmp_path, state)
    assert len({len(archive_of(tmp_path, name)[2]) for name in state}) == 1
    target = {name: torch.zeros(700, 700) for name in state}
    load(target, tmp_path, verify=verify, threads=1)
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_after_an_error_nothing_keeps_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cycle of the error and its traceback, which only the garbage collector would find."""
    save(tmp_path, {"x": torch.arange(4_000_000.0)})
    file, begin, _ = archive_of(tmp_path, "x")
    overwrite(file, begin + 5_000_000, b"\xff\xfe")
    made: list[weakref.ref[torch.Tensor]] = []
    beside = Uploads.beside

    def noting(*arguments: Any) -> torch.Tensor:
        memory = beside(*arguments)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(Uploads, "beside", noting)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DamagedCheckpointError):
            nostall.load({"x": torch.zeros(4_000_000).double()}, tmp_path, verify="crc")
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def test_a_tensor_is_compared_with_its_checksum_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all threads complete their last piece at the same time."""
    count = (PIECE_NBYTES + PIECE_NBYTES // 2) // 4  # two pieces
    save(tmp_path, {"x": torch.ones(count)})
    both, compared = threading.Barrier(2), []
    part, require_intact = Uploads.part, Archives.require_intact

    @contextmanager
    def together(*arguments: Any) -> Iterator[memoryview]:
        """Parts that are complete at the same time."""
        with part(*arguments) as memory:
            yield memory
        both.wait(60)

    def comparing(*arguments: Any) -> None:
        compared.append(arguments)
        require_intact(*arguments)

    monkeypatch.setattr(Uploads, "part", together)
    monkeypatch.setattr(Archives, "require_intact", comparing)
    load({"x": torch.zeros(count)}, tmp_path, verify="crc", threads=2)
    assert len(compared) == 1


# --- errors of users ------------------------------------------------------------------------------


class _Gives(dcp.DefaultLoadPlanner):
    """Gives out a certain tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._tensor


@SIZES
@pytest.mark.parametrize("by_planner", [False, True], ids=["state", "planner"])
@pytest.mark.parametrize("kind", ["sparse", "expanded", "meta", "freed", "empty", "other shape"])
def test_targets_that_cannot_be_filled_are_named(
    tmp_path: Path, count: int, kind: str, *, by_planner: bool
) -> None:
    """By an error that says what to do."""
    save(tmp_path, {"x": torch.ones(count)})
    freed = torch.zeros(count)
    freed.untyped_storage().resize_(0)
    target = {
        "sparse": torch.zeros(count).to_sparse(),
        "expanded": torch.zeros(1).expand(count),
        "meta": torch.zeros(count, device="meta"),
        "freed": freed,
        "empty": torch.zeros(0),
        "other shape": torch.zeros(count, 1),
    }[kind]
    planner = _Gives(target) if by_planner or kind in ("empty", "other shape", "meta") else None
    state = {"x": torch.zeros(count) if planner else target}
    with pytest.raises(CheckpointException) as caught:
        load(state, tmp_path, planner)
    error = caught.value.failures[0][0]
    assert isinstance(error, OptionError)
    assert "x" in error.message
    assert "saving" not in str(error)
    assert error.phase == "read"


# --- Ctrl-C ---------------------------------------------------------------------------------------


@contextmanager
def noticing(notice: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls a function before it interrupts."""

    def handle(*_: object) -> None:
        notice()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def reading_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("nostall-read")]


@pytest.mark.parametrize("verify", ["none", "crc"])
def test_ctrl_c_ends_a_load(
    tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread reads one piece to its end, files are closed, and targets do not change then."""
    count, threads = 16 << 20, 4
    save(tmp_path, {"x": torch.ones(count)})
    before = os.listdir("/proc/self/fd")
    asked, noticed = threading.Event(), threading.Event()
    read_afterwards: list[int] = []
    fill = OpenFile.fill

    def interrupting(
        file: OpenFile, offset: int, items: Sequence[Wanted], *memories: memoryview
    ) -> None:
        if offset >= 1 << 20 and not asked.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGINT)
            assert noticed.wait(60)
        if noticed.is_set():
            read_afterwards.append(sum(map(len, memories)))
        fill(file, offset, items, *memories)

    monkeypatch.setattr(OpenFile, "fill", interrupting)
    with noticing(noticed.set), pytest.raises(KeyboardInterrupt):
        nostall.load({"x": torch.zeros(count)}, tmp_path, verify=verify, threads=threads)
    assert not reading_threads()
    assert os.listdir("/proc/self/fd") == before
    assert 0 < sum(read_afterwards) <= threads * PIECE_NBYTES


def test_no_number_of_ctrl_c_leaves_a_thread_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load has ended once the last thread has; only then the caller gets its targets back."""
    save(tmp_path, {"x": torch.ones(1 << 20)})
    noticed, shutting, left = threading.Event(), threading.Event(), threading.Event()
    complete: list[bool] = []
    fill, end = OpenFile.fill, Workers._end

    def interrupting(
        file: OpenFile, offset: int, items: Sequence[Wanted], *memories: memoryview
    ) -> None:
        if not complete:
            complete.append(False)
            os.kill(os.getpid(), signal.SIGINT)
            assert noticed.wait(60)
            assert shutting.wait(60)
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                left.wait(0.1)  # never set, unless the load ends before this read
            fill(file, offset, items, *memories)
            complete.append(True)

    def ending(workers: Workers) -> None:
        shutting.set()
        end(workers)

    monkeypatch.setattr(OpenFile, "fill", interrupting)
    monkeypatch.setattr(Workers, "_end", ending)
    with noticing(noticed.set):
        with pytest.raises(KeyboardInterrupt):
            nostall.load({"x": torch.zeros(1 << 20)}, tmp_path, threads=1)
        left.set()
    assert complete == [False, True]
    assert not reading_threads()


def test_ctrl_c_while_files_are_opened_leaves_none_open(tmp_path: Path) -> None:
    """Whatever line it comes at."""
    state = {f"{number}": torch.ones(10) for number in range(3)}
    save(tmp_path, state, files=3)
    load(dict(state), tmp_path)
    before = os.listdir("/proc/self/fd")
    places = ("inflight.py", "archives.py", "posix.py", "_reader.py")

    def happens(frame: FrameType, event: str) -> bool:
        # Python looks for signals after calls, never between a generator's yield and its caller.
        is_after_call = event == "c_return" or (
            event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        )
        return is_after_call and frame.f_code.co_filename.endswith(places)

    for at in count(1):
        loaded: list[object] = []
        with interrupted(at, happens), suppress(KeyboardInterrupt):
            loaded.append(nostall.load(dict(state), tmp_path))
        assert os.listdir("/proc/self/fd") == before, at
        if loaded:
            break
    assert at > 40


def test_repeated_ctrl_c_is_always_a_keyboard_interrupt(tmp_path: Path) -> None:
    """A caller's ``except Exception`` does not swallow it, wherever it comes."""
    state = {f"{number}": torch.ones(10) for number in range(3)}
    save(tmp_path, state, files=3)

    def is_of_the_threads(frame: FrameType, event: str) -> bool:
        is_return = event in ("return", "c_return")
        return (is_return and frame.f_code.co_filename.endswith("inflight.py")) or (
            takes_a_lock(frame, event)
            and any(each.f_code.co_filename.endswith("inflight.py") for each in _callers(frame))
        )

    for at in count(1):
        loaded: list[object] = []
        with interrupted(at, is_of_the_threads, times=2), suppress(KeyboardInterrupt):
            loaded.append(nostall.load(dict(state), tmp_path, threads=3))
        assert not reading_threads()
        if loaded:
            break
    assert at > 20


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
