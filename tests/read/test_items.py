"""How items get into tensors: memory that tensors share, planners, checksums, errors, Ctrl-C.

Stock is the judge of what is loaded.
"""

from __future__ import annotations

import gc
import inspect
import io
import itertools
import os
import signal
import struct
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import nostall
from nostall._memory.uploads import Uploads
from nostall._read.archives import OpenFile
from nostall._read.inflight import Workers
from nostall._read.plan import Wanted, overlapping, span_of
from nostall._read.reading import PIECE_NBYTES
from nostall.errors import DamagedCheckpointError, OptionError, ReadError
from nostall.filesystem_reader import Verify
from support.interrupts import interrupted, takes_a_lock
from support.ranks import run_script
from support.reads import error_of, flipped, load
from support.states import read_metadata, save_stock_way
from support.waiting import SOON_S

SIZES = pytest.mark.parametrize("count", [6, 100_000], ids=["small", "large"])


class Archive(NamedTuple):
    """An item's archive in a file."""

    file: Path
    begin: int
    content: bytes

    @property
    def values_end(self) -> int:
        """Where the values end in the file."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as opened:
            values = next(each for each in opened.infolist() if each.filename.endswith("data/0"))
        at = values.header_offset
        name_nbytes, extra_nbytes = struct.unpack("<HH", self.content[at + 26 : at + 30])
        return self.begin + at + 30 + int(name_nbytes + extra_nbytes) + values.file_size


def archive_of(path: Path, name: str) -> Archive:
    places = read_metadata(path).storage_data
    (place,) = [place for index, place in places.items() if index.fqn == name]
    file = path / place.relative_path
    content = file.read_bytes()[place.offset : place.offset + place.length]
    return Archive(file, place.offset, content)


def overwrite(file: Path, at: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_values_at_any_address_are_converted(tmp_path: Path) -> None:
    """Archives begin at any byte of a file; instructions for whole vectors need aligned memory."""
    dtypes = [torch.complex128, torch.complex64, torch.float64, torch.bfloat16]
    dtypes += [torch.int16, torch.bool]
    state: dict[str, Any] = {}
    for number in range(16):  # objects of many lengths, so that archives begin at any address
        state[f"object {number}"] = "x" * number
        state |= {f"{number} {dtype}": torch.arange(37).to(dtype) for dtype in dtypes}
    save_stock_way(tmp_path, state)
    saved = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    for dtype, is_conjugate in itertools.product(dtypes, (False, True)):
        targets = {name: torch.zeros(37, dtype=dtype) for name in saved}
        if is_conjugate and dtype.is_complex:
            targets = {name: each.conj() for name, each in targets.items()}
        load(dict(targets), tmp_path)
        for name, target in targets.items():
            expected = torch.zeros(37, dtype=dtype).copy_(saved[name])
            assert torch.equal(target.resolve_conj(), expected), (name, dtype, is_conjugate)


@SIZES
@pytest.mark.parametrize("method", ["resolve_tensor", "transform_tensor", "lookup_tensor"])
@pytest.mark.parametrize("of_class", [True, False])
def test_planners_may_act_on_each_tensor(
    tmp_path: Path, count: int, method: str, *, of_class: bool
) -> None:
    """A tensor has its values before a planner with a method of its own is asked for the next."""
    state = {f"{number}": torch.full((count + number,), float(number)) for number in range(1, 7)}
    save_stock_way(tmp_path, state)
    found: dict[str, torch.Tensor] = {}

    def give(planner: Any, of: Any, *_: object) -> torch.Tensor:
        assert all(bool((each > 0).all()) for each in found.values())
        index = getattr(of, "dest_index", of)
        like = dcp.DefaultLoadPlanner.lookup_tensor(planner, index)
        found[index.fqn] = torch.full_like(like, -1.0)
        return found[index.fqn]

    planner = type("Giving", (dcp.DefaultLoadPlanner,), {method: give} if of_class else {})()
    if not of_class:
        vars(planner)[method] = partial(give, planner)
    load({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path, planner)
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
    save_stock_way(path, state, thread_count=files)
    names = data.draw(st.permutations(sorted(state)))

    def targets(whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: views[int(name) - 1](whole) for name in names}

    ours, stock = torch.zeros(shape), torch.zeros(shape)
    load(targets(ours), path)
    dcp.load(targets(stock), storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("count", [6, 3_000_000], ids=["small", "large"])
def test_tied_tensors_get_what_stock_gives_them(tmp_path: Path, count: int) -> None:
    """One tensor under two names with other values: never a mixture, nor is it called damage."""
    state = {"a": torch.full((count,), 1.0), "b": torch.full((count,), 2.0)}
    save_stock_way(tmp_path, state, thread_count=2)
    ours, by_load, stock = (torch.zeros(count) for _ in range(3))
    load({"a": ours, "b": ours}, tmp_path, verify="crc")
    nostall.load({"a": by_load, "b": by_load}, tmp_path, verify="crc")
    reader = dcp.FileSystemReader(tmp_path)
    dcp.load({"a": stock, "b": stock}, storage_reader=reader, no_dist=True)
    assert torch.equal(ours, stock)
    assert by_load.unique().tolist() in ([1.0], [2.0])


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


@pytest.mark.parametrize(
    "whole", [torch.zeros(1, 8).expand(6, 8), torch.zeros(8).as_strided((2, 4), (2, 1))]
)
def test_parts_of_a_tensor_that_overlaps_itself_share_memory(whole: torch.Tensor) -> None:
    """Though they are beside each other, and each part alone does not overlap."""
    rows = whole.split(1)
    assert all(overlapping_of(rows, [("x", (row, 0)) for row in range(len(rows))]))


def test_unknown_memory_counts_as_shared() -> None:
    """That of sparse tensors and subclasses; tensors without elements share nothing."""
    sparse = torch.eye(3).to_sparse()
    parameter = torch.nn.Parameter(torch.zeros(3))
    shares = overlapping_of([sparse, parameter, torch.zeros(0), torch.zeros(2)])
    assert shares == [True, True, False, False]


@pytest.mark.parametrize("count", [600, 3_000_000], ids=["small", "large"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_load_counts_as_a_change(tmp_path: Path, count: int, *, is_damaged: bool) -> None:
    """Autograd must not use values that were overwritten, even if the load failed then."""
    save_stock_way(tmp_path, {"x": torch.ones(count)})
    target = torch.zeros(count)
    weight = torch.ones(count, requires_grad=True)
    product = (weight * target).sum()
    if is_damaged:
        archive = archive_of(tmp_path, "x")
        overwrite(archive.file, archive.values_end - 1, b"\xff")
        assert isinstance(error_of({"x": target}, tmp_path, verify="crc"), DamagedCheckpointError)
    else:
        load({"x": target}, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@SIZES
def test_each_archive_has_its_own_checksum(tmp_path: Path, count: int) -> None:
    """One without says nothing of others; zeros, as of a lost page, are not taken for none."""
    save_stock_way(tmp_path, {name: torch.full((count,), float(ord(name))) for name in "abc"})
    a, b, c = (archive_of(tmp_path, name) for name in "abc")
    crc32 = a.content[a.values_end - a.begin + 4 :][:4]
    assert a.content.count(crc32) == 2
    without = a.content.replace(crc32, bytes(4))  # as after set_crc32_options(False)
    overwrite(a.file, a.begin, without)
    loaded = {name: torch.zeros(count) for name in "abc"}
    load(loaded, tmp_path, verify="crc")
    assert [loaded[name].unique().item() for name in "abc"] == [97.0, 98.0, 99.0]
    for archive, name, at, damage in ((c, "c", -2, b"\x01"), (b, "b", -16, bytes(32))):
        overwrite(archive.file, archive.values_end + at, damage)
        error = error_of(loaded, tmp_path, verify="crc")
        assert isinstance(error, DamagedCheckpointError)
        assert f"(items {name})" in str(error)
        overwrite(archive.file, archive.begin, archive.content)


@pytest.mark.parametrize("count", [1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_sums_of_pieces_are_the_sum(tmp_path: Path, count: int) -> None:
    """A tensor of several pieces that several threads read; and any damaged byte is found."""
    state = {"x": torch.arange(count, dtype=torch.int32)}
    save_stock_way(tmp_path, state)
    loaded = {"x": torch.zeros(count, dtype=torch.int32)}
    load(loaded, tmp_path, verify="crc")
    assert torch.equal(loaded["x"], state["x"])
    archive = archive_of(tmp_path, "x")
    for at in {1, 2 * count, 4 * count}:
        with flipped(archive.file, archive.values_end - at):
            assert isinstance(error_of(loaded, tmp_path, verify="crc"), DamagedCheckpointError)


def alike() -> dict[str, dict[str, torch.Tensor]]:
    """Two tensors each whose archives have one length: of two dtypes, or one that torch reads."""
    values, square = torch.arange(200_000), torch.arange(700.0 * 700).reshape(700, 700)
    return {
        "float first": {"x": values.to(torch.float32), "y": values.to(torch.int32)},
        "integer first": {"x": values.to(torch.int32), "y": values.to(torch.float32)},
        "transposed": {"x": square, "y": square.t()},
    }


@pytest.mark.parametrize("verify", ["none", "crc"])
@pytest.mark.parametrize("kind", alike())
def test_an_archive_is_not_taken_for_one_like_it(tmp_path: Path, kind: str, verify: Verify) -> None:
    """Another dtype may have the same length of archive, and the shape that the target has."""
    state = alike()[kind]
    save_stock_way(tmp_path, state)
    assert len({len(archive_of(tmp_path, name).content) for name in state}) == 1
    target = {name: torch.zeros(each.shape) for name, each in state.items()}
    load(target, tmp_path, verify=verify, threads=1)
    assert all(torch.equal(target[name], each.float()) for name, each in state.items())


def test_after_an_error_nothing_keeps_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cycle of the error and its traceback, which only the garbage collector would find."""
    save_stock_way(tmp_path, {"x": torch.arange(4_000_000.0)})
    archive = archive_of(tmp_path, "x")
    overwrite(archive.file, archive.begin + 5_000_000, b"\xff\xfe")
    made: list[weakref.ref[torch.Tensor]] = []
    scratch_for = Uploads.scratch_for

    def noting(*arguments: Any) -> torch.Tensor:
        memory = scratch_for(*arguments)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(Uploads, "scratch_for", noting)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(DamagedCheckpointError):
            nostall.load({"x": torch.zeros(4_000_000).double()}, tmp_path, verify="crc")
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


