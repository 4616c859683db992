"""One file of a checkpoint, while its items are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from nostall._model.interrupts import uninterrupted
from nostall._read.damage import damaged, missing, too_short
from nostall._read.objects import ENVIRONMENT_HINT
from nostall._read.plan import Wanted
from nostall._storage.port import ReadableFiles
from nostall._storage.reading import part_as_stream
from nostall.errors import DamagedCheckpointError, ReadError, UntrustedObjectError


class OpenFile:
    """An open file that is as long as its items need.

    Args:
        files: The checkpoint's files.
        name: Name of the file.
        items: All that is read from it.

    Raises:
        DamagedCheckpointError: The file is missing, or ends before an item does.
        OSError: It cannot be opened.
    """

    def __init__(self, files: ReadableFiles, name: str, items: Sequence[Wanted]) -> None:
        self._path = files.where(name)
        try:
            self._source = files.open(name)
        except FileNotFoundError as error:
            raise missing(self._path, items) from error
        nbytes = self._source.stat.nbytes
        beyond = [each for each in items if each.end > nbytes]
        if beyond:
            self.close()
            raise too_short(nbytes, self._path, beyond)

    def fill(self, offset: int, items: Sequence[Wanted], *memories: memoryview) -> None:
        """Read from an offset until the pieces of memory are full, one after the other.

        Raises:
            DamagedCheckpointError: The file has become shorter; names the items.
            OSError: It cannot be read.
        """
        if self._source.read_into(offset, *memories) < sum(map(len, memories)):
            raise self.damaged("the file has become shorter", items)

    def archive(self, wanted: Wanted) -> BinaryIO:
        """The archive of an item, as a stream."""
        return part_as_stream(self._source, wanted.offset, wanted.nbytes)

    def damaged(self, what: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
        """The error for damage to items of this file."""
        return damaged(what, self._path, items)

    def untrusted(self, what: str, wanted: Wanted) -> UntrustedObjectError:
        """The error for an item of a class that torch does not load by itself."""
        return UntrustedObjectError(
            f"{what} (item {wanted.name})",
            phase="read",
            path=self._path,
            hint="torch.serialization.add_safe_globals allows a class; trust=True is for objects",
        )

    def unreadable(self, what: str, wanted: Wanted) -> ReadError:
        """The error for an item that this environment cannot load."""
        what = f"{what} (item {wanted.name})"
        return ReadError(what, phase="read", path=self._path, hint=ENVIRONMENT_HINT)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with uninterrupted():
            self._source.close()
