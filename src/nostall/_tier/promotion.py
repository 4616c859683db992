"""One promotion, and the process that performs them, as the trainer sees them."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from nostall._model.interrupts import is_done, on_done, result_of, uninterruptible
from nostall._model.jobs import Failure, RankFailed
from nostall._model.names import METADATA_NAME
from nostall._ranks.failures import error_of
from nostall._storage.places import is_address, storage_options_of
from nostall._tier.promoting import Promote, Promoting, PromotionJob
from nostall._writer.child import ChildProcess, bare_arguments, import_paths
from nostall._writer.messages import Message
from nostall.errors import SaveTimeoutError
from nostall.options import EngineOptions

_log = logging.getLogger("nostall")

_IO_THREADS = 4
"""Few: a slow destination gains nothing from more, and training needs the processors."""
_FINAL = ("CheckpointExistsError", "DamagedCheckpointError")
"""Kinds of failures after which no later job tries again, or it fails in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionStatus:
    """Progress of one promotion of this process."""

    path: str
    """The destination."""
    local_path: str
    """The checkpoint's directory in the local tier."""
    nbytes: int
    """Bytes of its files; 0 before the first is copied."""
    written_nbytes: int
    """Bytes that the destination has accepted."""
    seconds: float
    """Time since the local commit."""
    trouble: str
    """Why the destination refused last; empty if it has not."""
    state: str = "promoting"
    """The same for all, as statuses of saves have one."""

    def __str__(self) -> str:
        text = (
            f"promotion to {self.path}: {self.written_nbytes / 1e6:.1f} of"
            f" {self.nbytes / 1e6:.1f} MB after {self.seconds:.1f} s"
        )
        return f"{text}, refused: {self.trouble}" if self.trouble else text


class Promotion:
    """A committed checkpoint on its way from the local tier to its destination."""

    def __init__(
        self, tier: str, local_path: str, destination: str, record: str = METADATA_NAME
    ) -> None:
        self.tier = tier
        self.record = record
        """What says which files: the metadata, or the record of a part."""
        self.path = destination
        """The destination."""
        self.local_path = local_path
        """The checkpoint's directory in the local tier."""
        self.starts = 0
        self._began_s = time.monotonic()
        self._nbytes = self._written_nbytes = 0
        self._trouble = ""
        self._outcome: Future[Failure | None] = Future()
        self._outcome.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        return f"<{'done' if self.done else self.status}>"

    @property
    def done(self) -> bool:
        """Whether it is over: the destination has the checkpoint, or will not get it."""
        return is_done(self._outcome)

    @property
    def status(self) -> PromotionStatus:
        """Its progress."""
        return PromotionStatus(
            path=self.path,
            local_path=self.local_path,
            nbytes=self._nbytes,
            written_nbytes=self._written_nbytes,
            seconds=time.monotonic() - self._began_s,
            trouble=self._trouble,
        )

    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed at the destination.

        Args:
            timeout: Seconds to wait at most; ``None`` for no limit.

        Raises:
            SaveTimeoutError: It is not, yet; it stays in the local tier.
            DamagedCheckpointError: The local checkpoint is damaged, so it never will be.
            CheckpointExistsError: Another job's checkpoint there must not be replaced.
            SaveError: Its process could not be started, or died again and again.
        """
        if not is_done(self._outcome, threading.TIMEOUT_MAX if timeout is None else timeout):
            raise SaveTimeoutError(
                f"the checkpoint is not at its destination after {timeout:g} s: {self.why_waiting}",
                phase="promote",
                path=self.path,
                hint=f"it is committed in {self.local_path}, and its promotion goes on",
            )
        failure = result_of(self._outcome)
        if failure is not None:
            raise error_of(RankFailed(rank=0, failure=failure))

    @property
    def why_waiting(self) -> str:
        """What the destination does."""
        status = self.status
        if not status.nbytes:
            return self._trouble or "nothing is written"
        done = f"{status.written_nbytes / 1e6:.1f} of {status.nbytes / 1e6:.1f} MB are written"
        return f"{self._trouble}; {done}" if self._trouble else done

    @property
    def why_missing(self) -> str:
        """Why the destination does not have the checkpoint, and what to do."""
        failure = result_of(self._outcome) if self.done else None
        if failure is not None and failure.kind in _FINAL:
            return f"{failure.message} ({failure.hint})"
        why = self.why_waiting if failure is None else failure.message
        return (
            f"{why}; it is committed in {self.local_path}, and a job that starts with the same"
            " local_staging_dir goes on"
        )

    def moved(self, nbytes: int, of_nbytes: int) -> None:
        """Record progress."""
        self._nbytes, self._written_nbytes, self._trouble = of_nbytes, nbytes, ""

    def waits(self, for_what: str) -> None:
        """Record that other ranks have not brought their files."""
        self._trouble = for_what

    def refused(self, trouble: str) -> None:
        """Record that the destination has refused; logged when the reason is new."""
        if trouble != self._trouble:
            _log.warning("not promoted yet, trying again: path=%s: %s", self.path, trouble)
            self._trouble = trouble  # visible when it is logged

    def end(self, failure: Failure | None) -> None:
        """Record how it ended; the first end counts."""
        with uninterruptible(), suppress(InvalidStateError):
            self._outcome.set_result(failure)


class PromotingProcess(ChildProcess[Failure | None]):
    """A process that promotes checkpoints and never imports torch."""

    kind = "promoting process"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._promotions: dict[str, Promotion] = {}
        self._numbers = count()
        super().__init__(
            bare_arguments("nostall._tier.main"),
            cpu_priority=options.cpu_priority,
            io_priority=options.io_priority,
        )

    def promote(self, promotion: Promotion) -> Future[Failure | None]:
        """Begin a promotion; the future always ends."""
        job = str(next(self._numbers))
        self._promotions[job] = promotion
        work = PromotionJob(
            directory=promotion.local_path,
            destination=promotion.path,
            record=promotion.record,
            io_threads=min(_IO_THREADS, self._options.io_threads or _IO_THREADS),
            chunk_nbytes=self._options.chunk_nbytes,
            retries=self._options.write_retries,
            storage_options=storage_options_of(promotion.path),
        )
        message = Promote(job, work, import_paths() if is_address(promotion.path) else ())
        outcome = self._ask(job, lambda failure: failure, [(message, ())])
        on_done(outcome, lambda _: self._promotions.pop(job, None))
        return outcome

    def _handle_event(self, message: Message) -> None:
        if not isinstance(message, Promoting):
            super()._handle_event(message)
        elif (promotion := self._promotions.get(message.job)) is None:
            return
        elif message.waits:
            promotion.waits(message.waits)
        elif message.trouble:
            promotion.refused(message.trouble)
        else:
            promotion.moved(message.nbytes, message.of_nbytes)
