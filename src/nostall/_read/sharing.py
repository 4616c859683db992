"""Which bytes ranks read once and send to each other, in which rounds, and who reads them. Pure.

Ranks share an archive if together they would read more than all of it: because they need the same
tensor, or slices of it whose rows overlap. The coordinator says which ranks get which bytes in
which round (:func:`share`); every rank derives from that who reads and sends what, so that what is
sent to the ranks stays small. Whole archives go into a round, so a round's items can be loaded from
its bytes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from nostall.errors import OptionError

ROUND_NBYTES = 128 << 20
"""Limit on what one rank gets in a round, except for a single larger archive."""
PIECE_NBYTES = 1 << 20
"""Least amount that a rank reads of what the same ranks get in a round, if there is as much."""

Ranks: TypeAlias = tuple[int, ...]
"""In ascending order, each once."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Consecutive bytes of a file, such as an archive."""

    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of a part that one rank reads; offsets count from the part's first byte."""

    owner: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the same ranks get in a round."""

    ranks: Ranks
    owners: Ranks
    """Those of them that read it, in about equal pieces."""
    spans: tuple[Span, ...]
    """In the order of files and offsets; each consists of whole archives."""

    @property
    def nbytes(self) -> int:
        """Length of all spans."""
        return sum(span.nbytes for span in self.spans)

    def pieces(self) -> list[Piece]:
        """Who reads what: each byte is in one piece."""
        count, nbytes = len(self.owners), self.nbytes
        return [
            Piece(owner=owner, begin=nbytes * at // count, end=nbytes * (at + 1) // count)
            for at, owner in enumerate(self.owners)
        ]

    def blocks_of(self, owner: int, most_nbytes: int) -> Iterator[tuple[int, list[Span]]]:
        """What a rank reads, in blocks: offset in the part, and what is there."""
        ends = list(accumulate(span.nbytes for span in self.spans))
        for piece in self.pieces():
            if piece.owner == owner:
                for begin in range(piece.begin, piece.end, most_nbytes):
                    yield begin, self._cut(ends, begin, min(piece.end, begin + most_nbytes))

    def _cut(self, ends: Sequence[int], begin: int, end: int) -> list[Span]:
        cut = []
        for at in range(bisect_right(ends, begin), len(ends)):
            span, before = self.spans[at], ends[at] - self.spans[at].nbytes
            if before >= end:
                break
            first, last = max(begin, before) - before, min(end, ends[at]) - before
            cut.append(Span(span.file, span.begin + first, span.begin + last))
        return cut


Round: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The parts that one rank gets; travels to it in ``LoadPlan.storage_data``."""

    rounds: tuple[Round, ...]
    """Equally many on all ranks; a rank may get nothing in some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank whose reader has a group; travels to the coordinator in ``LoadPlan.storage_data``."""

    rank: int
    """In that group."""
    world_size: int


def all_want_to_share(ranks: Sequence[object]) -> bool:
    """Whether the ranks share: every one of several has sent a :class:`Member`.

    Raises:
        OptionError: Only some have sent one, or that of another group, and would wait for others.
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


def share(
    wanted: Sequence[Mapping[Span, int]],
    *,
    round_nbytes: int = ROUND_NBYTES,
    piece_nbytes: int = PIECE_NBYTES,
) -> list[Share] | None:
    """What each rank gets from others; ``None`` if no bytes would be read twice.

    Args:
        wanted: By rank, the archives that it needs, and how many bytes of each it would read.
        round_nbytes: Limit on what one rank gets in a round, except for a single larger archive.
        piece_nbytes: Least amount that one rank reads of a part, except for smaller parts.
    """
    rounds = _in_rounds(_read_twice(wanted), round_nbytes)
    if not rounds:
        return None
    parts: list[list[list[Part]]] = [[[] for _ in rounds] for _ in wanted]
    loads = [0] * len(wanted)
    for number, each in enumerate(rounds):
        for ranks, archives in each.items():
            part = _part(ranks, _joined(archives), loads, piece_nbytes)
            for piece in part.pieces():
                loads[piece.owner] += piece.end - piece.begin
            for rank in ranks:
                parts[rank][number].append(part)
    return [Share(rounds=tuple(map(tuple, of_rank))) for of_rank in parts]


def _read_twice(wanted: Sequence[Mapping[Span, int]]) -> list[tuple[Span, Ranks]]:
    """Archives of which ranks would read more than all, and these ranks; they do not overlap."""
    ranks: dict[Span, list[int]] = defaultdict(list)
    nbytes: dict[Span, int] = defaultdict(int)
    for rank, archives in enumerate(wanted):
        for archive, count in archives.items():
            ranks[archive].append(rank)
            nbytes[archive] += count
    found: list[tuple[Span, Ranks]] = []
    for archive in sorted(ranks):
        overlaps = found and found[-1][0].file == archive.file and found[-1][0].end > archive.begin
        if len(ranks[archive]) > 1 and nbytes[archive] > archive.nbytes and not overlaps:
            found.append((archive, tuple(ranks[archive])))
    return found


def _in_rounds(
    archives: Sequence[tuple[Span, Ranks]], round_nbytes: int
) -> list[dict[Ranks, list[Span]]]:
    """The archives of each round, by the ranks that get them.

    Those of the same ranks stay in order. Those of other ranks may be in the same round, so that
    all ranks have something to do.
    """
    rounds: list[dict[Ranks, list[Span]]] = []
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
        rounds[number][ranks].append(archive)
        for rank in ranks:
            filled[number][rank] += archive.nbytes
    return rounds


def _joined(archives: Sequence[Span]) -> tuple[Span, ...]:
    """The same bytes in fewer spans."""
    spans: list[Span] = []
    for each in archives:
        if spans and (spans[-1].file, spans[-1].end) == (each.file, each.begin):
            spans[-1] = Span(each.file, spans[-1].begin, each.end)
        else:
            spans.append(each)
    return tuple(spans)


def _part(ranks: Ranks, spans: tuple[Span, ...], loads: Sequence[int], piece_nbytes: int) -> Part:
    """A part that those ranks read which have read least so far."""
    nbytes = sum(span.nbytes for span in spans)
    count = min(len(ranks), max(1, nbytes // piece_nbytes))
    owners = ranks  # the same object, which is pickled once
    if count < len(ranks):
        owners = tuple(sorted(sorted(ranks, key=lambda rank: (loads[rank], rank))[:count]))
    return Part(ranks=ranks, owners=owners, spans=spans)
