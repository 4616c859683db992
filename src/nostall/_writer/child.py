"""The trainer's side of a background process: start it, send it requests, learn how each one ended.

One daemon thread per process receives answers and settles futures, so a caller never has to drive anything and every
wait is a ``Future.result`` with three exits: the answer, the failure that the process died, or the caller's deadline.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from nostall._model.jobs import Failure
from nostall._writer.framing import Message, Receiver, send
from nostall._writer.priority import lower_priority
from nostall.errors import NostallError, ProtocolError, WriterDiedError

_SEND_TIMEOUT_S = 60.0
"""A child reads its socket all the time; one that does not for this long is stopped or broken."""
_EXIT_TIMEOUT_S = 5.0
_KILLED_TIMEOUT_S = 1.0
"""One that was killed and has not ended by then stands in a system call; the receiving thread goes on waiting for it."""
_SETTLE_TIMEOUT_S = 2.0

T = TypeVar("T")
Addressed: TypeAlias = tuple[Message, tuple[int, ...]]
"""A message and the descriptors that travel with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting(Generic[T]):
    future: Future[T]
    on_death: Callable[[Failure], T]
    """What to answer if the process dies; runs once it is gone, so it may clean up after it."""
    holds: object
    """What the process uses until it answers, and nobody else may have before, whoever loses it meanwhile."""


