"""Files that tell how they are read."""

from __future__ import annotations

from nostall._storage.port import Source


class CountedSource:
    """A file that adds the length of each read to a list."""

    def __init__(self, source: Source, lengths: list[int]) -> None:
        self._source, self._lengths = source, lengths
        self.stat = source.stat

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = self._source.read_into(offset, *memories)
        self._lengths.append(nbytes)
        return nbytes

    def close(self) -> None:
        self._source.close()
