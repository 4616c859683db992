"""The directories of steps: names, what is committed, who holds them, a root's lock; one save.

``root/step-000000100`` holds the checkpoint of step 100.

A step is *committed* when its metadata exists: listing and policies count these. Listing reads the
names in ``root`` and asks for the status of one file per step; it opens nothing. A committed step
is *complete* if all its files exist: one is restored only then.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from nostall import _torch
from nostall._engine import default_engine
from nostall._manager.contents import About, read_about
from nostall._model.names import is_metadata_of_one_rank
from nostall._storage.deadlines import call_with_deadline
from nostall._storage.directories import busy_in
from nostall._storage.locations import is_address, storage_at
from nostall._storage.port import how_to_read
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    ReadError,
    UnknownMetadataError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import why_damaged
from nostall.removal import remove_checkpoint
from nostall.stats import SaveStats

if TYPE_CHECKING:
    from nostall._tier.promotions import Promotion

T = TypeVar("T")

_log = logging.getLogger("nostall")
_NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,})", re.ASCII)
LOCK_NAME = ".nostall.lock"
_LONGEST_NBYTES = 300
_OPENING = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def name_of(step: int) -> str:
    """The name of a step's directory; such names sort like steps below a billion."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose directory has this name; ``None`` for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class StepDirectories:
    """The steps below one directory.

    All methods but :meth:`look` and :meth:`choose` raise ``OSError`` if storage refuses to answer.
    """

    root: str

    def look(self, find: Callable[[], T]) -> T:
        """Look at the steps by ``find``, with a deadline: other ranks may wait for the result.

        ``ReadError`` if storage refuses; ``SaveTimeoutError`` after
        ``EngineOptions.save_timeout_s``.
        """
        timeout_s, doing = default_engine().options.save_timeout_s, "looking for steps"
        try:
            return call_with_deadline(
                find, timeout_s=timeout_s, doing=doing, phase="read", path=self.root
            )
        except NostallError:
            raise
        except OSError as error:
            raise ReadError(
                f"steps cannot be read: {error.strerror or error}",
                errno=error.errno,
                phase="read",
                path=error.filename or self.root,
                hint=how_to_read(error),
            ) from error

    def path(self, step: int) -> str:
        """The directory of a step."""
        return f"{self.root}/{name_of(step)}"

    def listed(self) -> list[int]:
        """All steps that have a directory, committed or not, in ascending order."""
        names: list[str] = []
        with suppress(*() if is_address(self.root) else (FileNotFoundError,)):  # store: no bucket
            names = storage_at(self.root).list()
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def committed(self) -> dict[int, float]:
        """The committed steps, in ascending order, and when each was committed."""
        times = ((step, self.committed_at_s(step)) for step in self.listed())
        return {step: at_s for step, at_s in times if at_s is not None}

    def committed_at_s(self, step: int) -> float | None:
        """When a step was committed; ``None`` if it is not."""
        try:
            return storage_at(self.path(step)).stat(_torch.METADATA_NAME).modified_s
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ReadError:  # something else has its name: a damaged step, not an absent one
            return 0.0

    def remove(self, step: int) -> bool:
        """Remove a step, or the rest of one, unless a reader holds it. Other files in it stay."""
        path = self.path(step)
        with held(path, to_remove=True) as is_ours:
            if not is_ours:
                _log.info("%s stays for now: it is being read", path)
                return False
            with suppress(OptionError):  # holds only other files, or is promoted to
                remove_checkpoint(path)
                _log.info("removed %s", path)
        return True

    def remove_after(self, step: int) -> None:
        """Remove all steps above a committed one, the highest first."""
        if self.committed_at_s(step) is None:
            raise OptionError(
                f"step {step} is not committed",
                path=self.path(step),
                hint="pass the step that was restored",
            )
        for later in reversed(self.listed()):
            if later > step and not self.remove(later):
                raise WriteError(
                    f"step {later} is being read by another process",
                    phase="remove",
                    path=self.path(later),
                    hint="call discard_after again when that process is done",
                )

    def remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals have left; the root has to be locked."""
        for step in self.listed():
            path, names = self.path(step), list[str]()
            with suppress(FileNotFoundError, NotADirectoryError):
                # Read anew, while the status of a single name may come from a cache of NFS.
                names = storage_at(path).list()
            # Ranks may have committed there, each for itself.
            is_committed = _torch.METADATA_NAME in names or any(map(is_metadata_of_one_rank, names))
            if not busy_in(path) and not is_committed:
                _log.warning("removing the files of an unfinished save: %s", path)
                self.remove(step)

    # --- the step to restore ------------------------------------------------------------------

    def choose(self, step: int | None, hold: ExitStack, *, deep: bool) -> About | None:
        """The description of a step; with ``None``, of the highest step that can be restored.

        ``None`` if no step is committed. It is an error if steps are and none can be restored, or
        if a given step is not committed. ``hold`` keeps the step from removal by other processes of
        this machine. ``deep`` compares every byte with its checksum, for which there is no
        deadline.
        """
        if step is not None:
            about = self._restorable(step, hold, deep=deep)
            if about is None:
                raise ReadError(
                    f"step {step} is not committed",
                    phase="read",
                    path=self.path(step),
                    hint=f"committed steps: {[*self.look(self.committed)][-5:]}",
                )
            if later := [each for each in self.look(self.committed) if each > step]:
                _log.warning(
                    "restoring step %d, although %s has later steps: %s. A restart resumes from"
                    " step %d, unless manager.discard_after(%d) removes them",
                    *(step, self.root, f"{later!r:.200}", later[-1], step),
                )
            return about
        refused: dict[int, NostallError] = {}
        for each in reversed(self.look(self.listed)):
            try:
                if about := self._restorable(each, hold, deep=deep):
                    return about
            except (DamagedCheckpointError, ReadError, UnknownMetadataError) as error:
                _log.warning("skipped %s: %s", self.path(each), error.message)
                refused[each] = error
        for refusal in refused.values():
            if not isinstance(refusal, DamagedCheckpointError):
                raise refusal
        if refused:
            newest, refusal = next(iter(refused.items()))
            raise DamagedCheckpointError(
                f"no committed step of {sorted(refused)!r:.200} can be restored; step {newest}:"
                f" {refusal.message}",
                phase="read",
                path=self.root,
                hint=f"{refusal.hint}; to train from the beginning, use another root",
            ) from refusal
        return None

    def _restorable(self, step: int, hold: ExitStack, *, deep: bool) -> About | None:
        """The description of a step; ``None`` if it is not committed. Held before this looks."""
        path = self.path(step)

        def require_undamaged(*, deep: bool) -> None:
            if (why := why_damaged(path, deep=deep)) is not None:
                hint = f"`nostall verify {path}` lists all damage; restore another step"
                what = f"the step is damaged: {why}"
                raise DamagedCheckpointError(what, phase="read", path=path, hint=hint)

        def describe() -> About | None:
            is_held = hold.enter_context(held(path))
            if not is_held or self.committed_at_s(step) is None:
                return None
            require_undamaged(deep=False)
            about = read_about(path)
            if about is not None and about.step == step:
                return about
            what = "the step was not saved by a CheckpointManager"
            hint = "load it with torch.distributed.checkpoint.load"
            if about is not None:  # a job would go on from there, and find it at each resume
                what = f"the directory was renamed or copied: it holds step {about.step}"
                hint = f"rename it to {name_of(about.step)}, unless that exists"
            raise DamagedCheckpointError(what, phase="read", path=path, hint=hint)

        about = self.look(describe)
        if about is not None and deep:
            require_undamaged(deep=True)
        return about


@contextmanager
def held(directory: str, *, to_remove: bool = False) -> Iterator[bool]:
    """Hold a step's directory for reading, or alone to remove it; false if another process does.

    The processes of one machine see each other. True also where a file system has no locks.
    """
    is_ours = True
    with ExitStack() as opened:
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            fcntl.flock(fd, (fcntl.LOCK_EX if to_remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:  # or it no longer exists, which the caller notices itself
            is_ours = not isinstance(error, BlockingIOError)
        yield is_ours


# --- the lock of a root ---------------------------------------------------------------------------


class RootLock:
    """The lock of one root, which is made: one process at a time saves below it.

    ``flock`` locks a file in the root. The lock belongs to an open file description, so nothing
    else that a process does with the file releases it; managers of one root share it by duplicate
    descriptors. The system releases it when the process ends, however that happens; a forked child
    closes its copies. So a job that was killed never keeps the next one from saving. Among machines
    the lock is as good as the file system: NFS passes it to the server, which may keep that of a
    crashed machine for some time. A lock of another machine is therefore a warning.
    """

    _held: ClassVar[list[RootLock]] = []
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, root: str) -> None:
        self._root = root
        self._fd = -1

    def take(self) -> None:
        """Take the lock, until :meth:`release` or the end of the process.

        A warning tells if the file system has no locks, another file has the name of the lock, or
        another machine has it; if another process of this machine has it, this is an error. An
        object store has no locks.
        """
        if self in self._held or is_address(self._root):
            return
        try:
            os.makedirs(self._root, exist_ok=True)
            with self._changing, ExitStack() as opened:
                self._fd = os.open(f"{self._root}/{LOCK_NAME}", _OPENING, 0o666)
                opened.callback(os.close, self._fd)
                status = os.fstat(self._fd)
                # Made by this user, or by the one who owns the root.
                owners = os.geteuid(), os.stat(self._root).st_uid
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if not is_plain or status.st_uid not in owners:  # it would be written into
                    raise FileExistsError(errno.EEXIST, f"{LOCK_NAME} is a link or another user's")
                if self._is_locked():
                    self._held.append(self)
                    opened.pop_all()
        except OSError as error:
            _log.warning(
                "root=%s cannot be locked: %s. A second job that saves here would go unnoticed",
                self._root,
                error.strerror,
            )

    def _is_locked(self) -> bool:
        """Lock the file; false if another machine has the lock."""
        for other in self._held:
            if os.path.samestat(os.fstat(other._fd), os.fstat(self._fd)):
                os.dup2(other._fd, self._fd, inheritable=False)
                return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._fd, _LONGEST_NBYTES).decode(errors="replace")
            pid, _, host = owner.strip().partition(" ")
            if host in ("", socket.gethostname()):
                raise OptionError(
                    f"another process saves below this root: pid {pid or 'unknown'}",
                    path=self._root,
                    hint="use another root, or end that process first",
                ) from None
            what = "process %s on %s has locked root=%s. If it still saves here, end one of the"
            _log.warning(f"{what} two jobs: each removes the other's steps", pid, host, self._root)
            return False
        os.truncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        return True

    def release(self) -> None:
        """Release the lock, if no other manager of this process needs it. Idempotent."""
        with self._changing:
            if self in self._held:
                self._held.remove(self)
                os.close(self._fd)

    @classmethod
    def start_over(cls) -> None:
        """In a forked child: drop the locks, which the parent keeps."""
        while cls._held:
            os.close(cls._held.pop()._fd)
        cls._changing = threading.Lock()  # a thread of the parent may have held it at the fork


os.register_at_fork(after_in_child=RootLock.start_over)


# --- one save -------------------------------------------------------------------------------------


class SaveHandle:
    """One save: committed, failed, or in progress.

    A save is committed by the manager's methods, on the thread that calls them; so is the state of
    its handle.
    """

    def __init__(
        self, step: int, writer: FileSystemWriterAsync, path: str, wait: Callable[[Any], object]
    ) -> None:
        self.step = step
        self.path = path
        """The directory of the step."""
        self._writer = writer
        self._wait = wait
        self._outcome: Literal["committed"] | BaseException | None = None

    def __repr__(self) -> str:
        outcome = "failed" if isinstance(self._outcome, BaseException) else self._outcome
        return f"<SaveHandle step={self.step} {outcome or 'in progress'}>"

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed; the same on all ranks.

        It changes only in calls of the manager and in :meth:`result`.
        """
        return self._outcome is not None

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        self._writer.wait_staged(timeout)

    def result(self, timeout: float | None = None) -> str:
        """Wait until the save is committed; returns the directory of the step.

        Collective until the save is done: call it on every rank. Earlier and later saves of the
        manager are waited for, too.

        Args:
            timeout: As for :meth:`nostall.CheckpointManager.wait`.

        Raises:
            CheckpointException: This save failed on some rank; or, if it was not done before the
                call, another save.
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds.
        """
        if not self.done:
            self._wait(timeout)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self.path

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """Promotions of the checkpoint from a local tier to the step's directory, once committed.

        On the coordinator; empty on other ranks, and if the writer has no ``local_staging_dir``.
        """
        return () if self._writer.promotion is None else (self._writer.promotion,)

    @property
    def stats(self) -> SaveStats | None:
        """Timings on this rank.

        ``None`` before its files are written; complete once the save is done.
        """
        return self._writer.stats


class FailingPlanner(DefaultSavePlanner):
    """Raises an error of this rank where all ranks learn of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        raise self._error
