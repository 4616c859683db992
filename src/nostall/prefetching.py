"""``nostall.prefetch``: a checkpoint comes into memory while a program still starts.

A process of its own, which never imports torch, reads what this rank is likely to need: files into
the page cache, objects into memory that it shares with this process and other ranks of the host. A
load ends it, and reads the rest itself.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from nostall._commit.commit import committed_latest_first
from nostall._commit.manifest import manifest_alone
from nostall._memory.arena import available_nbytes, memory_descriptor
from nostall._model.names import METADATA_NAME, is_given_to_shards
from nostall._model.threads import spawn_or_run
from nostall._storage.locations import (
    identity,
    is_address,
    place_of,
    storage_at,
    storage_options_of,
    take_storage_options,
)
from nostall._storage.port import Files, ReadableFiles, Source, between, may_have, open_to_read

__all__ = ["prefetch"]

_NAME = "nostall:prefetch"
_THREADS = 4
_PIECE_NBYTES = 8 << 20
_RECORD_NBYTES = 4096
"""In memory each piece is followed by what it is: address and version of its file, first byte and
length, as a line of JSON."""
_SLOT_NBYTES = _PIECE_NBYTES + _RECORD_NBYTES
_END_TIMEOUT_S = 1.0
"""Longest wait for a killed process, which may be waiting for storage."""


def prefetch(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Begin to bring a checkpoint into this host's memory, and return at once.

    Call it first in a program, before imports, the model and compiling. If as many ranks as
    ``torchrun`` has started (``WORLD_SIZE``) have saved the checkpoint, each brings the files of
    its own number, otherwise an even share of all; the ranks of a host, at most half of the
    available memory. A load of the checkpoint by nostall ends what its rank has not finished, and
    reads the rest; errors of storage are the load's.

    Files come into the page cache, parts of an object store into memory. A rank gives that back
    after a load that needs half of it, a manager's restore, or another ``prefetch``. Until then
    other ranks of the host that ``torchrun`` has started use it, too, if they have prefetched.

    Args:
        path: Checkpoint directory, or an address in an object store; or what contains checkpoints,
            such as the root of a manager, of which the one that was committed last is taken.
        storage_options: As of :class:`nostall.FileSystemWriterAsync`.

    Raises:
        OptionError: ``path`` cannot name a checkpoint.
    """
    from nostall._writer.trainer_side import import_paths  # with a package the process may not find

    place = identity(place_of(path, storage_options))
    stop_prefetching()
    with suppress(OSError):  # memory is refused, or a process
        memory = (memory_descriptor(_NAME),) if is_address(place) else ()
        job = {
            "path": place,
            "rank": _number("RANK", 0),
            "world_size": _number("WORLD_SIZE", 1),
            "most_nbytes": available_nbytes() // (2 * _number("LOCAL_WORLD_SIZE", 1)),
            "parent": os.getpid(),
            "memory": memory,
            "options": storage_options_of(place),
        }
        paths = [str(Path(__file__).resolve().parents[1]), *(import_paths() if memory else ())]
        entry = (
            "import json, os, sys; os.nice(10); job = json.load(sys.stdin);"
            f" sys.path += {paths!r}; from {__name__} import main; main(**job)"
        )
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", entry],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=memory,
        )
        running[place] = _Prefetch(process, memory)
        assert process.stdin is not None
        with process.stdin as stream:  # not as arguments: options may be secret
            stream.write(json.dumps(job).encode())


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) >= default else default


# --- for loads ------------------------------------------------------------------------------------


class _Prefetch(NamedTuple):
    """A process that brings a checkpoint."""

    process: subprocess.Popen[bytes]
    memory: tuple[int, ...]
    """The descriptor of what is brought from an object store; empty for files."""

    def release(self) -> None:
        """Give the memory back."""
        for fd in self.memory:
            os.close(fd)

    def stop(self) -> None:
        """End the process. Idempotent."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT_S)


running: dict[str, _Prefetch] = {}
"""Prefetches that are in progress or unused, by the path or address that was given."""
_lock = threading.Lock()


def _start_over() -> None:
    """In a forked child: forget the prefetches, which are the parent's."""
    global _lock  # noqa: PLW0603  # the process has one
    for each in running.values():
        each.release()  # what the child does not give back, the parent cannot
    running.clear()
    _lock = threading.Lock()  # another thread may have held it at the fork


os.register_at_fork(after_in_child=_start_over)


def stop_prefetching() -> None:
    """End all prefetches, and give back what was not used."""
    with _lock:
        while running:
            _, ended = running.popitem()
            ended.stop()
            ended.release()


atexit.register(stop_prefetching)


def with_prefetched(files: ReadableFiles, place: str, nbytes: int) -> ReadableFiles:
    """The files of a checkpoint, parts of which may be in memory, for a load of ``nbytes``."""
    within = f"{identity(place)}/"
    with _lock:
        for begun in [each for each in running if within.startswith(f"{each}/")]:
            prefetch = running[begun]
            prefetch.stop()
            if prefetch.memory:
                files = _Brought(files, _memory_of_host(prefetch.memory))
            if nbytes >= sum(os.fstat(fd).st_blocks * 512 for fd in prefetch.memory) // 2:
                del running[begun]
                prefetch.release()
    return files


