"""Removal of steps that no policy keeps, in the background of one rank.

A pass begins when a step was committed. It reads what is committed, decides once, and looks again
before each removal whether a save has begun or a reader holds the step. What it cannot remove now,
a later pass removes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from nostall._manager.contents import read_about
from nostall._manager.policies import (
    Policy,
    StepRecord,
    metrics_in,
    reads_files,
    steps_to_keep,
    unseen_metrics,
)
from nostall._manager.steps import StepDirectories, held
from nostall._model.interrupts import is_done, uninterruptible
from nostall._model.threads import start_apart
from nostall.errors import (
    DamagedCheckpointError,
    OptionError,
    SaveTimeoutError,
    UntrustedMetadataError,
    WriteError,
)

_log = logging.getLogger("nostall")


class Activity(NamedTuple):
    """What a manager does at present."""

    in_flight: frozenset[int]
    """Steps of saves that are not committed and have not failed."""
    own: tuple[int, ...]
    """Steps that the manager has committed, in this order."""

    @property
    def least(self) -> int:
        """How many committed steps stay, whatever the policies say."""
        return 2 if self.in_flight else 1

    @property
    def protected(self) -> frozenset[int]:
        """Steps that stay, whatever the policies say."""
        return self.in_flight | set(self.own[-1:])


class Records:
    """Reads committed steps, and their files once."""

    def __init__(self, steps: StepDirectories) -> None:
        self._steps = steps
        self._known: dict[tuple[int, float], StepRecord] = {}

    def read(self, *, with_files: bool) -> list[StepRecord]:
        """The committed steps, in ascending order.

        Without their files they have no metrics, and the time of the metadata file, which a copy of
        the step does not have.
        """
        times = [(step, self._steps.committed_at_s(step)) for step in self._steps.listed()]
        found = [(step, at_s) for step, at_s in times if at_s is not None]
        if not with_files:
            return [StepRecord(step=step, committed_at_s=at_s) for step, at_s in found]
        known = self._known  # another thread may replace it
        self._known = known = {each: known.get(each) or self._read(each[0]) for each in found}
        return list(known.values())

    def _read(self, step: int) -> StepRecord:
        """A step; without metrics if another program saved it, or it is damaged or gone."""
        at_s, about = 0.0, None
        try:
            at_s = self._steps.manifest_time_s(step)
            about = read_about(self._steps.path(step))
        except (DamagedCheckpointError, UntrustedMetadataError, FileNotFoundError) as error:
            if self._steps.committed_at_s(step) is not None:  # not removed meanwhile
                path = self._steps.path(step)
                _log.warning("the metrics of %s cannot be read: %s", path, error)
        metrics = {} if about is None else about.metrics
        return StepRecord(step=step, committed_at_s=at_s, metrics=metrics)


class Retention:
    """Removes steps that ``policies`` do not keep, on a thread of its own."""

    def __init__(
        self,
        steps: StepDirectories,
        records: Records,
        policies: Sequence[Policy],
        activity: Callable[[], Activity],
    ) -> None:
        self._steps = steps
        self._policies = policies
        self._activity = activity
        self._records = records
        self._lock = threading.RLock()  # a signal's handler may save, too
        self._has_warned = False
        self._next: Callable[[], object] | None = None
        self._idle: Future[None] = Future()
        """Done when nothing is being removed."""
        self._idle.set_result(None)

    def start(self) -> None:
        """Begin a pass, or another one after the present one."""
        if self._policies:
            self.begin(self.run_pass)

    def begin(self, work: Callable[[], object]) -> None:
        """Begin to remove something, or do so after what is being removed."""
        with uninterruptible():
            with self._lock:
                self._next = work
                if not is_done(self._idle):
                    return
                self._idle = Future()
            start_apart("nostall-retention", self._run)

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is being removed; raises SaveTimeoutError after ``timeout_s``."""
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
        records = self._records.read(with_files=any(map(reads_files, self._policies)))
        activity = self._activity()
        kept = steps_to_keep(
            records,
            self._policies,
            least=activity.least,
            protected=activity.protected,
            own=activity.own,
        )
        left = {record.step for record in records}
        if not self._has_warned:
            self._warn_of_unseen(records, removes=bool(left - kept))
        removed = []
        for step in sorted(left - kept):
            now = self._activity()  # a save may have begun since the decision
            if len(left) > now.least and step not in now.protected and self._remove(step):
                left.discard(step)
                removed.append(step)
        return removed

    def _warn_of_unseen(self, records: Sequence[StepRecord], *, removes: bool) -> None:
        """Warn once of a metric that a policy reads and no step has.

        If no step has any metrics, as before the first evaluation, only when one is removed.
        """
        unseen, has = unseen_metrics(self._policies, records), sorted(metrics_in(records))
        self._has_warned = bool(unseen and (has or removes))
        if self._has_warned:
            _log.warning(
                "no step below %s has the metrics %s, by which KeepBest keeps steps; they have %s."
                " The best step is not kept",
                self._steps.root,
                unseen,
                has or "none",
            )

    def discard_after(self, step: int) -> None:
        """Remove all steps above a committed one, the highest first."""
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

    def _remove(self, step: int) -> bool:
        """Remove a step, unless a reader holds it."""
        with held(self._steps.path(step), to_remove=True) as is_ours:
            if not is_ours:
                _log.info("step %d stays for now: it is being read", step)
                return False
            self._steps.remove(step)
        _log.info("removed %s", self._steps.path(step))
        return True
