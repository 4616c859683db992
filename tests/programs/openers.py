"""Ways to open a shard file that a user may have; importable without torch, as in the writer."""

from __future__ import annotations

import errno
import os
from types import TracebackType
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()


class FullUpload(Upload):
    """Takes the beginning of a file and no more."""

    taken = 0

    def write(self, piece: Any) -> int:
        self.taken += memoryview(piece).nbytes
        if self.taken > 10_000:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return super().write(piece)