def _memory_of_host(own: Iterable[int]) -> list[int]:
    """New descriptors of what this rank and others of this host have brought.

    Ranks have one parent, and may open each other's descriptors.
    """
    import psutil  # which the process that reads may not find

    found = {os.fstat(fd).st_ino: os.dup(fd) for fd in own}
    ranks: list[psutil.Process] = []
    with suppress(psutil.Error):  # one has ended meanwhile, or is hidden
        if _number("LOCAL_WORLD_SIZE", 1) > 1 and (launcher := psutil.Process().parent()):
            ranks = launcher.children()
    for rank in ranks:
        for path in glob(f"/proc/{rank.pid}/fd/*"):
            with suppress(OSError):  # it was closed meanwhile
                is_memory = f"/memfd:{_NAME} " in os.readlink(path)
                if is_memory and (number := os.stat(path).st_ino) not in found:
                    found[number] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return [*found.values()]


class _Held(NamedTuple):
    """A piece of a file; a descriptor of the memory that has it, and where."""

    begin: int
    end: int
    fd: int
    at: int


class _Brought:
    """Files of a store, parts of which are in memory."""

    def __init__(self, files: ReadableFiles, memory: Sequence[int]) -> None:
        # The system takes 0.1 s to free a gigabyte, which no load waits for.
        weakref.finalize(self, spawn_or_run, "nostall-prefetch", lambda: [*map(os.close, memory)])
        self.where = files.where
        self._files = files
        self._pieces: defaultdict[tuple[str, str], list[_Held]] = defaultdict(list)
        for fd in memory:
            for at in range(0, os.fstat(fd).st_size, _SLOT_NBYTES):
                record = os.pread(fd, _RECORD_NBYTES, at + _PIECE_NBYTES).rstrip(b"\0")
                if record.endswith(b"\n"):
                    where, version, begin, nbytes = json.loads(record)
                    self._pieces[where, version].append(_Held(begin, begin + nbytes, fd, at))

    def open(self, name: str) -> Source:
        source = self._files.open(name)
        pieces = self._pieces.get((self.where(name), str(source.stat.version)))
        return source if pieces is None else _BroughtSource(self, source, sorted(pieces))


class _BroughtSource:
    """A file whose first bytes of a range may be in memory."""

    def __init__(self, files: _Brought, source: Source, pieces: list[_Held]) -> None:
        self.stat = source.stat
        self.close = source.close
        self._source = source
        self._files = files  # whose end closes the memory
        self._pieces = pieces
        self._begins = [piece.begin for piece in pieces]

    def read_into(self, offset: int, *memories: memoryview) -> int:
        end = min(offset + sum(map(len, memories)), self.stat.nbytes)
        reached = offset
        while reached < end:
            begin, stop, fd, at = self._pieces[max(0, bisect_right(self._begins, reached) - 1)]
            targets = between(memories, reached - offset, min(stop, end) - offset)
            found = os.preadv(fd, targets, at + reached - begin) if begin <= reached < stop else 0
            if not found:
                rest = between(memories, reached - offset, end - offset)
                return reached - offset + self._source.read_into(reached, *rest)
            reached += found
        return max(0, end - offset)


# --- the process that reads -----------------------------------------------------------------------


class _Piece(NamedTuple):
    """Neighbouring bytes of a file."""

    name: str
    begin: int
    nbytes: int


def main(
    *,
    path: str,
    rank: int,
    world_size: int,
    most_nbytes: int,
    parent: int,
    memory: list[int],
    options: str,
) -> None:
    """Read a rank's part of a checkpoint while the parent lives; from a store into a descriptor."""
    take_storage_options(path, options)
    if not may_have(storage_at(path), METADATA_NAME):
        path = committed_latest_first(path)[0]
    storage = storage_at(path)
    # Its next() is one instruction of the interpreter, so threads can share it.
    pieces = iter([*enumerate(_pieces(storage, rank, world_size, most_nbytes))])

    def read(buffer: bytearray) -> None:
        for name, of_file in groupby(pieces, key=lambda numbered: numbered[1].name):
            with closing(storage.open(name)) as source:
                for number, (_, begin, nbytes) in of_file:
                    if os.getppid() != parent:
                        return
                    part, at = memoryview(buffer)[:nbytes], number * _SLOT_NBYTES
                    is_whole = source.read_into(begin, part) == nbytes
                    if memory and is_whole and os.pwrite(memory[0], part, at) == nbytes:
                        record = storage.where(name), str(source.stat.version), begin, nbytes
                        line = f"{json.dumps(record)}\n".encode()
                        if len(line) <= _RECORD_NBYTES:
                            os.pwrite(memory[0], line, at + _PIECE_NBYTES)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(read, [bytearray(_PIECE_NBYTES) for _ in range(_THREADS)]))


def _pieces(storage: Files, rank: int, world_size: int, most_nbytes: int) -> list[_Piece]:
    """A rank's part, in the order of files and offsets."""
    with open_to_read(storage, METADATA_NAME) as stream:
        manifest = manifest_alone(stream)
    if manifest is None:
        names = sorted(filter(is_given_to_shards, storage.list()))
        sizes = {name: storage.stat(name).nbytes for name in names}
    else:
        sizes = {file.name: file.nbytes for file in sorted(manifest.files)}
    # As stock names them: "__3_0.distcp".
    ranks = {name: name.lstrip("_").partition("_")[0] for name in sizes}
    total, begin, end = sum(sizes.values()), 0, most_nbytes
    if {*ranks.values()} == {*map(str, range(world_size))}:
        sizes = {name: nbytes for name, nbytes in sizes.items() if ranks[name] == str(rank)}
    else:
        begin, end = (total * each // world_size for each in (rank, rank + 1))
        end = min(end, begin + most_nbytes)
    found, offset = list[_Piece](), 0
    for name, nbytes in sizes.items():
        first, last = max(begin - offset, 0), min(end - offset, nbytes)
        found += [
            _Piece(name, at, min(_PIECE_NBYTES, last - at))
            for at in range(first, last, _PIECE_NBYTES)
        ]
        offset += nbytes
    return found