@SIZES
@pytest.mark.parametrize("by_planner", [False, True], ids=["state", "planner"])
@pytest.mark.parametrize("kind", ["sparse", "expanded", "meta", "freed", "empty", "other shape"])
def test_targets_that_cannot_be_filled_are_named(
    tmp_path: Path, count: int, kind: str, *, by_planner: bool
) -> None:
    """By an error that says what to do."""
    save_stock_way(tmp_path, {"x": torch.ones(count)})
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
    planner, state = dcp.DefaultLoadPlanner(), {"x": target}
    if by_planner or kind in ("empty", "other shape", "meta"):
        state["x"] = torch.zeros(count)
        vars(planner).update(resolve_tensor=lambda _: target)
    error = error_of(state, tmp_path, planner=planner)
    assert isinstance(error, OptionError)
    assert "x" in error.message
    assert "saving" not in str(error)
    assert error.phase == "read"
    with pytest.raises(OptionError, match="x"):
        nostall.load({"x": target}, tmp_path)


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
    save_stock_way(tmp_path, {"x": torch.ones(count)})
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
    save_stock_way(tmp_path, {"x": torch.ones(1 << 20)})
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
    save_stock_way(tmp_path, state, thread_count=3)
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
    save_stock_way(tmp_path, state, thread_count=3)

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


