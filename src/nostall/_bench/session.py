"""The phases of one run: who is measured when, and what happens to those that fail.

Memory (every contender alone, fresh), timed rounds (contenders and limits in turns, in an order
that rotates), rounds after idle seconds, plain loops, slowdown rounds, verification. A contender
that fails anywhere, on any rank, is left out from there on.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import nostall._engine
from nostall._bench.contender import Contender, Setting, file_name, sync
from nostall._bench.entry import Entry
from nostall._bench.limits import WRITE_SETTINGS, Limits, RawWrite
from nostall._bench.measure import (
    LOOPS,
    Trial,
    loop_slowdown,
    measure_memory,
    time_save,
    timeline,
    verify,
)
from nostall._bench.options import BenchOptions
from nostall._bench.processes import give_memory_back, memory_sampler
from nostall._bench.results import (
    LimitReport,
    SaveSample,
    SlowdownSample,
    Step,
)

T = TypeVar("T")

_LEAST_LOOP_S = 0.2
_PLAIN_SAVES_PER_WARM_ONE = 4
"""At most this many are made for each that is wanted with memory at hand."""
_TIMELINE = ("nostall", "dcp.async_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitSample:
    """The limits of one round."""

    memcpy_s: float
    foreach_copy_s: float
    writes: tuple[RawWrite, ...]
    """In the order of ``WRITE_SETTINGS``."""


class Session:
    """The phases of one run and what they share. Every method is collective."""

    def __init__(
        self, options: BenchOptions, contenders: Sequence[Contender], trial: Trial, directory: Path
    ) -> None:
        self.options = options
        self.trial = trial
        self.ranks = trial.ranks
        self.directory = directory
        self.entries = [self._entry(contender) for contender in contenders]
        self._directories = 0

    def _entry(self, contender: Contender) -> Entry:
        return Entry(contender=contender, unavailable=self.ranks.first_text(contender.available()))

    def standing(self) -> list[Entry]:
        """Contenders that take part and have not failed."""
        return [entry for entry in self.entries if entry.stands]

    # --- phases ---------------------------------------------------------------------------------

    def memory(self) -> None:
        """Every contender alone: opened, used, closed, before any other one is."""
        with memory_sampler(self.trial.helpers) as sampler:
            for entry in self.standing():
                self._say(f"memory of {entry.contender.name}")
                with self._fresh_directory(entry.contender.name) as path:
                    entry.memory = self._attempt(
                        entry,
                        partial(
                            measure_memory,
                            self.trial,
                            sampler,
                            entry.contender,
                            path,
                            prepare=partial(self._open, entry.contender),
                            saves=self.options.memory_saves,
                        ),
                    )
                if entry.stands:
                    self._close(entry)
                nostall._engine.reset()

    def warm_up(self) -> None:
        """Open every contender for the rest of the run, and save as often as its caches need."""
        for entry in self.standing():
            self._attempt(entry, partial(self._open, entry.contender))
        for entry in self.standing():
            for _ in range(entry.contender.warmups):
                if entry.stands:
                    self._timed(entry, -1)

    def rounds(self, limits: Limits) -> LimitReport:
        """Let everybody save once per round, and measure the limits once per round, in turns."""
        samples: list[_LimitSample] = []
        # The place in a round where the limits are measured.
        turns: list[Entry | None] = [None, *self.standing()]
        for number in range(self.options.rounds):
            self._say(f"round {number + 1} of {self.options.rounds}")
            for turn in turns:
                if turn is None:
                    samples.append(self._limits_once(limits))
                elif turn.stands and (sample := self._timed(turn, number)) is not None:
                    turn.saves.append(sample)
            turns.append(turns.pop(0))  # so that nobody always goes first
        return LimitReport(
            memcpy_s=tuple(sample.memcpy_s for sample in samples),
            foreach_copy_s=tuple(sample.foreach_copy_s for sample in samples),
            raw_write_s={
                str(setting): tuple(sample.writes[number].seconds for sample in samples)
                for number, setting in enumerate(WRITE_SETTINGS)
            },
            direct=all(write.direct for sample in samples for write in sample.writes),
        )

    def idle_rounds(self) -> None:
        """Saves after idle seconds, in which a hypervisor may take back freed memory."""

        def idle() -> None:
            give_memory_back()  # now: what is freed after the idle seconds is still there
            time.sleep(self.options.idle_s)

        for number in range(self.options.idle_rounds):
            self._say(f"idle round {number + 1} of {self.options.idle_rounds}")
            for entry in self.standing():
                sample = self._timed(entry, number, prepare=idle)
                if sample is not None:
                    entry.idle_saves.append(sample)

    def plain_loops(self) -> None:
        """Each contender's saves one after the other, without free memory being warmed.

        A loop ends when enough of its saves found memory at hand, or after
        ``_PLAIN_SAVES_PER_WARM_ONE`` times as many.
        """
        wanted = self.options.plain_saves
        for entry in self.standing() if wanted else ():
            self._say(f"plain loop of {entry.contender.name}")
            for number in range(-1, wanted * _PLAIN_SAVES_PER_WARM_ONE):
                if not entry.stands or entry.has_plain_saves(wanted):
                    break
                sample = self._timed(entry, number, prepare=lambda: None)
                if sample is not None and number >= 0:
                    entry.plain_saves.append(sample)

    def slowdowns(self) -> None:
        """What compute loops lose while a save is under way, in turns."""
        for number in range(self.options.slowdown_rounds):
            self._say(f"slowdown round {number + 1} of {self.options.slowdown_rounds}")
            for loop in LOOPS:
                for entry in self.standing():
                    sample = self._slowdown(entry, number, loop)
                    if sample is not None:
                        entry.slowdowns.append(sample)

    def verification(self) -> None:
        """Load every contender's last checkpoint and compare it."""
        for entry in self.standing():
            with self._fresh_directory(entry.contender.name) as path:
                check = partial(verify, self.trial, entry.contender, path)
                entry.verification = self._attempt(entry, check)

    def timeline(self) -> tuple[Step, ...]:
        """Steps with and without saving, for the picture."""
        steps: list[Step] = []
        for entry in self.standing():
            durable_s = entry.report().median("durable_s")
            if entry.contender.name in _TIMELINE and durable_s is not None:
                with self._fresh_directory(entry.contender.name) as path:
                    watch = partial(
                        timeline, self.trial, entry.contender, path, durable_s=durable_s
                    )
                    steps += self._attempt(entry, watch) or []
        return tuple(steps)

    def close(self) -> None:
        """Close every contender; those that failed are closed already."""
        for entry in self.standing():
            self._close(entry)
        nostall._engine.reset()

    # --- steps ----------------------------------------------------------------------------------

    def _timed(
        self, entry: Entry, number: int, prepare: Callable[[], None] | None = None
    ) -> SaveSample | None:
        prepare = prepare or self.trial.warm_free_memory
        with self._directory_of_a_turn(entry.contender.name) as path:
            save = partial(time_save, self.trial, entry.contender, path, number, prepare=prepare)
            return self._attempt(entry, save)

    def _slowdown(self, entry: Entry, number: int, loop: str) -> SlowdownSample | None:
        alone_s = max(_LEAST_LOOP_S, entry.report().median("durable_s") or 0.0)
        with self._fresh_directory(entry.contender.name) as path:
            race = partial(loop_slowdown, self.trial, entry.contender, path, number)
            return self._attempt(entry, partial(race, loop=loop, alone_s=alone_s))

    def _limits_once(self, limits: Limits) -> _LimitSample:
        self.trial.workload.advance()
        self.trial.warm_free_memory()
        writes = []
        for setting in WRITE_SETTINGS:
            with self._fresh_directory("raw") as path:
                path.mkdir(exist_ok=True)
                self.ranks.barrier()
                wrote = limits.raw_write(path / str(self.ranks.rank), setting)
                seconds, buffered = self.ranks.maximum([wrote.seconds, not wrote.direct])
            writes.append(RawWrite(seconds=seconds, direct=not buffered))
        return _LimitSample(
            memcpy_s=self._slowest(limits.memcpy_s),
            foreach_copy_s=self._slowest(limits.foreach_copy_s),
            writes=tuple(writes),
        )

    def _attempt(self, entry: Entry, action: Callable[[], T]) -> T | None:
        """Run a step of a contender; if it fails on any rank, all ranks leave the contender out."""
        result: T | None = None
        error: str | None = None
        try:
            result = action()
        except Exception as failure:  # a contender may fail in any way; the run goes on
            error = f"{type(failure).__name__}: {failure}".strip()
        entry.error = self.ranks.first_text(error)
        if entry.error is None:
            return result
        self._say(f"{entry.contender.name} failed: {entry.error}")
        # At once: it may have failed because it holds all descriptors there are, or all memory.
        self._close(entry)
        gc.collect()
        return None

    def _open(self, contender: Contender) -> None:
        with self._fresh_directory(contender.name) as scratch:
            scratch.mkdir(parents=True, exist_ok=True)
            contender.open(
                Setting(ranks=self.ranks, nbytes=self.trial.workload.nbytes, scratch=scratch)
            )

    def _close(self, entry: Entry) -> None:
        try:
            entry.contender.close()
        except Exception as failure:  # whatever it holds on to, the others must be closed, too
            self._say(f"{entry.contender.name} could not be closed: {failure}")

    def _slowest(self, action: Callable[[], float]) -> float:
        self.ranks.barrier()
        (slowest,) = self.ranks.maximum([action()])
        return slowest

    @contextmanager
    def _directory_of_a_turn(self, name: str) -> Iterator[Path]:
        """Where to save in the rounds: a new path each time or, if asked for, the last one."""
        if not self.options.overwrite:
            with self._fresh_directory(name) as path:
                yield path
            return
        yield self.directory / f"{file_name(name)}-last"
        self.ranks.barrier()
        if self.ranks.leads:
            sync(self.directory)
        self.ranks.barrier()

    @contextmanager
    def _fresh_directory(self, name: str) -> Iterator[Path]:
        """A new path for one save, the same on every rank; removed, and that synced, afterwards."""
        self._directories += 1
        path = self.directory / f"{file_name(name)}-{self._directories}"
        yield path
        self.ranks.barrier()
        if self.ranks.leads:
            shutil.rmtree(path, ignore_errors=True)
            sync(self.directory)  # what deleting costs the file system is paid here
        self.ranks.barrier()

    def _say(self, message: str) -> None:
        if self.ranks.leads:
            sys.stderr.write(f"{message}\n")
