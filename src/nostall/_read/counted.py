"""Files whose bytes are counted as they are read."""

from __future__ import annotations

from nostall._model.reads import ReadCounter
from nostall._storage.port import ReadableFiles, Source, Stat


class CountedFiles:
    """The same files; a :class:`~nostall._storage.port.ReadableFiles`.

    Args:
        files: What to read.
        counter: Counts what is read.
    """

    def __init__(self, files: ReadableFiles, counter: ReadCounter) -> None:
        self._files, self._counter = files, counter

    def where(self, name: str = "") -> str:
        return self._files.where(name)

    def open(self, name: str) -> Source:
        return _CountedSource(self._files.open(name), self._counter)


class _CountedSource:
    def __init__(self, source: Source, counter: ReadCounter) -> None:
        self._source, self._counter = source, counter

    @property
    def stat(self) -> Stat:
        return self._source.stat

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = self._source.read_into(offset, *memories)
        self._counter.add(nbytes)
        return nbytes

    def close(self) -> None:
        self._source.close()
