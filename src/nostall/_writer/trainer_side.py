"""The trainer's side of a background process: start it, send requests, receive how each one ended.

A :class:`WriterProcess` is the one that writes; other kinds run functions, or promote.

One daemon thread per process receives answers and settles futures. Every wait is a
``Future.result`` with three exits: the answer, the failure that the process died, or the caller's
deadline.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar

import psutil

from nostall._model import checksum
from nostall._model.jobs import Failure, RankFailed, RankReport, WriteJob
from nostall._model.threads import is_done, spawn, uninterrupted
from nostall._storage.deadlines import (
    REMOVAL_TIMEOUT_S,
    call_with_deadline,
    remove_with_deadline,
)
from nostall._storage.posix import remove_empty_files
from nostall._writer.messages import (
    STARTED,
    Answer,
    Cancel,
    Created,
    MapBlock,
    Message,
    Ready,
    Receiver,
    UnmapBlock,
    Wrote,
    send,
)
from nostall.errors import ProtocolError, SaveTimeoutError, WriterDiedError

if TYPE_CHECKING:  # a worker process says that it is ready before it imports torch
    from nostall._memory.arena import Lease
    from nostall._model.progress import Progress

_SEND_TIMEOUT_S = 60.0
"""A child reads its socket all the time; one that does not for this long is stopped or broken."""
_EXIT_TIMEOUT_S = 5.0
_KILLED_TIMEOUT_S = 1.0
"""A killed process that lives longer is in a system call; the receiving thread waits on."""
_SETTLE_TIMEOUT_S = 2.0
_IS_PYTHON = (
    "sys.executable must be a Python interpreter, or a script that starts one with `exec`; in a"
    " frozen application, name one with multiprocessing.set_executable()"
)
ENCODING = ("-X", f"utf8={int(sys.getfilesystemencoding() == 'utf-8')}")
"""Interpreter arguments by which a file name has the same bytes as in this process.

An isolated interpreter ignores PYTHONUTF8, and the locale may have been changed meanwhile.
"""

T = TypeVar("T")
Addressed: TypeAlias = tuple[Message, tuple[int, ...]]
"""A message and the descriptors sent with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting(Generic[T]):
    future: Future[T]
    on_death: Callable[[Failure], T]
    """Makes the answer if the process dies: once it has ended, so it may clean up after it; at once
    for a job that comes later.
    """
    on_event: Callable[[Message], object]
    """Called with its other messages; what it refers to is kept until the process answers."""


def _refuse(message: Message) -> NoReturn:
    raise ProtocolError(f"an unexpected message: {message!r:.200}")


def bare_arguments(module: str) -> list[str]:
    """Interpreter arguments that run ``main`` of a module of nostall's which never imports torch.

    Nothing of the user's environment, current directory and site-packages is executed, except the
    package for faster checksums, if installed.
    """
    entry = (
        f"import sys; sys.path.append(sys.argv[1]); from {module} import main;"
        " main(int(sys.argv[3]), int(sys.argv[4]), sys.argv[2])"
    )
    root = str(Path(__file__).resolve().parents[2])
    return ["-I", "-S", *ENCODING, "-c", entry, root, checksum.use_fastest() or ""]


def import_paths() -> list[str]:
    """Where this process finds modules, for a child; Python ignores what is not a string."""
    paths: list[object] = [*sys.path]
    # Plain strings: the child may not know a subclass of str.
    return [str.__str__(each) for each in paths if isinstance(each, str)]


