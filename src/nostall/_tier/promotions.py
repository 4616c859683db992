"""Promotions: committed checkpoints of a local disk that another process copies."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from nostall._engine import default_engine
from nostall._model.jobs import Failure, RankFailed
from nostall._model.names import counted
from nostall._model.threads import is_done, uninterrupted
from nostall._queue.ending import end_with_a_loss, finish_all_at_exit
from nostall._queue.sigterm import preemption
from nostall._ranks.failures import error_of, failure_of
from nostall._storage.deadlines import call_with_deadline
from nostall._storage.locations import is_address, local_tier_of, place_of, storage_options_of
from nostall._tier.copying import Ask, Job, News
from nostall._tier.local import LOCK, RECORD, Record, committed_in, is_locked, names_in, open_own
from nostall._writer.messages import Message
from nostall._writer.trainer_side import ChildProcess, bare_arguments, import_paths
from nostall.errors import NostallError, OptionError, SaveTimeoutError, WriteError

_log = logging.getLogger("nostall")

_MOST_STARTS = 3
"""Processes that may die from one promotion before it waits for the next start of the job."""
_numbers = count()


class PromotionStatus(NamedTuple):
    """Progress of one promotion of this process."""

    path: str
    """The destination."""
    local_path: str
    nbytes: int
    """Bytes of its files; 0 before the first is copied."""
    written_nbytes: int
    """Bytes that the destination has accepted."""
    seconds: float
    """Time since the local commit."""
    trouble: str
    """Why it does not go on; empty if it does."""

    def __str__(self) -> str:
        done, of = self.written_nbytes / 1e6, self.nbytes / 1e6
        text = f"promotion to {self.path}: {done:.1f} of {of:.1f} MB after {self.seconds:.1f} s"
        return f"{text}: {self.trouble}" if self.trouble else text


class Promotion:
    """A committed checkpoint on its way from a local disk to its destination."""

    def __init__(self, message: Job) -> None:
        self.message = message
        self.local_path = os.path.join(message["root"], message["name"])
        """The local directory."""
        self.path = f"{message['destination']}/{message['name']}"
        """The destination."""
        self._began_s = time.monotonic()
        self._status = PromotionStatus(self.path, self.local_path, 0, 0, 0.0, "")
        self._outcome: Future[Failure | None] = Future()

    def __repr__(self) -> str:
        return f"<{'done' if self.done else self.status}>"

    @property
    def done(self) -> bool:
        """Whether it is over: the destination has the checkpoint, or will not get it."""
        return is_done(self._outcome)

    @property
    def failure(self) -> Failure | None:
        """Why the destination will not get the checkpoint, if it is over."""
        with uninterrupted():
            return self._outcome.result() if self.done else None

    @property
    def status(self) -> PromotionStatus:
        """Its progress."""
        return self._status._replace(seconds=time.monotonic() - self._began_s)

    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint, or a later one in its place, is committed at the destination.

        Raises:
            SaveTimeoutError: It is not within ``timeout`` seconds; it stays in its local directory.
            DamagedCheckpointError: The local checkpoint is damaged or gone.
            CheckpointExistsError: A checkpoint at the destination must not be replaced.
            SaveError: Its process could not be started, or died again and again.
        """
        if not is_done(self._outcome, threading.TIMEOUT_MAX if timeout is None else timeout):
            raise SaveTimeoutError(
                f"not at the destination after {timeout:g} s: {self.status}",
                phase="promote",
                path=self.path,
                hint=f"it is committed in {self.local_path}, and its promotion continues",
            )
        if (failure := self.failure) is not None:
            raise error_of(RankFailed(rank=0, failure=failure))

    def note(self, news: Message) -> None:
        """Record progress, or trouble; that is logged when it is new."""
        assert isinstance(news, News)
        status = self._status._replace(**{"trouble": "", **news.news})
        if status.trouble not in ("", self._status.trouble) and not news.is_expected:
            _log.warning("not promoted yet, trying again: path=%s: %s", self.path, status.trouble)
        self._status = status

    def end(self, failure: Failure | None) -> None:
        """Record how it ended; once."""
        if failure is not None:
            _log.error("not promoted: path=%s: %s", self.path, failure.message)
        with uninterrupted():
            self._outcome.set_result(failure)


