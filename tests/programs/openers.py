"""Ways to open a shard file that a user may have; importable without torch, as in the writer."""

from __future__ import annotations

import errno
import os
import threading
from typing import IO, Any

from typing_extensions import Self


def open_and_sign(path: str, mode: str) -> IO[Any]:
    """Open a file, and leave a note of which process did."""
    with open(f"{path}.opened-by", "w") as note:
        note.write(str(os.getpid()))
    return open(path, mode)


def open_nothing(path: str, mode: str) -> IO[Any]:
    """Storage that refuses every open."""
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


class Upload:
    """A stream with the least that is needed: no descriptor, no position, no readable bytes."""

    def __init__(self, path: str, mode: str) -> None:
        assert mode == "wb"
        self._stream = open(path, mode)  # noqa: SIM115  # closed by __exit__, which every opener of a shard file calls

    def write(self, piece: Any) -> int:
        return self._stream.write(piece)

    def flush(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


class FullUpload(Upload):
    """Takes the beginning of a file and no more."""

    taken = 0

    def write(self, piece: Any) -> int:
        self.taken += memoryview(piece).nbytes
        if self.taken > 10_000:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().write(piece)


_both = threading.Barrier(2)


def open_pairs(path: str, mode: str) -> IO[Any]:
    """Open a file when another one is opened at the same time."""
    _both.wait(60)
    return open(path, mode)


_refused = threading.Event()


class Late(Upload):
    """Takes pieces when another file was refused."""

    def write(self, piece: Any) -> int:
        assert _refused.wait(60)
        return super().write(piece)


def open_but_one(path: str, mode: str) -> Any:
    """Refuse the second file of a rank, and let the first one be written only after that."""
    _both.wait(60)
    if not path.endswith("_1.distcp"):
        return Late(path, mode)
    _refused.set()
    return open_nothing(path, mode)


class OfOneThread:
    """A stream extension that must not be called by a second thread."""

    def __init__(self) -> None:
        self._thread: int | None = None

    def get_descriptor(self) -> str:
        return "stream.of-one-thread/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        thread = threading.get_ident()
        assert self._thread in (None, thread)
        self._thread = thread
        return output
