"""Shard files written through the user's callables: an ``open`` replacement and stream transforms.

Such files are written front to back, one thread per file. A transform (compression, encryption)
changes lengths, so the items' offsets are known only after writing and are returned in the receipt.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol


class StreamTransform(Protocol):
    """The part of DCP's ``StreamTransformExtension`` that is used."""

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream that transforms what is written to it and writes the result to ``output``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTarget:
    """The user's callables for one save."""

    open_file: Callable[..., Any]
    transforms: Sequence[StreamTransform] = ()


class _KeepOpen(io.RawIOBase):
    """Flushes instead of closing: a transform closes its output, which holds many items."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self._raw.write(piece)
        return memoryview(piece).nbytes

    def close(self) -> None:
        if not self.closed:
            self._raw.flush()
        super().close()


def write_stream(
    target: StreamTarget,
    path: str,
    image: memoryview,
    blobs: Sequence[tuple[int, int]],
    *,
    chunk_nbytes: int,
    sync: bool,
    before_each: Callable[[], None] = lambda: None,
) -> tuple[tuple[int, int], ...]:
    """Write the blobs of one sealed image to a stream.

    ``before_each`` is called before every piece and may raise.

    Returns:
        Offset and length of each blob in the finished file.
    """
    extents = []
    at = 0
    with target.open_file(path, "wb") as stream:
        for offset, length in blobs:
            counted = _Counting(stream)
            sink: Any = _KeepOpen(counted) if target.transforms else counted
            for transform in target.transforms:
                sink = transform.transform_to(sink)
            for begin in range(offset, offset + length, chunk_nbytes):
                before_each()
                sink.write(image[begin : min(begin + chunk_nbytes, offset + length)])
            if target.transforms:
                sink.close()
            extents.append((at, counted.nbytes))
            at += counted.nbytes
        if sync:
            stream.flush()
            # Without a descriptor, the stream's close has to make the file durable.
            with suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(stream.fileno())
    return tuple(extents)


class _Counting:
    """Counts the bytes written, since not every stream can tell its position."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.nbytes = 0

    def write(self, piece: Any) -> int:
        nbytes = memoryview(piece).nbytes
        self._stream.write(piece)
        self.nbytes += nbytes
        return nbytes

    def flush(self) -> None:
        self._stream.flush()
