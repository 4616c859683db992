"""Read once what several ranks need: each rank reads a part of it, and they exchange the parts.

Ranks share an archive if together they would read more than all of it: because they need the same
tensor, or slices of it whose rows overlap. The coordinator says which ranks get which bytes in
which round (:func:`share_reads`); every rank derives from that who reads and sends what, so that
what is sent to the ranks stays small. Whole archives go into a round, so a round's items can be
loaded from its bytes alone.

In each round, every rank reads its pieces. Then all ranks agree that none has failed, *before* any
of them waits for another one's bytes: so no rank waits for a rank that has given up. Then pieces
are exchanged, and the items of the round are loaded from memory, as from a file. A planner's error
counts in the next agreement.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol, TypeAlias

import torch

from nostall._memory.copying import memory_of
from nostall._model.progress import ReadCounter
from nostall._read.archives import OpenFile
from nostall._read.inflight import Workers
from nostall._read.plan import FileSpan, Wanted
from nostall._storage.port import InMemory, ReadableFiles, Source
from nostall.errors import OptionError, RankFailedError, RankLostError

ROUND_NBYTES = 128 << 20
"""Limit on what one rank gets in a round, except for a single larger archive."""
_BLOCK_NBYTES = 8 << 20
"""Read by one thread at a time."""

Ranks: TypeAlias = tuple[int, ...]
"""In ascending order, each once."""
Messages: TypeAlias = Sequence[tuple[int, torch.Tensor]]
"""Another rank, and contiguous bytes on the CPU that are sent to it, or received from it."""


class Peers(Protocol):
    """Ranks that share reads.

    Both methods raise ``RankLostError`` if another rank has ended, or the group is unusable.
    """

    rank: int

    def first_failed(self, *, failed: bool) -> int | None:
        """The first rank that says it has failed. Collective: call on every rank."""

    def exchange(self, sent: Messages, received: Messages) -> None:
        """Send and receive; returns when all is sent and received.

        Between two ranks, messages are received in the order in which they are sent, with the same
        lengths. Other ranks need not call this.
        """


# --- who gets what, in which round ----------------------------------------------------------------


class Part(NamedTuple):
    """Bytes that a set of ranks gets in a round."""

    ranks: Ranks
    """Each of them reads a piece of it."""
    spans: tuple[FileSpan, ...]
    """In the order of files and offsets; each consists of whole archives."""

    @property
    def nbytes(self) -> int:
        """Length of all spans."""
        return sum(span.nbytes for span in self.spans)

    def pieces(self) -> list[tuple[int, int, int]]:
        """Who reads what: a rank, and begin and end of its piece in the part."""
        count, nbytes = len(self.ranks), self.nbytes
        return [
            (rank, nbytes * at // count, nbytes * (at + 1) // count)
            for at, rank in enumerate(self.ranks)
        ]

    def blocks_of(self, rank: int, most_nbytes: int) -> Iterator[tuple[int, FileSpan]]:
        """Blocks that a rank reads: offsets in the part, and the bytes of files there."""
        for reader, begin, end in self.pieces():
            at = 0
            for file, first, last in self.spans if reader == rank else ():
                of_file = first - at
                upper = min(last, of_file + end)
                for block in range(max(first, of_file + begin), upper, most_nbytes):
                    yield block - of_file, FileSpan(file, block, min(upper, block + most_nbytes))
                at += last - first


Round: TypeAlias = tuple[Part, ...]


class ReadShare(NamedTuple):
    """The parts that one rank gets; travels to it in ``LoadPlan.storage_data``."""

    rounds: tuple[Round, ...]
    """Equally many on all ranks; a rank may get nothing in some of them."""


class Member(NamedTuple):
    """A rank whose reader has a group; travels to the coordinator in ``LoadPlan.storage_data``."""

    rank: int
    """In that group."""
    world_size: int


def all_want_to_share(ranks: Sequence[object]) -> bool:
    """Whether the ranks share: every one of several has sent a :class:`Member`.

    ``OptionError`` if only some have sent one, or one of another group: they would wait for others.
    """
    without = [rank for rank, each in enumerate(ranks) if not isinstance(each, Member)]
    if len(ranks) == 1 or len(without) == len(ranks):
        return False
    hint = "give the readers of all ranks the group that dcp.load has"
    if without:
        raise OptionError(f"the readers of ranks {without} have no process_group", hint=hint)
    for rank, each in enumerate(ranks):
        if each != Member(rank=rank, world_size=len(ranks)):
            assert isinstance(each, Member)
            raise OptionError(
                f"rank {rank} of {len(ranks)} is rank {each.rank} of {each.world_size} in the"
                " process_group of its reader",
                hint=hint,
            )
    return True


def share_reads(
    wanted: Sequence[Mapping[FileSpan, int]], *, round_nbytes: int = ROUND_NBYTES
) -> list[ReadShare] | None:
    """Plan which bytes each rank gets from others; ``None`` if none would be read twice.

    ``wanted`` has, by rank, the archives that it needs, and how many bytes of each it would read.
    """
    ranks: dict[FileSpan, list[int]] = defaultdict(list)
    nbytes: dict[FileSpan, int] = defaultdict(int)
    for rank, archives in enumerate(wanted):
        for archive, count in archives.items():
            ranks[archive].append(rank)
            nbytes[archive] += count
    read_twice: list[tuple[FileSpan, Ranks]] = []
    last = FileSpan("", 0, 0)
    for archive in sorted(ranks):
        overlaps = last.file == archive.file and last.end > archive.begin
        if len(ranks[archive]) > 1 and nbytes[archive] > archive.nbytes and not overlaps:
            read_twice.append((archive, tuple(ranks[archive])))
            last = archive
    rounds = _in_rounds(read_twice, round_nbytes)
    if not rounds:
        return None
    parts: list[list[list[Part]]] = [[[] for _ in rounds] for _ in wanted]
    for number, each in enumerate(rounds):
        for readers, spans in each.items():
            part = Part(ranks=readers, spans=tuple(spans))
            for rank in readers:
                parts[rank][number].append(part)
    return [ReadShare(rounds=tuple(map(tuple, of_rank))) for of_rank in parts]


def _in_rounds(
    archives: Sequence[tuple[FileSpan, Ranks]], round_nbytes: int
) -> list[dict[Ranks, list[FileSpan]]]:
    """The archives of each round, by the ranks that get them; those that adjoin are one span.

    Archives of one set of ranks stay in order. Other sets may share their rounds, so that all ranks
    have something to do.
    """
    rounds: list[dict[Ranks, list[FileSpan]]] = []
    filled: list[dict[int, int]] = []
    earliest: dict[Ranks, int] = defaultdict(int)
    for archive, ranks in archives:
        number = earliest[ranks]
        while number < len(rounds) and any(
            filled[number][rank] and filled[number][rank] + archive.nbytes > round_nbytes
            for rank in ranks
        ):
            number += 1
        if number == len(rounds):
            rounds.append(defaultdict(list))
            filled.append(defaultdict(int))
        earliest[ranks] = number
        for rank in ranks:
            filled[number][rank] += archive.nbytes
        spans = rounds[number][ranks]
        if spans and (spans[-1].file, spans[-1].end) == (archive.file, archive.begin):
            spans[-1] = spans[-1]._replace(end=archive.end)
        else:
            spans.append(archive)
    return rounds


# --- one rank -------------------------------------------------------------------------------------


def read_shared(
    share: ReadShare,
    wanted: Sequence[Wanted],
    files: ReadableFiles,
    peers: Peers,
    load: Callable[[Sequence[Wanted], ReadableFiles], None],
    *,
    threads: int,
) -> None:
    """Read items, some of them together with other ranks, and load them. Collective.

    Items are in any order. ``load`` is called on this thread: it reads items from files and hands
    them to the planner. ``RankFailedError`` if another rank could not read, or its planner has
    raised an error; ``RankLostError`` if ranks can no longer communicate. Other ranks learn of an
    error of this one in a round before it is raised.
    """
    placed, rest = _by_round(share, wanted)
    largest = max(sum(part.nbytes for part in content) for content in share.rounds)
    memory = torch.empty(largest, dtype=torch.uint8, device="cpu")
    failure: BaseException | None = None
    try:
        for content, items in zip(share.rounds, placed, strict=True):
            ready = _Round(content, memory, items, files)
            failure = failure or _failure_of(partial(ready.read, peers.rank, threads))
            _agree(peers, failure)
            peers.exchange(*ready.messages(peers.rank))
            in_memory = [each._replace(offset=at) for each, at in items]
            failure = _failure_of(partial(load, in_memory, ready))
        _agree(peers, failure)
    finally:
        failure = None  # its traceback refers to this frame, which refers to the memory
    load(rest, files)


def _failure_of(call: Callable[[], None]) -> BaseException | None:
    """The error of a call, even if it is Ctrl-C: other ranks learn of it first."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def _agree(peers: Peers, failure: BaseException | None) -> None:
    """Go on if no rank has failed. Collective."""
    try:
        failed = peers.first_failed(failed=failure is not None)
    except RankLostError as lost:
        if failure is not None:
            raise failure from lost
        raise
    if failure is not None:
        raise failure
    if failed is not None:
        raise RankFailedError(
            f"rank {failed} failed while ranks read the checkpoint together",
            rank=failed,
            phase="read",
            hint="see the error of that rank",
        )