class ChildProcess(ABC, Generic[T]):
    """A running background process whose answers are of type ``T``.

    Args:
        command: Interpreter arguments; the child's end of the socket and the parent's process id are appended.
        cpu_priority: Niceness, or ``None`` to leave it alone.
        io_priority: I/O scheduling class, or ``None``.
    """

    kind: str
    """What the process is called in messages."""

    def __init__(
        self, command: Sequence[str], *, cpu_priority: int | None, io_priority: int | None
    ) -> None:
        if not sys.executable:
            raise NostallError(
                f"this interpreter does not know its own executable, so no {self.kind} can be started",
                phase="write",
                hint="set sys.executable",
            )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(  # ended by kill() or close()
                    [sys.executable, *command, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C at the trainer's terminal is not for it
                )
            except OSError as error:
                ours.close()
                raise WriterDiedError(
                    f"the {self.kind} could not be started: {error.strerror or error}",
                    phase="start",
                    path=sys.executable,
                    hint="this user has to be able to run that, and one more process",
                ) from error
        ours.settimeout(_SEND_TIMEOUT_S)
        self._socket = ours
        self._send_lock = threading.Lock()
        self._later: deque[Message] = deque()
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting[T]] = {}
        self._death: Failure | None = None
        self._hung_up = False
        self._ready = threading.Event()
        self._receiver = threading.Thread(
            target=self._receive, name=f"nostall-receiver-{self.pid}", daemon=True
        )
        self._receiver.start()
        lower_priority(self.pid, cpu_priority, io_priority)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether requests can still be given to it; false from the moment it ended, not from when that was noticed."""
        # poll() says nothing while the receiving thread waits for the exit status, hence the flag.
        return self._death is None and not self._hung_up and self._process.poll() is None

    @property
    def idle(self) -> bool:
        """Whether it has answered everything it was asked."""
        with self._lock:
            return not self._waiting

    def wait_ready(self, timeout: float) -> bool:
        """Wait until the process listens, at most ``timeout`` seconds; false if it did not or is dead."""
        return self._ready.wait(timeout) and self.alive

    def kill(self, reason: str, kind: str = "WriterDiedError") -> None:
        """End the process now; unanswered requests fail with ``reason``. Idempotent."""
        self._pronounce(kind, reason)
        self._process.kill()
        self._reap(_KILLED_TIMEOUT_S)

    def terminate(self, reason: str, *, kill_after_s: float) -> None:
        """As :meth:`kill`, but with SIGTERM first."""
        self._pronounce("SaveAbortedError", reason)
        self._process.terminate()
        self._reap(kill_after_s)

    def close(self, *, kill_after_s: float = _EXIT_TIMEOUT_S) -> None:
        """End an idle process by closing its socket. Idempotent."""
        self._pronounce("SaveAbortedError", "it was closed")
        with suppress(OSError):  # the process was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reap(kill_after_s)

    def abandon_after_fork(self) -> None:
        """In a forked child: drop the descriptor; the process belongs to the parent. Idempotent."""
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)

    def _hear(self, message: Message) -> None:
        """Take note of what a process says that answers nothing; not every kind of process does."""

    @abstractmethod
    def _answer(self, message: Message) -> T:
        """What a message with an answer says."""

    def _ask(
        self,
        job: str,
        on_death: Callable[[Failure], T],
        messages: Iterable[Addressed],
        *,
        holds: object = None,
    ) -> Future[T]:
        """Send messages, the last of which asks for a job to be done; the future always ends."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what was sent cannot be cancelled, only aborted
        with self._lock:
            death = self._death
            if death is None:
                self._waiting[job] = _Waiting(future=future, on_death=on_death, holds=holds)
        if death is not None:
            future.set_result(on_death(death))
            return future
        self._tell(messages)
        return future

    def _tell(self, messages: Iterable[Addressed]) -> None:
        """Send messages in one go; a process that does not take them is killed.

        They are made while nobody else sends, so what was sent before cannot change between that and their own sending.
        """
        with self._sending(), self._send_lock:
            self._tell_what_waits()
            for message, descriptors in messages:
                send(self._socket, message, descriptors)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Kill the process if what is sent inside does not get there as a whole."""
        try:
            yield
        except (OSError, ValueError) as error:  # a ValueError, if the socket is closed meanwhile
            self.kill(f"it no longer takes messages ({type(error).__name__}: {error})")
        except BaseException as error:
            # Half a message may be under way, or an announcement noted that was not sent.
            self.kill(f"sending to it was interrupted ({type(error).__name__})")
            raise

    def _tell_later(self, message: Message) -> None:
        """Send a message with the next one, or now if nobody sends; never waits, so that finalizers may call it."""
        self._later.append(message)
        if self._send_lock.acquire(blocking=False):
            try:
                self._tell_what_waits()
            except OSError:  # the next one to send finds out, and kills it
                return
            finally:
                self._send_lock.release()

    def _tell_what_waits(self) -> None:
        while self._later:
            send(self._socket, self._later.popleft())

    def _receive(self) -> None:
        """The receiving thread: settle futures until the process is gone, then fail what is left."""
        receiver = Receiver(self._socket, descriptors=0)  # nobody here would close them
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
            self._pronounce("ProtocolError", f"{type(error).__name__}: {error}")
            self._process.kill()
        self._hung_up = True
        self._settle_rest()

    def _take(self, message: Message) -> None:
        if message["type"] == "ready":
            self._ready.set()
            return
        if message["type"] in ("progress", "created"):
            self._hear(message)
            return
        # Before the waiter is taken out: if this raises, it is failed with the rest.
        answer = self._answer(message)
        job = message.get("job")
        if not isinstance(job, str):
            raise ProtocolError("an answer does not say to what")
        with self._lock:
            waiting = self._waiting.pop(job, None)
        if waiting is not None:  # a late answer that nobody waits for is dropped
            waiting.future.set_result(answer)

    def _settle_rest(self) -> None:
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._pronounce("WriterDiedError", _how_it_ended(code), code)
        with self._lock:
            rest = list(self._waiting.values())
            self._waiting.clear()
        self._ready.set()
        self._socket.close()
        assert self._death is not None  # pronounced above at the latest
        for waiting in rest:
            waiting.future.set_result(waiting.on_death(self._death))

    def _pronounce(self, kind: str, reason: str, code: int | None = None) -> None:
        """Record why the process is no more; the first reason stands."""
        with self._lock:
            if self._death is None:
                self._death = Failure(
                    kind=kind,
                    message=f"{self.kind} {self.pid}: {reason}",
                    phase="write",
                    exit_code=code,
                    hint="the next save starts a new one",
                )

    def _reap(self, kill_after_s: float) -> None:
        try:
            self._process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_TIMEOUT_S)
        if threading.current_thread() is not self._receiver:
            # It removes what was written, and storage may hang.
            has_ended = self._process.returncode is not None
            self._receiver.join(_SETTLE_TIMEOUT_S if has_ended else 0)


def _how_it_ended(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}"
    return f"ended with exit code {code}"
