"""Removal of steps that no policy keeps, in the background of one rank.

A pass begins when a step was committed, one at a time. It reads what is committed, decides once,
and looks again before each removal whether a save has begun or a reader holds the step. What it
cannot remove now, a later pass removes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from nostall._commit.commit import committed_at_s
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
from nostall._manager.steps import SaveHandle, StepDirectories
from nostall._model.threads import is_done, spawn, uninterrupted
from nostall.errors import DamagedCheckpointError, SaveTimeoutError, UntrustedMetadataError

_log = logging.getLogger("nostall")


class Retention:
    """Reads committed steps, and removes those that ``policies`` do not keep.

    One thread calls it; one other thread at a time removes.
    """

    def __init__(
        self, steps: StepDirectories, policies: Sequence[Policy], saves: Collection[SaveHandle]
    ) -> None:
        self._steps = steps
        self._policies = policies
        self._saves = saves
        """The saves in progress, whose steps stay."""
        self.own: list[int] = []
        """The steps that this run has committed, in this order; the last one stays."""
        self._known: dict[tuple[int, float], StepRecord] = {}
        """Steps whose files were read."""
        self._has_warned = False
        self._removing = "steps were"
        """The step that is being removed, in messages; else all steps."""
        self._next: Callable[[], object] | None = None
        """The removal to begin when the present one is over."""
        self._removal: Future[None] = Future()
        """Done when nothing is being removed."""
        self._removal.set_result(None)

    def records(self, *, with_files: bool) -> list[StepRecord]:
        """The committed steps, in ascending order; the files of each are read once.

        Without their files they have no metrics, and the time of the metadata file, which a copy of
        the step does not have.
        """
        found = self._steps.committed().items()
        if not with_files:
            return [StepRecord(step=step, committed_at_s=at_s) for step, at_s in found]
        known = self._known  # another thread may replace it
        self._known = known = {each: known.get(each) or self._read(each[0]) for each in found}
        return list(known.values())

    def _read(self, step: int) -> StepRecord:
        """A step; without metrics if another program saved it, or it is damaged or removed."""
        path, at_s, about = self._steps.path(step), 0.0, None
        try:
            at_s = committed_at_s(path)
            about = read_about(path)
        except FileNotFoundError:
            if self._steps.committed_at_s(step) is not None:  # not removed meanwhile
                raise
        except (DamagedCheckpointError, UntrustedMetadataError) as error:
            _log.warning("the metrics of %s cannot be read: %s", path, error)
        metrics = {} if about is None else about.metrics
        return StepRecord(step=step, committed_at_s=at_s, metrics=metrics)

    def begin(self, work: Callable[[], object] | None = None) -> None:
        """Begin to remove something, by default what no policy keeps.

        While another removal runs, this one is begun by the next call, or by :meth:`wait`. Only the
        last that was asked for is.
        """
        self._next = work or (self.run_pass if self._policies else None)
        self._go_on()

    def _go_on(self) -> None:
        if self._next is None or not self._removal.done():
            return
        work, self._next, done = self._next, None, Future[None]()
        with uninterrupted(), suppress(RuntimeError):  # no thread can be started, as at exit
            spawn("nostall-retention", partial(self._run, done, work))
            self._removal = done

    def _run(self, done: Future[None], work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # nothing is lost; the next commit begins another pass
            message = "%s not removed below %s; the next commit tries again: %s"
            _log.warning(message, self._removing, self._steps.root, error)
        finally:
            self._removing = "steps were"
            done.set_result(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being removed, or to be removed.

        ``SaveTimeoutError`` after ``timeout_s``; ``None`` for ``EngineOptions.save_timeout_s``.
        """
        if timeout_s is None:
            timeout_s = default_engine().options.save_timeout_s
        until_s = time.monotonic() + timeout_s
        while is_done(self._removal, until_s - time.monotonic()):
            if self._next is None:
                return
            self._go_on()
        raise SaveTimeoutError(
            f"{self._removing} not removed within {timeout_s:g} s",
            phase="remove",
            path=self._steps.root,
            hint="storage hangs or is slow; the next commit tries again",
        )

    def run_pass(self) -> None:
        """Remove what no policy keeps, lowest step first."""
        records = self.records(with_files=any(map(reads_files, self._policies)))
        left = {record.step for record in records}
        removable = left - steps_to_keep(records, self._policies, tuple(self.own))
        unseen = unseen_metrics(self._policies, records)
        if unseen and removable and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "no step below %s has the metrics %s that KeepBest needs (found: %s): that policy"
                " keeps no step",
                self._steps.root,
                unseen,
                sorted(metrics_in(records)) or "none",
            )
        for step in sorted(removable):
            # A save may have begun since the decision, or was committed.
            in_progress = {handle.step for handle in tuple(self._saves)}
            stay = in_progress.union(self.own[-1:])
            least = 2 if in_progress else 1
            if len(left) > least and step not in stay:
                self._removing = f"step {step} was"
                if self._steps.remove(step):
                    left.discard(step)
