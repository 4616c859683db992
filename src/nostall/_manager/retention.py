"""Removal of steps that no policy keeps, in the background of one rank.

A pass begins when a step was committed. It reads what is committed, decides once, and looks again
before each removal whether a save has begun or a reader holds the step. What it cannot remove now,
a later pass removes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from nostall._commit.committed import committed_at_s
from nostall._engine import default_engine
from nostall._manager.contents import read_about
from nostall._manager.policies import (
    Policy,
    StepRecord,
    metrics_in,
    reads_files,
    steps_to_keep,
    unseen_metrics,
)
from nostall._manager.steps import StepDirectories
from nostall._model.interrupts import is_done, uninterrupted
from nostall._model.threads import spawn
from nostall.errors import (
    DamagedCheckpointError,
    OptionError,
    SaveTimeoutError,
    UntrustedMetadataError,
    WriteError,
)

_log = logging.getLogger("nostall")


class Activity(NamedTuple):
    """The steps that stay at present, whatever the policies say; see :func:`steps_to_keep`."""

    least: int
    protected: frozenset[int]
    own: tuple[int, ...]


class Retention:
    """Reads committed steps, and removes those that ``policies`` do not keep.

    Removals run one after the other, each on a thread.
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
        self._known: dict[tuple[int, float], StepRecord] = {}
        """Steps whose files were read."""
        self._has_warned = False
        self._last: Future[None] = Future()
        """Done when nothing is being removed."""
        self._last.set_result(None)

    def records(self, *, with_files: bool) -> list[StepRecord]:
        """The committed steps, in ascending order; the files of each are read once.

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
        path, at_s, about = self._steps.path(step), 0.0, None
        try:
            at_s = committed_at_s(path)
            about = read_about(path)
        except (DamagedCheckpointError, UntrustedMetadataError, OSError) as error:
            if self._steps.committed_at_s(step) is not None:  # not removed meanwhile
                if isinstance(error, OSError):
                    raise
                _log.warning("the metrics of %s cannot be read: %s", path, error)
        metrics = {} if about is None else about.metrics
        return StepRecord(step=step, committed_at_s=at_s, metrics=metrics)

    def start(self) -> None:
        """Begin a pass, after what is being removed."""
        if self._policies:
            self.begin(self.run_pass)

    def begin(self, work: Callable[[], object]) -> None:
        """Begin to remove something, after what is being removed."""
        with uninterrupted():
            before, done = self._last, Future[None]()
            with suppress(RuntimeError):  # no thread can be started, as at exit
                spawn("nostall-retention", partial(self._run, before, done, work))
                self._last = done

    def _run(self, before: Future[None], done: Future[None], work: Callable[[], object]) -> None:
        before.result()
        try:
            work()
        except Exception as error:  # nothing is lost; the next commit begins another pass
            _log.warning("steps were not removed below %s: %s", self._steps.root, error)
        finally:
            done.set_result(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being removed.

        Raises:
            SaveTimeoutError: After ``timeout_s``; ``None`` for ``EngineOptions.save_timeout_s``.
        """
        if timeout_s is None:
            timeout_s = default_engine().options.save_timeout_s
        if not is_done(self._last, timeout_s):
            raise SaveTimeoutError(
                f"steps were not removed within {timeout_s:g} s",
                phase="remove",
                path=self._steps.root,
                hint="storage hangs, or is slow to remove files",
            )

    def run_pass(self) -> list[int]:
        """Remove what no policy keeps, lowest step first; the removed steps."""
        records = self.records(with_files=any(map(reads_files, self._policies)))
        kept = steps_to_keep(records, self._policies, **self._activity()._asdict())
        left = {record.step for record in records}
        if not self._has_warned:
            self._warn_of_unseen(records, removes=bool(left - kept))
        removed = []
        for step in sorted(left - kept):
            now = self._activity()  # a save may have begun since the decision
            if len(left) > now.least and step not in now.protected and self._steps.remove(step):
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
        self.wait()
        self._steps.look(partial(self._discard_after, step))

    def _discard_after(self, step: int) -> None:
        if self._steps.committed_at_s(step) is None:
            raise OptionError(
                f"step {step} is not committed",
                path=self._steps.path(step),
                hint="pass the step that was restored",
            )
        for later in reversed(self._steps.listed()):
            if later > step and not self._steps.remove(later):
                raise WriteError(
                    f"step {later} is being read by another process",
                    phase="remove",
                    path=self._steps.path(later),
                    hint="call discard_after again when that process is done",
                )