class _Copying(ChildProcess[Failure | None]):
    """The process that copies; it never imports torch."""

    kind = "copying process"

    def __init__(self) -> None:
        options = default_engine().options
        super().__init__(
            bare_arguments("nostall._tier.copying"),
            cpu_priority=options.cpu_priority,
            io_priority=options.io_priority,
        )

    def ask(self, promotion: Promotion, lock_fd: int) -> Future[Failure | None]:
        """Ask for a promotion; the future always ends."""
        asked, job = (Ask(promotion.message), (lock_fd,)), promotion.message["job"]
        return self._ask(job, lambda failure: failure, [asked], on_event=promotion.note)


class Root:
    """A local root of this process, its destination, and its promotions. Thread-safe."""

    def __init__(self, path: str, destination: str, *, shared: bool) -> None:
        self.path = path
        self.destination = destination
        self.shared = shared
        self.lock_fd = -1
        """Descriptor of the lock, from :meth:`start` on."""
        self._promotions: list[Promotion] = []

    def start(self, *, even_if_locked: bool) -> None:
        """Start the process that copies, and promote what earlier jobs have left. Once.

        ``even_if_locked``: also if another process copies from here; this one waits for its end.
        """
        if self.lock_fd >= 0:
            return
        os.makedirs(self.path, exist_ok=True)
        record = Record(self.path, self.destination)
        fd = open_own(os.path.join(self.path, LOCK), None, os.O_RDWR | os.O_CREAT)
        if not self.shared and not is_locked(fd) and not even_if_locked:
            os.close(fd)
            return
        if not os.path.lexists(os.path.join(self.path, RECORD)):
            record.write()  # from then on only the lock's holder does
        committed = committed_in(self.path)
        self.lock_fd = fd
        _process.running()  # from Python 3.12 on, an ending interpreter starts no thread for it
        for name, version in committed.items():
            if not record.has(name, version):
                self.begin(name, is_left=True)
        for name in [] if self.shared else names_in(self.path):
            if name not in committed:
                self.begin(name, is_left=True, files=())

    def begin(
        self,
        name: str,
        *,
        overwrite: bool = False,
        is_left: bool = False,
        files: Sequence[str] | None = None,
    ) -> Promotion:
        """Promote what is committed in a directory; failures come later.

        ``overwrite``: a checkpoint that is not from here may be replaced at the destination.
        ``is_left``: an earlier job has left it. ``files``: another host has its metadata, and these
        are to be brought; empty if they are not known.
        """
        message: Job = {
            "job": str(next(_numbers)),
            "root": self.path,
            "destination": self.destination,
            "shared": self.shared,
            "storage_options": storage_options_of(self.destination),
            "sys_path": import_paths() if is_address(self.destination) else [],
            "name": name,
            "overwrite": overwrite,
            "is_left": is_left,
            "files": files,
        }
        promotion = Promotion(message)
        with uninterrupted():  # what is pending is submitted
            if files is None or not is_left:  # others may never have been committed
                path, missing = promotion.path, self.missing()
                kept = [each for each in missing if not each.done or each.path != path]
                self._promotions = [*kept, promotion]
            self._submit(promotion, _MOST_STARTS)
        return promotion

    def missing(self) -> list[Promotion]:
        """The promotions that are not over, or have failed and were not replaced."""
        return [each for each in self._promotions if not each.done or each.failure is not None]

    def waiting(self) -> list[Promotion]:
        """The promotions that are not over."""
        return [each for each in self._promotions if not each.done]

    def _submit(self, promotion: Promotion, starts: int) -> None:
        def settle(answered: Future[Failure | None]) -> None:
            failure = answered.result()
            if failure is not None and failure.kind == "WriterDiedError" and starts > 1:
                _log.warning("promoting again: path=%s", promotion.path)
                self._submit(promotion, starts - 1)
            else:
                promotion.end(failure)

        try:
            _process.running().ask(promotion, self.lock_fd).add_done_callback(settle)
        except Exception as error:  # no process can be started; the checkpoint is committed
            promotion.end(failure_of(error, phase="promote"))