class ChildProcess(Generic[T]):
    """A running background process whose answers are of type ``T``.

    The child's end of the socket and the parent's process id are appended to ``command``, its
    interpreter arguments. A priority of ``None`` stays unchanged. A process that does not read a
    message within ``send_timeout_s``, at most 60 seconds, is killed.
    """

    kind: str
    """Name of this kind of process in messages."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cpu_priority: int | None,
        io_priority: int | None,
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        self._program = _interpreter(self.kind)
        self.user = os.geteuid()
        try:
            self._socket, self._process = _start(self._program, command)
        except OSError as error:
            raise WriterDiedError(
                f"the {self.kind} could not be started: {error.strerror or error}",
                phase="start",
                path=self._program,
                hint="this user must be allowed to execute it, to make a pair of sockets and to"
                " start one more process",
            ) from error
        self._socket.settimeout(min(send_timeout_s, _SEND_TIMEOUT_S))
        self._send_lock = threading.Lock()
        self._later: deque[Message] = deque()
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting[T]] = {}
        self._death: Failure | None = None
        self._hung_up = False
        self._ready: Future[None] = Future()
        self._receiver = spawn(f"nostall-receiver-{self.pid}", self._receive)
        self.set_priority(cpu_priority, io_priority)

    def set_priority(self, cpu_priority: int | None, io_priority: int | None) -> None:
        """Set niceness and I/O class of each thread; ``None`` leaves one unchanged.

        On Linux both are per thread, and a new thread inherits those of its creator; so the threads
        are listed again until no new one appears. Errors are ignored (raising a priority needs
        privileges): the save is the same either way.
        """
        done: set[int] = set()
        with suppress(OSError, ValueError, psutil.Error):
            while new := {int(name) for name in os.listdir(f"/proc/{self.pid}/task")} - done:
                for thread in sorted(new):
                    with suppress(OSError, ValueError, psutil.Error):
                        if cpu_priority is not None:
                            os.setpriority(os.PRIO_PROCESS, thread, cpu_priority)
                        if io_priority is not None:
                            psutil.Process(thread).ionice(io_priority)
                done |= new

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it accepts requests; false from the moment it ends, not from its detection."""
        # poll() returns None while the receiving thread waits for the exit status, hence the flag.
        return self._death is None and not self._hung_up and self._process.poll() is None

    @property
    def idle(self) -> bool:
        """Whether every request has been answered."""
        with self._lock:
            return not self._waiting

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the process listens; false after ``timeout`` seconds or if it is dead."""
        return is_done(self._ready, timeout) and self.alive

    def kill(self, reason: str, kind: str = "WriterDiedError") -> None:
        """Kill the process; unanswered requests fail with ``reason``. Idempotent."""
        self._record_death(kind, reason)
        self._kill()
        self._reap(_KILLED_TIMEOUT_S)

    def terminate(self, reason: str, *, kill_after_s: float) -> None:
        """Ask the process to end by SIGTERM, and kill it if it does not."""
        self._record_death("SaveAbortedError", reason)
        self._process.terminate()
        self._reap(kill_after_s)

    def close(self, *, kill_after_s: float = _EXIT_TIMEOUT_S) -> None:
        """End an idle process by closing its socket. Idempotent."""
        self._record_death("SaveAbortedError", "it was closed")
        with suppress(OSError):  # the process has closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reap(kill_after_s)

    def abandon_after_fork(self) -> None:
        """Close the descriptor in a forked child; the process belongs to the parent. Idempotent."""
        self._socket.close()

    def _ask(
        self,
        job: str,
        on_death: Callable[[Failure], T],
        messages: Iterable[Addressed],
        *,
        on_event: Callable[[Message], object] = _refuse,
    ) -> Future[T]:
        """Send messages, the last of which requests a job; the future always ends."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a sent job cannot be cancelled, only aborted
        with self._lock:
            death = self._death
            if death is None:
                self._waiting[job] = _Waiting(future=future, on_death=on_death, on_event=on_event)
        if death is None:
            self._send(messages)
        else:
            future.set_result(on_death(death))
        return future

    def _send(self, messages: Iterable[Addressed]) -> None:
        """Send messages without others in between; a process that does not take them is killed."""
        try:
            with self._send_lock:
                while self._later:
                    send(self._socket, self._later.popleft())
                for message, descriptors in messages:
                    send(self._socket, message, descriptors)
        except ConnectionError:
            self._hung_up = True  # the receiving thread learns how it ended, and says so
        except (OSError, ValueError) as error:  # ValueError: the socket was closed meanwhile
            self.kill(f"it no longer receives messages ({type(error).__name__}: {error})")

    def _send_later(self, message: Message) -> None:
        """Send with the next message, or now if no thread sends: for finalizers."""
        self._later.append(message)
        with uninterrupted():
            if self._send_lock.acquire(blocking=False):
                try:
                    while self._later:
                        send(self._socket, self._later.popleft())
                except OSError:  # the next sender detects it, and kills the process
                    return
                finally:
                    self._send_lock.release()

    def _receive(self) -> None:
        """The receiving thread: settle futures until the process ends, then fail the others."""
        receiver = Receiver(self._socket)
        try:
            while True:
                try:
                    received = receiver.receive()
                except TimeoutError:
                    continue
                if received is None:
                    break
                self._take(received[0])
        except Exception as error:  # a confused peer is a dead peer
            self._record_death("ProtocolError", f"{type(error).__name__}: {error}")
            self._kill()
        self._hung_up = True
        self._settle_rest()

    def _take(self, message: Message) -> None:
        match message:
            case Ready():
                self._ready.set_result(None)
            case Answer():
                with self._lock:
                    waiting = self._waiting.pop(message.job, None)
                if waiting is not None:  # a late answer without a waiter is dropped
                    waiting.future.set_result(message.outcome)
            case _:  # an event, which begins with the job
                waiting = self._waiting.get(message[0])
                if waiting is not None:
                    waiting.on_event(message)

    def _settle_rest(self) -> None:
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill()
            code = self._process.wait()
        ended = _how_it_ended(code)
        if not self._ready.done():
            ended += f" before it was ready; it ran {self._program} ({_IS_PYTHON})"
        self._record_death("WriterDiedError", ended, code)
        with self._lock:
            rest = list(self._waiting.values())
            self._waiting.clear()
        if not self._ready.done():
            self._ready.set_result(None)
        self._socket.close()
        assert self._death is not None  # recorded above at the latest
        for waiting in rest:
            waiting.future.set_result(waiting.on_death(self._death))

    def _record_death(self, kind: str, reason: str, code: int | None = None) -> None:
        """Record why the process ended; the first reason stands."""
        with self._lock:
            if self._death is None:
                self._death = Failure(
                    kind=kind,
                    message=f"{self.kind} {self.pid}: {reason}",
                    phase="write",
                    exit_code=code,
                    hint="the next save starts a new one",
                )

    def _kill(self) -> None:
        try:
            self._process.kill()
        except PermissionError:  # after setuid; the process ends with its socket
            with suppress(OSError):  # it has closed it; requests are failed in any case
                self._socket.shutdown(socket.SHUT_RDWR)

    def _reap(self, kill_after_s: float) -> None:
        try:
            self._process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_TIMEOUT_S)
        if threading.current_thread() is not self._receiver:
            # The receiver removes written files, and storage may hang.
            has_ended = self._process.returncode is not None
            self._receiver.join(_SETTLE_TIMEOUT_S if has_ended else 0)


