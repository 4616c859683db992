"""Reads past the page cache: the same bytes as through it, and only of what is not in it."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

import nostall
from benchmarks.machine import bring_in, cached_pages, cached_share, drop
from nostall import filesystem_reader
from nostall._ranks.group import Coordination
from nostall._storage import uncached
from nostall._storage.uncached import UncachedFiles, UncachedSource, is_cached
from nostall.errors import ReadError
from support.waiting import is_direct, refusing

PAGE = mmap.PAGESIZE
NBYTES = 12 * (1 << 20) + 1234
"""Three pieces, and an end that is no end of a page."""


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """A file that is on storage, with content that is nowhere the same."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        _write(path, os.urandom(NBYTES))
        yield path


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        os.fsync(stream.fileno())


def _read(path: Path, offset: int = 0, nbytes: int = NBYTES) -> bytes:
    memory = bytearray(nbytes)
    with closing(_open(path)) as source:
        read = source.read_into(offset, memoryview(memory))
    return bytes(memory[:read])


def _open(path: Path) -> UncachedSource:
    return UncachedFiles(str(path.parent)).open(path.name)


def _expected(path: Path, offset: int = 0, nbytes: int = NBYTES) -> bytes:
    with path.open("rb", buffering=0) as stream:
        return os.pread(stream.fileno(), nbytes, offset)


