"""What a promotion has made at the destination, recorded beside the local files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress

from nostall._model.values import WrittenFile
from nostall._storage.posix import sync_directory
from nostall._storage.posix_storage import PosixStorage

COPIED = ".copied"
"""The name of the record."""


class CopiedFiles:
    """The record of a promotion: what it has made at the destination, and what it replaces there.

    It survives crashes, and lasts until a promotion is over. Names of files that the checkpoint
    does not have are then those to remove.
    """

    def __init__(self, directory: str, record: str = "") -> None:
        self._path = os.path.join(directory, COPIED + record)
        self._lines: set[str] = set()
        with suppress(FileNotFoundError), open(self._path, encoding="utf-8") as stream:
            self._lines.update(line.strip() for line in stream)

    @property
    def names(self) -> set[str]:
        """Names of all files in it."""
        found = set()
        for line in self._lines:
            with suppress(ValueError):  # cut off by a crash
                found.add(str(json.loads(line)[0]))
        return found

    def is_whole(self, file: WrittenFile) -> bool:
        """Whether a file was copied to its end; one cut off by a crash may have its length."""
        return _line(file.name, file.crc32) in self._lines

    def add_names(self, names: Iterable[str]) -> None:
        """Record files before they are made, or replaced; durably.

        Raises:
            OSError: The local disk refuses.
        """
        self._add(map(_line, names))

    def add_whole(self, file: WrittenFile) -> None:
        """Record that a file was copied to its end; as :meth:`add_names`."""
        self._add([_line(file.name, file.crc32)])

    def remove(self) -> None:
        """Remove the record: the promotion is over."""
        PosixStorage(os.path.dirname(self._path)).remove([os.path.basename(self._path)])

    def _add(self, lines: Iterable[str]) -> None:
        new = [line for line in lines if line not in self._lines]
        if new:
            is_made = not os.path.exists(self._path)
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write("\n".join(["", *new, ""]))  # the last line may be cut off by a crash
                stream.flush()
                os.fsync(stream.fileno())
            if is_made:
                sync_directory(os.path.dirname(self._path))
        self._lines.update(new)


def _line(*values: str | int | None) -> str:
    return json.dumps(values)
