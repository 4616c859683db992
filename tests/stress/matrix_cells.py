"""The fault matrix: what goes wrong, where, on which rank, over what, and in which kind of save."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

STORAGE = ("ENOSPC", "EIO", "EDQUOT", "short write", "read-only directory", "directory removed")
DEATHS = ("exit 17", "SIGKILL", "SIGSTOP", "OOM")
"""``OOM`` is SIGKILL for a rank's background processes and, in the trainer, for it, too."""
FAULTS = (*STORAGE, "exception", *DEATHS)
PLACES = ("writer", "trainer", "commit")
WAYS = ("sync", "async", "overlapped", "early")
"""``early``: of a known structure, so that it is committed by a thread, though nobody polls."""
SHAPES = ("1 file", "4 files")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One failing save of two ranks."""

    fault: str
    place: str
    """``writer``: where files are written, in another process or, if synchronous, the trainer."""
    rank: int
    overwrite: bool
    way: str
    shape: str

    @property
    def ends_trainer(self) -> bool:
        """Whether the trainer of the rank does not live to see the end of it."""
        return self.fault in DEATHS and self.place != "writer"

    @property
    def is_possible(self) -> bool:
        """Whether there is such a thing."""
        if self.place == "commit" and self.rank != 0:
            return False  # the coordinator commits
        if self.place == "trainer" and self.fault in STORAGE:
            return False  # it does not touch storage but to write files and to commit
        return not (self.way == "sync" and self.place == "writer" and self.fault in DEATHS)

    def __str__(self) -> str:
        over = "over another" if self.overwrite else "fresh"
        return f"{self.fault} in {self.place} of rank {self.rank}, {over}, {self.way}, {self.shape}"


def all_cells() -> list[Cell]:
    product = itertools.product(FAULTS, PLACES, (0, 1), (False, True), WAYS, SHAPES)
    return [cell for cell in itertools.starmap(Cell, product) if cell.is_possible]


def covering(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Cells among these that show every pair of values that any of them has."""
    shuffled = list(cells)
    random.Random(seed).shuffle(shuffled)
    left = set().union(*map(_pairs, cells))
    chosen: list[Cell] = []
    while left:
        best = max(shuffled, key=lambda cell: len(_pairs(cell) & left))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[Any, ...]]:
    named = zip((field.name for field in fields(cell)), astuple(cell), strict=True)
    return set(itertools.combinations(named, 2))