_Placed: TypeAlias = "tuple[Wanted, int]"
"""An item, and where its archive begins in the memory of its round."""


def _by_round(
    share: ReadShare, wanted: Sequence[Wanted]
) -> tuple[list[list[_Placed]], list[Wanted]]:
    """The items to load from each round's memory, and those that no round brings."""
    places = [(FileSpan("", 0, 0), 0, 0)]  # before all others
    for number, content in enumerate(share.rounds):
        at = 0
        for span in (span for part in content for span in part.spans):
            places.append((span, number, at))
            at += span.nbytes
    places.sort()
    begins = [(span.file, span.begin) for span, _, _ in places]
    rounds: list[list[_Placed]] = [[] for _ in share.rounds]
    rest: list[Wanted] = []
    for each in wanted:
        span, number, at = places[bisect_right(begins, (each.file, each.offset)) - 1]
        if span.file == each.file and each.end <= span.end:
            rounds[number].append((each, at + each.offset - span.begin))
        else:
            rest.append(each)
    return rounds, rest


class _Round(NamedTuple):
    """One round of one rank in memory, part after part.

    As a :class:`~nostall._storage.port.ReadableFiles`, each of its files is all of the memory,
    which may be longer than the parts.
    """

    content: Round
    memory: torch.Tensor
    placed: Sequence[_Placed]
    files: ReadableFiles

    def read(self, rank: int, threads: int) -> None:
        """Read what this rank reads for all."""
        items: dict[str, list[Wanted]] = defaultdict(list)
        for each, _ in self.placed:
            items[each.file].append(each)
        memory = memory_of(self.memory)

        blocks = [
            (at + offset, span)
            for at, part in self._parts()
            for offset, span in part.blocks_of(rank, _BLOCK_NBYTES)
        ]
        left = iter(blocks)  # its next() is one instruction, so threads can share it

        def fill() -> None:
            for name, of_file in groupby(left, key=lambda block: block[1].file):
                # What is read for others counts when it is loaded.
                with closing(OpenFile(self.files, name, items[name], ReadCounter(0))) as file:
                    for at, span in of_file:
                        workers.require_running()
                        file.fill(span.begin, items[name], memory[at : at + span.nbytes])

        with Workers(threads) as workers:
            count = min(threads, len(blocks))
            for task in [workers.submit(fill) for _ in range(count)]:
                workers.wait(task)

    def _parts(self) -> Iterator[tuple[int, Part]]:
        """The parts, and where each begins in the memory."""
        at = 0
        for part in self.content:
            yield at, part
            at += part.nbytes

    def messages(self, rank: int) -> tuple[Messages, Messages]:
        """Messages to other ranks and from them; all ranks have the same order."""
        sent, received = [], []
        for at, part in self._parts():
            for reader, begin, end in part.pieces():
                content = self.memory[at + begin : at + end]
                if reader == rank:
                    sent += [(other, content) for other in part.ranks if other != rank]
                else:
                    received.append((reader, content))
        return sent, received

    def where(self, name: str = "") -> str:
        """Where the bytes are from, for errors."""
        return self.files.where(name)

    def open(self, name: str) -> Source:  # noqa: ARG002  # the port's signature
        """All of the memory, whatever the name."""
        return InMemory([memory_of(self.memory)])
