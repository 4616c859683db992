"""The bytes that a rank gets in a round, in memory: filled by reads, exchanged, read as files."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

import torch

from nostall._memory.copying import copy_bytes, memory_of
from nostall._read.damage import missing, too_short
from nostall._read.peers import Message
from nostall._read.plan import Wanted
from nostall._read.sharing import ROUND_NBYTES, Round, Share, Span
from nostall._storage.port import ReadableFiles, Stat, Version

_BLOCK_NBYTES = 8 << 20
"""Read by one task."""


class Buffers:
    """Memory for two rounds at a time. It is used again, as new memory is slow to touch."""

    def __init__(self, share: Share) -> None:
        self._most = min(ROUND_NBYTES, max(map(_nbytes_of, share.rounds)))
        self._kept: dict[bool, torch.Tensor] = {}

    def for_round(self, number: int, content: Round) -> torch.Tensor:
        """Memory of a round's length, until that of the next but one is requested."""
        nbytes, is_odd = _nbytes_of(content), number % 2 == 1
        if nbytes > self._most:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if is_odd not in self._kept:
            self._kept[is_odd] = torch.empty(self._most, dtype=torch.uint8, device="cpu")
        return self._kept[is_odd][:nbytes]


def _nbytes_of(content: Round) -> int:
    return sum(part.nbytes for part in content)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a span lies in the memory of a round."""

    span: Span
    at: int


class RoundMemory:
    """One round of one rank, part after part; a :class:`~nostall._storage.port.ReadableFiles`.

    Args:
        content: The parts.
        memory: As long as all of them.
        items: The items that are loaded from it.
        files: Where it is read from.
    """

    def __init__(
        self, content: Round, memory: torch.Tensor, items: Sequence[Wanted], files: ReadableFiles
    ) -> None:
        self.items = items
        self._content = content
        self._memory = memory
        self._files = files
        self._reads: list[Future[None]] = []
        self._places: dict[str, list[_Place]] = {}
        at = 0
        for part in content:
            for span in part.spans:
                self._places.setdefault(span.file, []).append(_Place(span, at))
                at += span.nbytes
        for places in self._places.values():
            places.sort(key=lambda place: place.span)

    # --- what is read and exchanged -----------------------------------------------------------

    def begin_reads(self, rank: int, pool: ThreadPoolExecutor) -> None:
        """Begin to read what this rank reads for all."""
        memory, at = memory_of(self._memory), 0
        for part in self._content:
            for begin, spans in part.blocks_of(rank, _BLOCK_NBYTES):
                self._reads.append(pool.submit(self._read, spans, memory[at + begin :]))
            at += part.nbytes

    def wait_read(self) -> None:
        """Return when it is read.

        Raises:
            DamagedCheckpointError: A file is missing or shorter than expected.
            OSError: A file cannot be read.
        """
        for read in self._reads:
            read.result()

    def _read(self, spans: Sequence[Span], memory: memoryview) -> None:
        for file, of_file in groupby(spans, key=lambda span: span.file):
            path, cut = self._files.where(file), list(of_file)
            try:
                source = self._files.open(file)
            except FileNotFoundError as error:
                raise missing(path, self._items_in(file, cut[0].begin, cut[-1].end)) from error
            with closing(source):
                for span in cut:
                    if source.read_into(span.begin, memory[: span.nbytes]) < span.nbytes:
                        items = self._items_in(file, span.begin, span.end)
                        raise too_short(source.stat.nbytes, path, items)
                    memory = memory[span.nbytes :]

    def _items_in(self, file: str, begin: int, end: int) -> list[Wanted]:
        return [
            each
            for each in self.items
            if each.file == file and each.offset < end and begin < each.end
        ]

    def messages(self, rank: int) -> tuple[list[Message], list[Message]]:
        """What this rank sends to others, and receives; all ranks have the same order."""
        sent, received, at = [], [], 0
        for part in self._content:
            for piece in part.pieces():
                content = self._memory[at + piece.begin : at + piece.end]
                if piece.owner == rank:
                    sent += [Message(other, content) for other in part.ranks if other != rank]
                else:
                    received.append(Message(piece.owner, content))
            at += part.nbytes
        return sent, received

    # --- as files -----------------------------------------------------------------------------

    def where(self, name: str = "") -> str:
        """Where the bytes are from."""
        return self._files.where(name)

    def open(self, name: str) -> _Source:
        """What is there of a file."""
        return _Source(self._places[name], self._memory.data_ptr())


class _Source:
    """Parts of a file in memory; a :class:`~nostall._storage.port.Source`.

    Bytes of the file that are not in memory are left as they are: they lie between items that are
    read together, and nothing looks at them.
    """

    def __init__(self, places: Sequence[_Place], address: int) -> None:
        self._places = places
        self._begins = [place.span.begin for place in places]
        self._address = address
        self.stat = Stat(places[-1].span.end, Version(""), 0.0, 0.0)

    def read_into(self, offset: int, *memories: memoryview) -> int:
        begin = offset
        for memory in memories:
            offset += self._fill(offset, memory)
        return offset - begin

    def _fill(self, offset: int, memory: memoryview) -> int:
        end = min(offset + len(memory), self.stat.nbytes)
        if not memory:
            return 0
        for place in self._in(offset, end):
            first, last = max(offset, place.span.begin), min(end, place.span.end)
            to = ctypes.c_char.from_buffer(memory, first - offset)
            of = self._address + place.at + first - place.span.begin
            copy_bytes(ctypes.addressof(to), of, last - first)
        return max(0, end - offset)

    def _in(self, begin: int, end: int) -> Iterator[_Place]:
        for at in range(max(0, bisect_right(self._begins, begin) - 1), len(self._places)):
            place = self._places[at]
            if place.span.begin >= end:
                return
            if place.span.end > begin:
                yield place

    def close(self) -> None:
        """Do nothing; the memory is the caller's."""


def by_round(share: Share, wanted: Sequence[Wanted]) -> tuple[list[list[Wanted]], list[Wanted]]:
    """The items to load from each round's memory, and those that no round brings."""
    spans = sorted(
        (span, number)
        for number, content in enumerate(share.rounds)
        for part in content
        for span in part.spans
    )
    items: list[list[Wanted]] = [[] for _ in share.rounds]
    rest: list[Wanted] = []
    begins = [(span.file, span.begin) for span, _ in spans]
    for each in wanted:
        at = bisect_right(begins, (each.file, each.offset)) - 1
        span, number = spans[at] if at >= 0 else (Span("", 0, 0), 0)
        is_shared = span.file == each.file and each.end <= span.end
        (items[number] if is_shared else rest).append(each)
    return items, rest
