"""Shard files written through the user's callables: an ``open`` replacement and stream transforms.

Such files are written front to back, one thread per file. A transform (compression, encryption)
changes lengths, so the items' offsets are known only after writing and are returned in the receipt.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, Protocol


class StreamTransform(Protocol):
    """The part of DCP's ``StreamTransformExtension`` that is used."""

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """A stream that transforms what is written to it and writes the result to ``output``."""


class StreamTarget(NamedTuple):
    """The user's callables for one save."""

    open_file: Callable[..., Any]
    transforms: Sequence[StreamTransform] = ()


class _Output(io.RawIOBase):
    """Counts what a transform writes, as not every stream can tell its position.

    Flushes instead of closing: a transform closes its output, which holds many items.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        nbytes = memoryview(piece).nbytes
        self._raw.write(piece)
        self.nbytes += nbytes
        return nbytes

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
    before_each: Callable[[], None],
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
            output = _Output(stream) if target.transforms else None
            sink: Any = stream if output is None else output
            for transform in target.transforms:
                sink = transform.transform_to(sink)
            for begin in range(offset, offset + length, chunk_nbytes):
                before_each()
                sink.write(image[begin : min(begin + chunk_nbytes, offset + length)])
            if output is not None:
                sink.close()
            written = length if output is None else output.nbytes
            extents.append((at, written))
            at += written
        if sync:
            stream.flush()
            # Without a descriptor, the stream's close has to make the file durable.
            with suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(stream.fileno())
    return tuple(extents)
