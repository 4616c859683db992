"""Shared bytes are what they were made from, for every process that reads them."""

from __future__ import annotations

import gc
import os
import zlib

import pytest

from nostall._model import shared_bytes
from nostall._model.shared_bytes import SharedBytes, SharedPart


@pytest.fixture
def content() -> bytes:
    return os.urandom(3 * shared_bytes.LONG_NBYTES)


def test_parts_are_the_bytes_that_were_shared(content: bytes) -> None:
    """Long ones are not copied, and are known again; short ones are bytes of their own."""
    shared = SharedBytes((content[:5], memoryview(content)[5:]))
    long, short = shared.piece(7, len(content)), shared.piece(3, 9)
    assert (bytes(long), short) == (content[7:], content[3:9])
    assert shared.nbytes == len(content)
    assert isinstance(long, memoryview)
    assert long.readonly
    copied = bytes(long)
    parts, others = shared.divided([(100, long), (5, short), (8, copied)])
    assert parts == [SharedPart(at=100, begin=7, nbytes=len(long))]
    assert others == [(5, short), (8, copied)]
    assert os.pread(shared.fd, len(content), 0) == content


@pytest.mark.parametrize("before", [b"", b"something before"])
def test_checksums_continue_those_of_other_bytes(content: bytes, before: bytes) -> None:
    """As ``zlib.crc32`` does, whether a piece is a known part or not."""
    shared = SharedBytes((content,))
    for piece in (shared.piece(0, len(content)), shared.piece(1, 8), b"anything", b""):
        assert shared.crc32(piece, zlib.crc32(before)) == zlib.crc32(before + bytes(piece))


def test_nothing_is_left_of_what_nobody_needs(content: bytes) -> None:
    """Neither its descriptors nor its memory."""
    gc.collect()
    before = os.listdir("/proc/self/fd")
    shared = SharedBytes((content,))
    shared.piece(0, len(content))
    assert os.listdir("/proc/self/fd") != before
    del shared
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_a_forked_child_reads_them(content: bytes) -> None:
    """It may save with what its parent has kept; by its exit status."""
    shared = SharedBytes((content,))
    child = os.fork()
    if not child:
        os._exit(bytes(shared.piece(0, len(content))) != content)
    _, status = os.waitpid(child, 0)
    assert status == 0
