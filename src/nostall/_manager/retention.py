"""Removal of steps that no policy keeps, in the background of one rank.

A pass begins when a step was committed. It reads what is committed, decides once, and looks again
before each removal whether a save has begun or a reader holds the step. What it cannot remove now,
a later pass removes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from nostall._manager.contents import read_about
from nostall._manager.policies import (
    Policy,
    StepRecord,
    metrics_in,
    reads_times,
    steps_to_keep,
    unseen_metrics,
)
from nostall._manager.steps import StepDirectories, held
from nostall._model.interrupts import is_done, uninterruptible
from nostall._model.threads import start_apart
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    SaveTimeoutError,
    UntrustedMetadataError,
    WriteError,
)

_log = logging.getLogger("nostall")

_LEAST_WHILE_SAVING = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a manager does at present."""

    in_flight: frozenset[int] = frozenset()
    """Steps of saves that are not committed and have not failed."""
    last: int | None = None
    """The step that was committed last; not the highest one after a return to an earlier step."""
    own: frozenset[int] = frozenset()
    """All steps that the manager has committed."""

    @property
    def least(self) -> int:
        """How many committed steps stay, whatever the policies say."""
        return _LEAST_WHILE_SAVING if self.in_flight else 1

    @property
    def protected(self) -> frozenset[int]:
        """Steps that stay, whatever the policies say."""
        return self.in_flight if self.last is None else self.in_flight | {self.last}


class Records:
    """Reads committed steps, and their metrics once."""

    def __init__(self, steps: StepDirectories) -> None:
        self._steps = steps
        self._metrics: dict[tuple[int, float], Mapping[str, float]] = {}
        self._times: dict[tuple[int, float], float] = {}

    def read(self, *, with_metrics: bool, with_times: bool = False) -> list[StepRecord]:
        """The committed steps, in ascending order.

        Args:
            with_metrics: Whether to read their metrics; else they have none.
            with_times: Whether to read when they were committed. Else it is the time of a file,
                which a copy of the step does not have.

        Raises:
            OSError: Storage refuses to answer.
        """
        times = [(step, self._steps.committed_at_s(step)) for step in self._steps.listed()]
        found = [(step, at_s) for step, at_s in times if at_s is not None]
        metrics, committed = self._metrics, self._times  # another thread may replace them
        if with_metrics:
            self._metrics = metrics = _known(metrics, found, self._metrics_of)
        if with_times:
            self._times = committed = _known(committed, found, self._steps.manifest_time_s)
        return [
            StepRecord(
                step=step,
                committed_at_s=committed[step, at_s] if with_times else at_s,
                metrics=metrics[step, at_s] if with_metrics else {},
            )
            for step, at_s in found
        ]

    def _metrics_of(self, step: int) -> Mapping[str, float]:
        """The metrics of a step; none if another program saved it, or it is damaged or gone."""
        try:
            about = read_about(self._steps.checkpoints(step)[-1])
        except (DamagedCheckpointError, UntrustedMetadataError, FileNotFoundError) as error:
            if self._steps.committed_at_s(step) is not None:  # not removed meanwhile
                why = error.message if isinstance(error, NostallError) else "a file is missing"
                _log.warning("the metrics of %s cannot be read: %s", self._steps.path(step), why)
            return {}
        return {} if about is None else about.metrics


def _known(
    known: Mapping[tuple[int, float], T],
    found: Iterable[tuple[int, float]],
    read: Callable[[int], T],
) -> dict[tuple[int, float], T]:
    """What was read of these steps before, and is read now of the others."""
    return {each: known[each] if each in known else read(each[0]) for each in found}


