"""The phases of one run: who loads when, and what happens to those that fail.

Warm rounds (contenders and limits in turns, in an order that rotates), rounds after idle seconds,
cold rounds, then parts of the checkpoint. A contender that fails anywhere is left out from there
on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import nostall._engine
from nostall._bench.contender import file_name, sync_tree
from nostall._bench.entry import AnyEntry
from nostall._bench.loading.contender import LoadContender, LoadsRows
from nostall._bench.loading.limits import COLD_READS, WARM_READS, LoadLimits, ReadSetting
from nostall._bench.loading.measure import (
    LoadTrial,
    Phase,
    time_load,
    time_one_tensor,
    time_rows,
)
from nostall._bench.loading.page_cache import drop, files_below
from nostall._bench.loading.results import (
    LoadContenderReport,
    LoadLimitReport,
    LoadSample,
    OneTensorSample,
    RowsSample,
)

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class LoadEntry(AnyEntry[LoadContender]):
    """A contender in a run, and what is known of it so far; only the session writes to it."""

    path: Path
    """Where its files are."""
    samples: dict[Phase, list[LoadSample]] = field(
        default_factory=lambda: {"warm": [], "idle": [], "fresh": [], "cold": []}
    )
    one_tensor: list[OneTensorSample] = field(default_factory=list)
    rows: list[RowsSample] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    """By the kind of load, what the first wrong one has left."""

    def report(self) -> LoadContenderReport:
        """All that was found, and will not change any more."""
        return LoadContenderReport(
            **self.about(),
            warm=tuple(self.samples["warm"]),
            idle=tuple(self.samples["idle"]),
            fresh=tuple(self.samples["fresh"]),
            cold=tuple(self.samples["cold"]),
            one_tensor=tuple(self.one_tensor),
            rows=tuple(self.rows),
            mismatches=tuple(f"{kind}: {wrong}" for kind, wrong in self.wrong.items()),
        )


class LoadSession:
    """The phases of one run and what they share."""

    def __init__(self, contenders: Sequence[LoadContender], trial: LoadTrial) -> None:
        self.trial = trial
        self.entries = [
            LoadEntry(
                contender=contender,
                path=trial.directory / file_name(contender.form),
                unavailable=contender.available(),
            )
            for contender in contenders
        ]

    def standing(self) -> list[LoadEntry]:
        """Contenders that take part and have not failed."""
        return [entry for entry in self.entries if entry.stands]

    # --- phases ---------------------------------------------------------------------------------

    def write(self) -> None:
        """Save the files of every form once, and sync them: only then can they be dropped."""
        for entry in self.standing():
            if not entry.path.exists():
                _say(f"files of {entry.contender.form}")
                self._attempt(
                    entry, partial(entry.contender.write, self.trial.saved.state, entry.path)
                )
        nostall._engine.reset()  # its process has no part in loading
        sync_tree(self.trial.directory)

    def warm_up(self) -> None:
        """Let everybody load once: imports and first uses are not what is measured."""
        for entry in self.standing():
            self._timed(entry, -1, "warm")

    def rounds(self, phase: Phase, count: int, limits: LimitTurns | None = None) -> None:
        """Let everybody load once per round; measure the limits once per round, in turns."""
        turns: list[LoadEntry | LimitTurns] = [*self.standing()]
        if limits is not None:
            turns.insert(0, limits)
        for number in range(count):
            _say(f"{phase} round {number + 1} of {count}")
            for turn in turns:
                if isinstance(turn, LimitTurns):
                    turn.measure(phase)
                elif turn.stands and (sample := self._timed(turn, number, phase)) is not None:
                    turn.samples[phase].append(sample)
            turns = turns[1:] + turns[:1]  # so that nobody always goes first

    def parts(self, count: int) -> None:
        """Loads of one tensor, and of an eighth of the rows of each, in turns."""
        turns = self.standing()
        for number in range(count):
            _say(f"round {number + 1} of {count}, parts")
            for entry in turns:
                if entry.stands:
                    self._parts_once(entry, number)
            turns = turns[1:] + turns[:1]

    def limits(self) -> LimitTurns | None:
        """The limits for the first contender's files, or ``None`` if there are none."""
        standing = self.standing()
        return LimitTurns(self.trial, standing[0].path) if standing else None

    # --- steps ----------------------------------------------------------------------------------

    def _timed(self, entry: LoadEntry, number: int, phase: Phase) -> LoadSample | None:
        load = partial(time_load, self.trial, entry.contender, entry.path, number, phase=phase)
        return self._checked(entry, f"{phase} load", load)

    def _parts_once(self, entry: LoadEntry, number: int) -> None:
        contender, path = entry.contender, entry.path
        one = partial(time_one_tensor, self.trial, contender, path, number)
        sample = self._checked(entry, "one tensor", one)
        if sample is not None:
            entry.one_tensor.append(sample)
        if entry.stands and isinstance(contender, LoadsRows) and self.trial.rows:
            some = partial(time_rows, self.trial, contender, path, number)
            of_rows = self._checked(entry, "1/8 of the rows", some)
            if of_rows is not None:
                entry.rows.append(of_rows)

    def _checked(
        self, entry: LoadEntry, kind: str, load: Callable[[], tuple[T, str | None]]
    ) -> T | None:
        """The sample of a load; what the load left wrong is kept."""
        found = self._attempt(entry, load)
        if found is None:
            return None
        sample, wrong = found
        if wrong is not None:
            entry.wrong.setdefault(kind, wrong)
        return sample

    def _attempt(self, entry: LoadEntry, action: Callable[[], T]) -> T | None:
        """Run a step of a contender; it is left out if that fails."""
        try:
            return action()
        except Exception as failure:  # a contender may fail in any way; the run goes on
            entry.error = f"{type(failure).__name__}: {failure}".strip()
        _say(f"{entry.contender.name} failed: {entry.error}")
        gc.collect()
        return None


class LimitTurns:
    """The limits, measured once per round as if they were a contender."""

    def __init__(self, trial: LoadTrial, path: Path) -> None:
        """For the largest file below ``path``."""
        self._trial = trial
        self._path = path
        file = max(files_below(path), key=lambda each: each.stat().st_size)
        self._limits = LoadLimits(file, trial.saved.nbytes)
        self._memcpy_s: list[float] = []
        self._reads: dict[Phase, dict[ReadSetting, list[float]]] = {"warm": {}, "cold": {}}

    def measure(self, phase: Phase) -> None:
        """Read with every setting of a phase; copy, in the warm one."""
        self._trial.prepare(phase, self._path)
        for setting in COLD_READS if phase == "cold" else WARM_READS:
            if phase == "cold":
                drop([self._limits.file])
            seconds = self._limits.read_s(setting)
            if seconds is not None:
                self._reads[phase].setdefault(setting, []).append(seconds)
        if phase == "warm":
            self._memcpy_s.append(self._limits.memcpy_s())

    def report(self) -> LoadLimitReport:
        """All samples."""
        warm, cold = (
            {str(setting): tuple(each) for setting, each in self._reads[phase].items()}
            for phase in ("warm", "cold")
        )
        return LoadLimitReport(memcpy_s=tuple(self._memcpy_s), warm_read_s=warm, cold_read_s=cold)


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
