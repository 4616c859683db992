"""The trainer's side of a local tier: what waits for its destination, and the process that copies.

One checkpoint is promoted at a time, in the order of the commits. The process tries again for as
long as a destination refuses, and answers when a checkpoint is there, or damaged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from nostall._model.interrupts import on_done, uninterruptible
from nostall._model.jobs import Failure
from nostall._model.names import METADATA_NAME
from nostall._model.threads import start_apart
from nostall._model.values import WrittenFile
from nostall._ranks.failures import failure_of
from nostall._storage.deadlines import in_time
from nostall._tier.local import (
    committed_in,
    has_waiting_parts,
    left_by_crashes,
    left_in,
    remove_done_parts,
    remove_set_aside,
    set_aside,
    write_part,
)
from nostall._tier.promotion import PromotingProcess, Promotion
from nostall.errors import NostallError, SaveAbortedError, SaveTimeoutError
from nostall.options import EngineOptions

_log = logging.getLogger("nostall")

_MOST_STARTS = 3
"""Processes that may die from one promotion before it waits for the next start of the job."""
_SAVES_PER_AGE, _LONG_S = 2, 600.0
"""What is older than so many times ``save_timeout_s``, or seconds, is of no save under way."""


class Promotions:
    """The promotions of this process; thread-safe.

    Args:
        options: How the process copies.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._process: PromotingProcess | None = None
        self._pending: dict[tuple[str, str], Promotion] = {}
        """By local directory and record, in the order of their commits."""
        self._failed: dict[tuple[str, str], Promotion] = {}
        """Those that will not be tried again, until a later save replaces them."""
        self._being_saved: set[str] = set()
        """Local directories into which saves of this process write."""
        self._being_removed: dict[str, list[Promotion]] = {}
        """Destinations that are being removed, and the promotions that wait for the end of that."""
        self._is_closed = False
        # Not held during a call of the disk, or while a process starts.
        self._lock = threading.RLock()  # acquired directly: see _model.interrupts
        self._changed = threading.Condition(self._lock)
        self._starting = threading.Lock()

    def make_room(
        self,
        tier: str,
        limit: int,
        make: Callable[[], str],
        *,
        is_part: bool = False,
        timeout_s: float,
        rank: int,
    ) -> None:
        """Make the local directory of a new save, once fewer checkpoints wait than allowed.

        What an earlier run has left is promoted, too. Removed are promoted checkpoints but the
        newest, and what was never committed, once it is too old for any save.

        Args:
            tier: The local tier.
            limit: How many committed checkpoints may wait for their destinations.
            make: Makes the directory; returns its path.
            is_part: Whether parts are counted: by ranks that commit nothing.
            timeout_s: How long to wait.
            rank: This rank.

        Raises:
            SaveTimeoutError: As many wait, still.
            OSError: The local disk refuses.
        """
        in_time(
            partial(self.resume, tier),
            timeout_s=timeout_s,
            doing="looking at the local tier",
            phase="plan",
            path=tier,
            rank=rank,
        )
        self._await_room(tier, limit, timeout_s, rank, is_part=is_part)
        self._running()  # from Python 3.12 on, an ending interpreter starts no thread for it
        directory = in_time(
            partial(self._prepare, tier, make, is_part=is_part, timeout_s=timeout_s),
            timeout_s=timeout_s,
            doing="making a directory in the local tier",
            phase="plan",
            path=tier,
            rank=rank,
        )
        with self._lock:
            self._being_saved.add(directory)
        start_apart("nostall-tier", partial(remove_set_aside, tier))

    def _prepare(
        self, tier: str, make: Callable[[], str], *, is_part: bool, timeout_s: float
    ) -> str:
        directory = make()
        with self._lock:
            used = {*self._being_saved, directory}
        promoted = [each.path for each in committed_in(tier) if each.is_promoted]
        old = left_by_crashes(tier, _SAVES_PER_AGE * max(timeout_s, _LONG_S))
        if not is_part:
            old += [path for path in promoted[:-1] if not has_waiting_parts(path)]
        for path in set(old) - used:
            try:
                set_aside(path)
            except OSError:  # another rank was faster, or it stays
                _log.debug("not removed from the local tier: path=%s", path, exc_info=True)
        return directory

    def begin(self, tier: str, directory: str, destination: str) -> Promotion:
        """Promote a checkpoint that was just committed; never raises for what fails later."""
        promotion = Promotion(tier, directory, destination)
        with uninterruptible():  # what is pending is submitted
            with self._lock:
                self._being_saved.discard(directory)
                self._failed.pop((directory, METADATA_NAME), None)
                earlier = self._pending.pop((directory, METADATA_NAME), None)
                self._pending[directory, METADATA_NAME] = promotion
            if earlier is not None:
                _log.info("another checkpoint is promoted instead: path=%s", destination)
            self._submit(promotion)
        return promotion

    def begin_part(
        self,
        tier: str,
        directory: str,
        destination: str,
        files: Sequence[WrittenFile],
        *,
        timeout_s: float,
        rank: int,
    ) -> None:
        """Bring the files that this rank has written, before or after their checkpoint's commit.

        Parts that are at their destination are removed here, but for the newest ones.

        Raises:
            SaveTimeoutError: The local disk does not answer.
            OSError: It refuses.
        """
        record = in_time(
            partial(write_part, directory, rank, files),
            timeout_s=timeout_s,
            doing="recording what is to be copied",
            phase="collect",
            path=directory,
            rank=rank,
        )
        promotion = Promotion(tier, directory, destination, record)
        with uninterruptible():
            with self._lock:
                self._pending[directory, record] = promotion
            self._submit(promotion)
        start_apart("nostall-tier", partial(remove_done_parts, tier, directory))

    def resume(self, tier: str) -> list[Promotion]:
        """Promote all committed checkpoints of a local tier that are not promoted.

        Returns:
            The promotions that are under way, oldest first.

        Raises:
            OSError: The local disk refuses.
        """
        left, new = left_in(tier), []
        with uninterruptible():
            with self._lock:
                for each in left:
                    key = each.directory, each.record
                    if key not in self._pending and key not in self._failed:
                        promotion = Promotion(tier, each.directory, each.destination, each.record)
                        self._pending[key] = promotion
                        new.append(promotion)
                # Now: one that is over a moment later may have failed.
                under_way = [each for each in self._pending.values() if each.tier == tier]
            for promotion in new:
                self._submit(promotion)
        return under_way

    @contextmanager
    def removing(self, destination: str) -> Iterator[bool]:
        """Keep promotions from a destination that is being removed; false if one is under way.

        Otherwise a promotion could publish metadata whose files are removed at the same time.
        """
        with self._lock:
            is_free = all(each.path != destination for each in self._pending.values())
            is_free = is_free and destination not in self._being_removed
            if is_free:
                self._being_removed[destination] = []
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    waiting = self._being_removed.pop(destination)
                for promotion in waiting:
                    self._submit(promotion)

    def unfinished(self) -> list[Promotion]:
        """The promotions that are not over."""
        with self._lock:
            return list(self._pending.values())

    def missing(self) -> list[Promotion]:
        """The promotions that are not over, and those that have failed and were not replaced."""
        with self._lock:
            return [*self._pending.values(), *self._failed.values()]

    def close(self) -> None:
        """End the process; what is not promoted stays in the local tier. Idempotent."""
        with self._starting:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.kill("it was closed", kind="SaveAbortedError")

    def abandon_after_fork(self) -> None:
        """In a forked child: the process belongs to the parent."""
        if self._process is not None:
            self._process.abandon_after_fork()

    def _await_room(
        self, tier: str, limit: int, timeout_s: float, rank: int, *, is_part: bool
    ) -> None:
        def waiting() -> list[Promotion]:
            of_tier = [each for each in self._pending.values() if each.tier == tier]
            return [each for each in of_tier if (each.record != METADATA_NAME) == is_part]

        with self._lock:
            found = waiting()
            if len(found) < limit:
                return
            _log.warning(
                "the save waits: %d checkpoints are not at their destination: path=%s: %s",
                len(found),
                found[0].path,
                found[0].why_waiting,
            )
            if self._changed.wait_for(lambda: len(waiting()) < limit, timeout_s):
                return
            found = waiting()
        raise SaveTimeoutError(
            f"{len(found)} checkpoints have waited for their destination for {timeout_s:g} s, and"
            f" local_staging_limit={limit}: {found[0].why_waiting}",
            rank=rank,
            phase="plan",
            path=found[0].path,
            hint=f"they are committed in {tier}; see to the destination, or save less often",
        )

    def _submit(self, promotion: Promotion) -> None:
        with self._lock:
            if promotion.path in self._being_removed:
                self._being_removed[promotion.path].append(promotion)
                return
        promotion.starts += 1
        try:
            on_done(self._running().promote(promotion), partial(self._settle, promotion))
        except Exception as error:  # no process can be started; the checkpoint is committed
            self._end(promotion, failure_of(error, phase="promote"))

    def _running(self) -> PromotingProcess:
        with self._starting:
            process = self._process
            if process is None or not process.alive:
                if self._is_closed:
                    raise SaveAbortedError(
                        "the engine of this promotion was closed", phase="promote"
                    )
                process = self._process = PromotingProcess(self._options)
            return process

    def _settle(self, promotion: Promotion, answered: Future[Failure | None]) -> None:
        failure = answered.result()
        if failure is not None and failure.kind == "WriterDiedError":
            if promotion.starts < _MOST_STARTS and not self._is_closed:
                _log.warning("promoting again: path=%s: %s", promotion.path, failure.message)
                self._submit(promotion)
                return
            failure = failure._replace(path=promotion.path, phase="promote")
        self._end(promotion, failure)

    def _end(self, promotion: Promotion, failure: Failure | None) -> None:
        with self._lock:
            key = promotion.local_path, promotion.record
            if self._pending.get(key) is promotion:
                del self._pending[key]
                if failure is not None:
                    self._failed[key] = promotion
            self._changed.notify_all()
        if failure is not None and not self._is_closed:
            _log.error(
                "not promoted: path=%s local=%s: %s",
                promotion.path,
                promotion.local_path,
                failure.message,
            )
        promotion.end(failure)


def await_all(promotions: Iterable[Promotion], timeout_s: float) -> list[Promotion]:
    """Wait for promotions; those that are not at their destination after the time."""
    deadline = time.monotonic() + timeout_s
    left = []
    for promotion in promotions:
        try:
            promotion.result(max(0.0, deadline - time.monotonic()))
        except NostallError:
            left.append(promotion)
    return left
