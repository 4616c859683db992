"""The contract of the storage port, as functions that take an empty storage.

Each of :data:`CHECKS`, or for a file system each of :data:`FILE_SYSTEM_CHECKS`, is called with a
new, empty storage; a failed one raises ``AssertionError``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

from nostall._storage.port import ABSENT, Conflict, Storage

_PAGE = mmap.PAGESIZE
_TAKEN = "a.distcp"
_PUBLISHED = ".metadata"


def parts_make_a_file(storage: Storage) -> None:
    """Threads write parts, in any order if allowed; the last part is shorter than a page."""
    part = storage.least_part(5 * _PAGE)
    assert part % _PAGE == 0
    for length in (0, 1, _PAGE, 5 * _PAGE + 7, part, 2 * part + 7):
        content = _content(length)
        assert _read(storage, _put(storage, f"{length}.distcp", content)) == content


def an_existing_file_stays(storage: Storage) -> None:
    """In a file system, a second file of a name gets another one; ``on_created`` gets it first."""
    assert _put(storage, _TAKEN, b"first") == _TAKEN
    other = _put(storage, _TAKEN, b"second")
    assert other != _TAKEN
    assert (_read(storage, _TAKEN), _read(storage, other)) == (b"first", b"second")


def an_unfinished_file_leaves_nothing(storage: Storage) -> None:
    """Closing an unfinished file removes it and frees its name; a finished one stays."""
    part = storage.least_part(2 * _PAGE)
    upload = storage.put(_TAKEN, 2 * part, on_created=lambda _: None)
    upload.write(_memory(bytes(2 * part)), 0, part)
    for _ in range(2):
        upload.close()
    assert storage.list() == []
    assert _put(storage, _TAKEN, b"whole") == _TAKEN
    storage.flush()
    assert storage.list() == [_TAKEN]


def ranges_are_read(storage: Storage) -> None:
    """Exactly the requested bytes, fewer only at the end."""
    content = _content(1000)
    _put(storage, _TAKEN, content)
    with closing(storage.open(_TAKEN)) as source:
        assert source.stat.nbytes == storage.stat(_TAKEN).nbytes == len(content)
        for begin, length in ((0, 1000), (0, 1), (999, 1), (17, 400), (900, 500), (1000, 5)):
            memory = bytearray(length)
            count = source.read_into(begin, memoryview(memory))
            assert memory[:count] == content[begin : begin + length]
            first, second = bytearray(length // 3), bytearray(length - length // 3)
            again = source.read_into(begin, memoryview(first), memoryview(second))
            assert again == count
            assert (first + second)[:count] == memory[:count]
        source.close()


def what_does_not_exist_is_not_found(storage: Storage) -> None:
    """``open`` and ``stat`` raise, also after a removal; removing a name twice is no error."""
    _put(storage, _TAKEN, b"content")
    _put(storage, "b.distcp", b"content")
    for _ in range(2):
        storage.remove([_TAKEN, "was never there"])
        storage.flush()
    assert storage.list() == ["b.distcp"]
    for look in (storage.open, storage.stat):
        try:
            look(_TAKEN)
        except FileNotFoundError:
            continue
        raise AssertionError(f"{look} has found a removed file")


def publishing_replaces_at_once(storage: Storage) -> None:
    """A reader gets the whole content of the version that it has opened, or an error."""
    contents = [bytes([number]) * (number * 1000) for number in range(1, 30)]
    storage.publish(_PUBLISHED, [contents[0]])

    def read() -> None:
        for _ in range(60):
            with suppress(FileNotFoundError, Conflict):
                assert _read(storage, _PUBLISHED) in contents

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for content in contents:
            storage.publish(_PUBLISHED, [content[:500], content[500:]])
        for reader in readers:
            reader.result()
    assert _read(storage, _PUBLISHED) == contents[-1]
    assert storage.list() == [_PUBLISHED]


def publishing_depends_on_what_was_there(storage: Storage) -> None:
    """If the name has another version than expected, its content stays."""
    storage.publish(_PUBLISHED, [b"first"], expected=ABSENT)
    first = storage.stat(_PUBLISHED).version
    assert first == storage.stat(_PUBLISHED).version != ABSENT
    storage.publish(_PUBLISHED, [b"second!"], expected=first)
    for expected in (ABSENT, first):
        try:
            storage.publish(_PUBLISHED, [b"third"], expected=expected)
        except Conflict:
            assert _read(storage, _PUBLISHED) == b"second!"
        else:
            raise AssertionError("published although another version was there")
    assert storage.list() == [_PUBLISHED]


def publishing_can_be_given_up(storage: Storage) -> None:
    """An error from ``before`` leaves the present content, and nothing of the new one."""
    storage.publish(_PUBLISHED, [b"first"])

    def give_up() -> None:
        raise InterruptedError

    with suppress(InterruptedError):
        storage.publish(_PUBLISHED, [b"sec", b"ond"], before=give_up)
        raise AssertionError("published although it was given up")
    assert _read(storage, _PUBLISHED) == b"first"
    assert storage.list() == [_PUBLISHED]


CHECKS: tuple[Callable[[Storage], None], ...] = (
    *(parts_make_a_file, an_unfinished_file_leaves_nothing, ranges_are_read),
    *(what_does_not_exist_is_not_found, publishing_replaces_at_once),
    *(publishing_depends_on_what_was_there, publishing_can_be_given_up),
)
"""For any storage."""
FILE_SYSTEM_CHECKS = (*CHECKS, an_existing_file_stays)
"""For file systems: in object stores a name is never requested for another file."""


def _memory(content: bytes) -> memoryview:
    """Page-aligned and padded to whole pages."""
    memory = mmap.mmap(-1, -(-max(1, len(content)) // _PAGE) * _PAGE)
    memory[: len(content)] = content
    return memoryview(memory)


def _put(storage: Storage, name: str, content: bytes) -> str:
    """Put a file in the shortest parts; returns its name."""
    created: list[str] = []
    upload = storage.put(name, len(content), on_created=created.append)
    assert created == [upload.name]
    memory = _memory(content)
    part_nbytes = storage.least_part(len(content))
    begins = range(0, len(content), part_nbytes)
    with ThreadPoolExecutor(4 if upload.any_order else 1) as pool:
        parts = [
            pool.submit(upload.write, memory, begin, min(begin + part_nbytes, len(content)))
            for begin in (reversed(begins) if upload.any_order else begins)
        ]
        for part in parts:
            part.result()
    upload.finish()
    upload.close()
    return upload.name


def _content(nbytes: int) -> bytes:
    """Random bytes without a final carriage return.

    gcsfs sends a small file between two line feeds, and an emulator takes the three for two.
    """
    return os.urandom(nbytes).removesuffix(b"\r").ljust(nbytes, b".")


def _read(storage: Storage, name: str) -> bytes:
    with closing(storage.open(name)) as source:
        content = bytearray(source.stat.nbytes)
        assert source.read_into(0, memoryview(content)) == len(content)
        return bytes(content)