# --- threads --------------------------------------------------------------------------------------


class Interrupted(Exception):
    """By the handler of a signal that is not Ctrl-C: of a time limit's alarm, or SIGTERM."""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_thread_whose_start_was_interrupted_ends(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody has noted that it was started."""
    start, numbers = threading.Thread.start, count(1)

    def start_and_raise(thread: threading.Thread) -> None:
        start(thread)
        if next(numbers) == number:
            raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", start_and_raise)
    with suppress(Interrupted), Workers(3) as workers:
        for _ in range(3):
            workers.submit(lambda: None)
    assert next(numbers) == number + 1
    for thread in reading_threads():  # it may be between its last task and its end
        thread.join(SOON_S)
    assert not reading_threads()


def test_ctrl_c_before_the_end_is_begun_does_not_keep_the_process(tmp_path: Path) -> None:
    """No line of Python can close this gap; so the interpreter's exit does not wait for threads."""
    done = run_script("programs/interrupted_workers.py", cwd=tmp_path, timeout_s=SOON_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted\n"


def test_a_thread_that_waits_keeps_nothing() -> None:
    """Memory beside a target would stay until this thread reads again."""
    memory = torch.zeros(3)
    kept = weakref.ref(memory)
    with Workers(1) as workers:
        task = workers.submit(partial([].extend, memory))
        workers.wait(task)
        del memory
        assert kept() is None


def test_what_cannot_have_all_threads_has_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on processes is no reason to fail, unless there is not even one."""
    start, left = threading.Thread.start, 2
    done: list[int] = []

    def start_two(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with Workers(4) as workers:
        for task in [workers.submit(lambda: done.append(1)) for _ in range(8)]:
            workers.wait(task)
        assert len(reading_threads()) == workers.threads == 2
    assert len(done) == 8
    with Workers(4) as workers, pytest.raises(ReadError, match="cannot start a thread to read"):
        workers.submit(lambda: None)
