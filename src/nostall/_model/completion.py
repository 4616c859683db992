"""Completion records: a rank's proof that its files of a save are complete.

A trainer may die while its save is written. With ``linger_s`` the writer process finishes the files
nevertheless, and leaves a record beside them, ``.complete-SERIES-NUMBER-RANK-RANKS``. When all
ranks have left theirs, any process can commit the save. Nothing here imports torch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"\.complete-([0-9a-f]{16})-(\d{1,15})-(\d{1,9})-(\d{1,9})", re.ASCII)
UNFINISHED = ".tmp"
"""At the end of the name of a record that is being written."""
MOST_SERIES = (1 << 63) - 1
"""A reduction of ranks carries signed 64-bit integers."""


class SaveId(NamedTuple):
    """Identifies one save; the same on all its ranks. A tuple, to be fast to make and compare."""

    series: int
    """A random number that ranks have agreed on."""
    number: int
    """Counts the saves that all ranks have begun since then."""

    def next(self) -> SaveId:
        """The identity of the next save."""
        return SaveId(self.series, self.number + 1)


class RecordName(NamedTuple):
    """The name of a completion record, by its parts."""

    save: SaveId
    rank: int
    ranks: int
    """How many ranks save together."""

    def __str__(self) -> str:
        return f".complete-{self.save.series:016x}-{self.save.number}-{self.rank}-{self.ranks}"


def record_name_in(name: str) -> RecordName | None:
    """The parts of a completion record's name; ``None`` for other names."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    number, rank, ranks = map(int, found.groups()[1:])
    parts = RecordName(SaveId(int(found[1], 16), number), rank, ranks)
    return parts if rank < ranks and str(parts) == name else None


def is_completion(name: str) -> bool:
    """Whether a name is that of a completion record, finished or not."""
    return record_name_in(name.removesuffix(UNFINISHED)) is not None