class Retention:
    """Removes steps below one directory, on a thread of its own.

    Args:
        steps: The directories.
        policies: What stays; everything if there are none.
        activity: What the manager does at present; called from that thread.
    """

    def __init__(
        self,
        steps: StepDirectories,
        policies: Sequence[Policy],
        activity: Callable[[], Activity],
    ) -> None:
        self._steps = steps
        self._policies = policies
        self._activity = activity
        self._records = Records(steps)
        self._lock = threading.RLock()  # a signal's handler may save, too
        self._has_warned = False
        self._next: Callable[[], object] | None = None
        self._idle: Future[None] = Future()
        """Done when nothing is being removed."""
        self._idle.set_result(None)

    def start(self) -> None:
        """Begin a pass, or another one after the present one."""
        if self._policies:
            self._begin(self.run_pass)

    def tidy(self) -> None:
        """Begin to remove what interrupted saves and removals have left; before the first save."""
        self._begin(self._steps.remove_unfinished)

    def _begin(self, work: Callable[[], object]) -> None:
        with uninterruptible():
            with self._lock:
                self._next = work
                if not is_done(self._idle):
                    return
                self._idle = Future()
            start_apart("nostall-retention", self._run)

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is being removed.

        Raises:
            SaveTimeoutError: Something still is after ``timeout_s`` seconds.
        """
        if not is_done(self._idle, timeout_s):
            raise SaveTimeoutError(
                f"steps were not removed within {timeout_s:g} s",
                phase="remove",
                path=self._steps.root,
                hint="storage hangs, or is slow to remove files",
            )

    def _run(self) -> None:
        while True:
            with self._lock:
                work, self._next = self._next, None
                if work is None:
                    self._idle.set_result(None)
                    return
            try:
                work()
            except Exception as error:  # nothing is lost; the next commit begins another pass
                _log.warning("steps were not removed below %s: %s", self._steps.root, error)

    def run_pass(self) -> list[int]:
        """Remove what no policy keeps, lowest step first; the removed steps."""
        reads_metrics = any(policy.reads_metrics for policy in self._policies)
        times_count = any(map(reads_times, self._policies))
        records = self._records.read(with_metrics=reads_metrics, with_times=times_count)
        activity = self._activity()
        kept = steps_to_keep(
            records,
            self._policies,
            least=activity.least,
            protected=activity.protected,
            own=activity.own,
        )
        left = {record.step for record in records}
        self._warn_of_unseen(records, removes=bool(left - kept))
        removed = []
        for step in sorted(left - kept):
            if self._is_free(step, left) and self._remove(step):
                left.discard(step)
                removed.append(step)
        return removed

    def discard_after(self, step: int) -> None:
        """Remove all steps above a committed one, the highest first.

        Raises:
            OptionError: ``step`` is not committed.
            WriteError: Storage refused, or a process reads a step: it stays.
        """
        if self._steps.committed_at_s(step) is None:
            raise OptionError(
                f"step {step} is not committed",
                path=self._steps.path(step),
                hint="pass the step that was restored",
            )
        for later in reversed(self._steps.listed()):
            if later > step and not self._remove(later):
                raise WriteError(
                    f"step {later} is being read by another process",
                    phase="remove",
                    path=self._steps.path(later),
                    hint="call discard_after again when that process is done",
                )

    def _warn_of_unseen(self, records: Sequence[StepRecord], *, removes: bool) -> None:
        """Warn once of a metric that a policy reads and no step has.

        If no step has any metrics, as before the first evaluation, only when one is removed.
        """
        unseen = unseen_metrics(self._policies, records)
        has = sorted(metrics_in(records))
        if self._has_warned or not unseen or not (has or removes):
            return
        self._has_warned = True
        _log.warning(
            "no step below %s has the metrics %s, by which KeepBest keeps steps; they have %s. The"
            " best step is not kept",
            self._steps.root,
            unseen,
            has or "none",
        )

    def _is_free(self, step: int, left: Set[int]) -> bool:
        """Whether a step may still go: a save may have begun since the decision."""
        activity = self._activity()
        return len(left) > activity.least and step not in activity.protected

    def _remove(self, step: int) -> bool:
        """Remove a step, unless a reader holds it."""
        with held(self._steps.path(step), to_remove=True) as is_ours:
            if not is_ours:
                _log.info("step %d stays for now: it is being read", step)
                return False
            self._steps.remove(step)
        _log.info("removed %s", self._steps.path(step))
        return True