# --- the writer process ---------------------------------------------------------------------------


class WriterProcess(ChildProcess[RankReport]):
    """A process that writes file images to storage and never imports torch."""

    kind = "writer process"

    def __init__(
        self, *, cpu_priority: int | None, io_priority: int | None, send_timeout_s: float
    ) -> None:
        self._mapped: set[int] = set()
        """Identifiers of the blocks that the process has received."""
        super().__init__(
            bare_arguments("nostall._writer.main"),
            cpu_priority=cpu_priority,
            io_priority=io_priority,
            send_timeout_s=send_timeout_s,
        )

    def submit(self, job: WriteJob, lease: Lease, progress: Progress) -> Future[RankReport]:
        """Submit a job, whose images must not change before the future is done.

        The lease, on the arena block with the images, is kept until the process has answered. The
        future always ends: with the writer's report, or, if the process dies, with a failure, once
        the files that this rank has made for the save are removed.
        """

        def on_death(failure: Failure) -> RankReport:
            remove_with_deadline(sorted(progress.created))
            paths = [os.path.join(job.directory, image.name) for image in job.files]
            with suppress(SaveTimeoutError):  # made last, and not reported
                call_with_deadline(
                    partial(remove_empty_files, paths),
                    timeout_s=REMOVAL_TIMEOUT_S,
                    doing="removing files",
                    phase="remove",
                    path=job.directory,
                )
            return RankFailed(
                rank=job.rank, failure=failure._replace(path=paths[0] if paths else job.directory)
            )

        block = lease.block
        messages: list[Addressed] = [(job, ())]
        if block.id not in self._mapped:
            # Nobody else submits a job in this block before it is sent: the lease is this save's.
            self._mapped.add(block.id)
            messages.insert(0, (MapBlock(block.id, block.nbytes), (block.fd,)))
        on_event = partial(_record, lease, progress)
        return self._ask(job.job, on_death, messages, on_event=on_event)

    def unanswered(self, save: str) -> dict[str, Future[RankReport]]:
        """The unanswered jobs of a save, and their futures."""
        with self._lock:
            return {
                job: waiting.future
                for job, waiting in self._waiting.items()
                if job.startswith(f"{save}/")
            }

    def cancel(self, save: str) -> None:
        """Ask the process to drop the jobs of a save; they are answered as aborted."""
        self._send((Cancel(job), ()) for job in self.unanswered(save))

    def forget(self, block_id: int) -> None:
        """Let the process unmap a block that the arena has freed."""
        if block_id in self._mapped and self.alive:
            self._mapped.discard(block_id)
            self._send_later(UnmapBlock(block_id))


def _record(_lease: Lease, progress: Progress, message: Message) -> None:
    match message:
        case Wrote():
            progress.wrote(message.job, message.nbytes)
        case Created():
            progress.created.add(message.path)
        case _:
            _refuse(message)


# --- start and end of a process -------------------------------------------------------------------


def _interpreter(kind: str) -> str:
    """The program that runs a background process; ``WriterDiedError`` if there is none, or if it
    would start this program again.
    """
    is_frozen = getattr(sys, "frozen", False)
    program = os.fsdecode(get_executable() or "") if is_frozen else sys.executable
    starts_this_again = STARTED in os.environ or (is_frozen and program == sys.executable)
    if program and not starts_this_again:
        return program
    why = f"{program!r} is not a Python interpreter" if program else "sys.executable is empty"
    raise WriterDiedError(
        f"no {kind} can be started: {why}",
        phase="start",
        hint=_IS_PYTHON,
    )


def _start(program: str, command: Sequence[str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process; returns our end of its socket, too."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(  # ended by kill() or close()
                [program, *command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, STARTED: "1"},
                start_new_session=True,  # not reached by Ctrl-C at the trainer's terminal
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def _how_it_ended(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}"
    return f"ended with exit code {code}"