@pytest.fixture
def past_cache(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that are read past the page cache, from first to end."""
    ranges: list[tuple[int, int]] = []
    really = uncached._read_pages

    def record(fd: int, offset: int, memories: Any, nbytes: int, scratch: memoryview) -> int:
        assert sum(map(len, memories)) == nbytes
        ranges.append((offset, offset + nbytes))
        return really(fd, offset, memories, nbytes, scratch)

    monkeypatch.setattr(uncached, "_read_pages", record)
    return ranges


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is read past the page cache, whatever is in it."""
    monkeypatch.setattr(uncached, "is_cached", lambda *_: False)


def _descriptors_of(path: Path) -> int:
    """How many descriptors of this process refer to a file; other threads may open and close."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was that of this listing
            count += each.readlink() == path
    return count


# --- which way ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cached",
    [[], [(0, NBYTES)], [(0, 4 << 20), (5 << 20, (5 << 20) + PAGE)]],
    ids=["cold", "warm", "in part"],
)
def test_each_piece_is_read_where_most_of_it_is(
    file: Path, past_cache: list[tuple[int, int]], cached: list[tuple[int, int]]
) -> None:
    """Heads that were read before do not count for what is behind them; nothing is cached by it."""
    expected = _expected(file)
    drop([file])
    bring_some_in(file, cached)
    pages = cached_pages(file)  # it is a request: the kernel may keep some, and tmpfs keeps all
    assert _read(file) == expected
    pieces = [(0, 4 << 20), (4 << 20, 8 << 20), (8 << 20, NBYTES)]
    assert past_cache == [each for each in pieces if 2 * _cached(pages, *each) < each[1] - each[0]]
    for piece in past_cache:
        assert _cached(cached_pages(file), *piece) <= _cached(pages, *piece)


def _cached(pages: list[bool], begin: int, end: int) -> int:
    return PAGE * sum(pages[begin // PAGE : -(-end // PAGE)])


def bring_some_in(path: Path, ranges: list[tuple[int, int]]) -> None:
    """Read ranges through the page cache, without what the kernel would read ahead."""
    with path.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for begin, end in ranges:
            os.pread(stream.fileno(), end - begin, begin)


def test_short_reads_go_through_the_page_cache(
    file: Path, past_cache: list[tuple[int, int]]
) -> None:
    """Heads and small items."""
    drop([file])
    assert len(_read(file, 5, 4096)) == 4096
    assert past_cache == []


def test_a_file_in_memory_is_read_from_there(past_cache: list[tuple[int, int]]) -> None:
    """A tmpfs is its own page cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "file"
        _write(path, os.urandom(NBYTES))
        drop([path])
        assert _read(path) == _expected(path)
        assert past_cache == []


@pytest.mark.parametrize(
    "number", [uncached._CACHESTAT, 1 << 20], ids=["cachestat", "mincore, on an older kernel"]
)
def test_what_is_cached_is_counted_page_by_page(
    file: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the pages decide, wherever they are; both ways to ask give the same answers."""
    monkeypatch.setattr(uncached, "_CACHESTAT", number)
    drop([file])
    on_storage = cached_share([file]) == 0
    with file.open("rb", buffering=0) as stream:
        fd = stream.fileno()
        assert is_cached(fd, 0, NBYTES) is not on_storage
        bring_some_in(file, [(0, 8 * PAGE)])
        assert is_cached(fd, 0, 8 * PAGE)
        assert is_cached(fd, 7, 16 * PAGE)
        assert is_cached(fd, 7, 20 * PAGE) is not on_storage
        bring_in([file])
        assert is_cached(fd, 0, NBYTES)
        assert is_cached(fd, NBYTES - 300_001, NBYTES)


def test_where_the_kernel_does_not_tell_all_counts_as_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then reads are those of any other program."""
    monkeypatch.setattr(uncached, "_CACHESTAT", 1 << 20)
    reading, writing = os.pipe()  # cannot be mapped
    try:
        assert is_cached(reading, 0, 8 * PAGE)
    finally:
        os.close(reading)
        os.close(writing)


# --- the same bytes -------------------------------------------------------------------------------


@given(
    offset=st.integers(NBYTES - 70 * PAGE, NBYTES + PAGE),
    nbytes=st.integers(0, 40 * PAGE),
    address=st.integers(0, PAGE),
    aligned=st.booleans(),
    cuts=st.lists(st.integers(0, 40 * PAGE), max_size=2),
    cached=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 12)), max_size=4),
)
def test_any_range_is_read_into_any_memory(
    file: Path,
    offset: int,
    nbytes: int,
    address: int,
    *,
    aligned: bool,
    cuts: list[int],
    cached: list[tuple[int, int]],
) -> None:
    """Ranges match those of ``pread``, whatever is cached; memory beside them is not changed."""
    expected = _expected(file, offset, nbytes)
    drop([file])
    start = (NBYTES // PAGE - 70) * PAGE
    bring_some_in(
        file, [(start + first * PAGE, start + (first + pages) * PAGE) for first, pages in cached]
    )
    if aligned:  # to the pages of the file
        address = offset % PAGE
    around = mmap.mmap(-1, nbytes + 2 * PAGE)
    around.write(b"\xa5" * len(around))
    memory = memoryview(around)
    places = [0, *sorted(min(each, nbytes) for each in cuts), nbytes]
    with (
        patch.multiple(uncached, _LEAST_NBYTES=PAGE, _PIECE_NBYTES=4 * PAGE),
        closing(_open(file)) as source,
    ):
        target = memory[address : address + nbytes]
        read = source.read_into(offset, *(target[begin:end] for begin, end in pairwise(places)))
    assert read == len(expected)
    assert memory[address : address + read] == expected
    assert bytes(memory[:address]) == b"\xa5" * address
    behind = memory[address + nbytes :]
    assert bytes(behind) == b"\xa5" * len(behind)


def by_write(path: Path, content: bytes) -> None:
    with path.open("r+b") as stream:
        stream.write(content)


def by_mapping(path: Path, content: bytes) -> None:
    with path.open("r+b") as stream, mmap.mmap(stream.fileno(), len(content)) as mapped:
        mapped[:] = content


@pytest.mark.parametrize("change", [by_write, by_mapping])
@pytest.mark.usefixtures("nothing_cached")
def test_changes_that_are_not_on_storage_yet_are_seen(
    tmp_path: Path, change: Callable[[Path, bytes], None], past_cache: list[tuple[int, int]]
) -> None:
    """A file that was just written through the page cache, and not synced."""
    path = tmp_path / "file"
    _write(path, bytes(NBYTES))
    for _ in range(5):
        content = os.urandom(NBYTES)
        change(path, content)
        assert _read(path) == content
    assert past_cache


@pytest.mark.parametrize("left", [0, PAGE, (2 << 20) + 1, NBYTES - 1])
@pytest.mark.usefixtures("nothing_cached")
def test_a_file_that_has_become_shorter_gives_fewer_bytes(tmp_path: Path, left: int) -> None:
    """So a load finds out, as it did through the page cache."""
    path, content = tmp_path / "file", os.urandom(NBYTES)
    _write(path, content)
    memory = bytearray(NBYTES)
    with closing(_open(path)) as source:
        os.truncate(path, left)
        assert source.read_into(0, memoryview(memory)) == left
        assert source.read_into(3 << 20, memoryview(memory)) == max(0, left - (3 << 20))
    with closing(_open(path)) as source:
        assert source.read_into(0, memoryview(memory)) == left
    assert memory[:left] == content[:left]


# --- refusals and errors --------------------------------------------------------------------------


def _opens_direct(_path: Any, flags: int, *_: Any) -> bool:
    return bool(flags & os.O_DIRECT)


@pytest.mark.parametrize(
    ("name", "is_meant", "code"),
    [
        ("open", _opens_direct, errno.EINVAL),
        ("preadv", is_direct, errno.EINVAL),
        ("preadv", is_direct, errno.ENOTSUP),
    ],
)
@pytest.mark.usefixtures("nothing_cached")
def test_a_file_system_without_direct_reads_is_asked_once(
    file: Path, name: str, is_meant: Callable[..., bool], code: int
) -> None:
    """Its files are read through the page cache; some file systems refuse only the read."""
    with refusing(os, name, is_meant, code) as refused:
        assert _read(file) == _expected(file)
    assert len(refused) == 1


@pytest.mark.usefixtures("nothing_cached")
def test_without_memory_to_read_into_the_page_cache_is_used(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs none of this process."""
    expected = _expected(file)
    monkeypatch.setattr(mmap, "mmap", Mock(side_effect=OSError(errno.ENOMEM, "no memory")))
    assert _read(file) == expected


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("offset", [0, 1, 1500, PAGE - 1, 3 * PAGE])
def test_a_tensor_of_one_piece_is_one_read(
    file: Path, offset: int, past_cache: list[tuple[int, int]]
) -> None:
    """With its head and its checksum, wherever its archive begins; not one more of a few pages."""
    nbytes = (4 << 20) + 2000
    assert _read(file, offset, nbytes) == _expected(file, offset, nbytes)
    assert past_cache == [(offset, offset + nbytes)]


@pytest.mark.usefixtures("nothing_cached")
def test_an_error_of_storage_is_raised(file: Path) -> None:
    """It is no refusal: through the page cache the same would follow, perhaps after a minute."""
    with (
        refusing(os, "preadv", is_direct, errno.EIO),
        pytest.raises(OSError, match=r"Input/output error"),
    ):
        _read(file)


@pytest.mark.usefixtures("nothing_cached")
def test_what_a_direct_read_leaves_out_is_read_through_the_page_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call may return less than was requested."""
    really = os.preadv

    def read_less(fd: int, buffers: Any, offset: int) -> int:
        less = [buffers[0][: len(buffers[0]) - 2 * PAGE]]
        return really(fd, less if is_direct(fd) else buffers, offset)

    monkeypatch.setattr(os, "preadv", read_less)
    assert _read(file, 777) == _expected(file, 777)


@pytest.mark.usefixtures("nothing_cached")
def test_a_replaced_file_is_read_as_it_was_when_it_was_opened(tmp_path: Path) -> None:
    """The descriptor for direct reads is opened later, and not by its name."""
    path, content = tmp_path / "file", os.urandom(NBYTES)
    _write(path, content)
    memory = bytearray(NBYTES)
    with closing(_open(path)) as source:
        _write(tmp_path / "other", os.urandom(NBYTES))
        (tmp_path / "other").rename(path)
        assert source.read_into(0, memoryview(memory)) == NBYTES
    assert memory == content


# --- threads and descriptors ----------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_cached")
def test_several_threads_read_at_once(file: Path, past_cache: list[tuple[int, int]]) -> None:
    """One further descriptor is opened for all of them, and closing twice closes it once."""
    memory = memoryview(bytearray(NBYTES))
    source = _open(file)
    step = 600_011

    def read(begin: int) -> int:
        return source.read_into(begin, memory[begin : begin + step])

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(read, range(0, NBYTES, step))) == NBYTES
    assert len(past_cache) == -(-NBYTES // step)
    assert _descriptors_of(file) == 2
    source.close()
    source.close()
    assert _descriptors_of(file) == 0
    assert memory == _expected(file)


def test_nothing_is_left_open_by_what_cannot_be_opened(tmp_path: Path) -> None:
    """A directory is no file."""
    with pytest.raises(ReadError):
        _open(tmp_path)
    with suppress(FileNotFoundError):
        _open(tmp_path / "nothing")
    assert _descriptors_of(tmp_path) == 0


# --- loads ----------------------------------------------------------------------------------------


def _load_cold(path: Path) -> tuple[float, float]:
    """Load a checkpoint of large tensors; the share of its shard file that is cached around it."""
    state = {f"x{number}": torch.full((500_003,), number) for number in range(4)}
    dcp.save(state, storage_writer=nostall.FileSystemWriterAsync(path))
    files = list(path.glob("*.distcp"))
    drop(files)
    before = cached_share(files)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, storage_reader=nostall.FileSystemReader(path))
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    return before, cached_share(files)


def test_a_load_reads_cold_files_past_the_page_cache(tmp_path: Path) -> None:
    """Only the heads of the tensors are there afterwards."""
    before, after = _load_cold(tmp_path)
    assert after <= before + 0.25


def test_ranks_that_may_read_the_same_share_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of eight ranks on a host to need a file reads it from storage for all."""
    ranks = Coordination()
    ranks.world_size = 8
    monkeypatch.setattr(filesystem_reader, "coordination_for", lambda _: ranks)
    _, after = _load_cold(tmp_path)
    assert after > 0.9