class _Process:
    """The promotions of this process. A forked child has none."""

    def __init__(self) -> None:
        self.roots: dict[str, Root] = {}
        self._lock = threading.Lock()
        self._copying: _Copying | None = None

    def running(self) -> _Copying:
        """The process that copies, started if none is alive."""
        with self._lock:
            if self._copying is None or not self._copying.alive:
                self._copying = _Copying()
            return self._copying

    def close(self, *, is_fork: bool = False) -> None:
        """End the process that copies, and forget everything."""
        copying, self._copying = self._copying, None
        if copying is not None and is_fork:
            copying.abandon_after_fork()
        elif copying is not None:
            copying.kill("it was closed", kind="SaveAbortedError")
        for root in self.roots.values():
            if root.lock_fd >= 0:
                os.close(root.lock_fd)
        self.roots, self._lock = {}, threading.Lock()


_process = _Process()
close = _process.close
os.register_at_fork(after_in_child=lambda: close(is_fork=True))


def root_at(path: str, destination: str, *, shared: bool) -> Root:
    """The local root of this process at a path; ``OptionError`` if it is another one's."""
    root = _process.roots.setdefault(path, Root(path, destination, shared=shared))
    if (root.destination, root.shared) != (destination, shared):
        raise OptionError(
            f"local_staging_dir is for {root.destination}, with local_staging_shared={root.shared}",
            path=path,
            hint="use a local directory for each directory of checkpoints",
        )
    return root


def promote(
    local_root: str | os.PathLike[str], destination: str | os.PathLike[str], *, shared: bool = True
) -> tuple[Promotion, ...]:
    """Promote what an earlier job has committed in a local root; on one rank.

    The first save with ``local_staging_dir=local_root`` does that, too.

    Args:
        local_root: The directory that was ``local_staging_dir``.
        destination: The directory, or address, in which the checkpoints belong.
        shared: What was ``local_staging_shared``. If false, call it on one rank of each host, and
            let all of them live until the promotions that the coordinator's host returns are over.

    Returns:
        The promotions that are not over, oldest first; the process waits for them when it ends.

    Raises:
        OptionError: A path cannot name a directory, or the root has another destination.
        WriteError: The local disk refuses, or the root has another destination.
    """
    root = root_at(local_tier_of(local_root), place_of(destination), shared=shared)
    on_disk(root.path, lambda: root.start(even_if_locked=True))
    return tuple(root.waiting())


def on_disk(path: str, call: Callable[[], None], *, phase: str = "plan", rank: int = 0) -> None:
    """Make a call; ``SaveTimeoutError`` or ``WriteError`` if the local disk refuses."""
    timeout_s, doing = default_engine().options.save_timeout_s, "looking at local_staging_dir"
    try:
        call_with_deadline(
            call, timeout_s=timeout_s, doing=doing, phase=phase, path=path, rank=rank
        )
    except NostallError:
        raise
    except OSError as error:
        raise WriteError(
            f"local_staging_dir cannot be used: {error.strerror or error}",
            errno=error.errno,
            rank=rank,
            phase=phase,
            path=path,
            hint="it must be a directory that this user can write to, for one destination",
        ) from error


def status() -> tuple[PromotionStatus, ...]:
    """Progress of this process's promotions that are not over; callable from any thread."""
    return tuple(each.status for root in [*_process.roots.values()] for each in root.waiting())


def _missing() -> list[Promotion]:
    return [each for root in [*_process.roots.values()] for each in root.missing()]


def _finish_at_exit() -> None:
    """Wait for all promotions, or for Ctrl-C; end the process with a failure if one is missing."""
    finish_all_at_exit()  # as registered, it runs later; its saves are promoted, too
    timeout_s = min(default_engine().options.exit_timeout_s, preemption.left_s)
    deadline_s = time.monotonic() + timeout_s
    with suppress(KeyboardInterrupt):
        if unfinished := [each for each in _missing() if not each.done]:
            _log.warning(
                "exiting with %s not yet promoted; waiting up to %g s (Ctrl-C ends the wait)",
                counted(len(unfinished), "checkpoint"),
                timeout_s,
            )
        for each in unfinished:
            with suppress(NostallError):
                each.result(max(0.0, deadline_s - time.monotonic()))
    for each in (left := _missing()):
        if each.failure is not None:
            why = f"{each.failure.message} ({each.failure.hint})"
        else:
            why = f"{each.status}; the next job with this local_staging_dir continues the promotion"
        _log.error("not at its destination: path=%s local=%s: %s", each.path, each.local_path, why)
    if left:
        end_with_a_loss()


atexit.register(_finish_at_exit)
