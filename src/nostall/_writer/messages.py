"""Messages between the trainer and its background processes, and how they travel.

A message is a named tuple: a job of ``nostall._model.jobs``, or one of the classes here. Both ends
run the same installation of nostall and trust each other, so messages are pickles, each behind its
length and the number of descriptors that come with it. Every message about a save carries its job
id; a receiver drops messages about unknown jobs. The second part is the process's side: it takes
messages until the trainer ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import site
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from nostall.errors import ProtocolError

MAX_MESSAGE_NBYTES = 256 << 20
"""Far above any job (about 7 bytes per tensor); a longer announcement is no message."""
_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"nst2"
_MOST_DESCRIPTORS = 1

Message: TypeAlias = tuple[Any, ...]


class Ready(NamedTuple):
    """The process listens."""


class MapBlock(NamedTuple):
    """An arena block, whose descriptor is sent with the message."""

    block: int
    nbytes: int


class UnmapBlock(NamedTuple):
    """A block that the arena has freed."""

    block: int


class Cancel(NamedTuple):
    """The trainer no longer waits for a job; it is answered as aborted."""

    job: str


class Call(NamedTuple):
    """A call of a Python function, pickled in the memory whose descriptor is sent with it."""

    job: str


class Wrote(NamedTuple):
    """Number of bytes of a job written so far."""

    job: str
    nbytes: int


class Created(NamedTuple):
    """A file made for a job, which the trainer must remove if the process dies."""

    job: str
    path: str


class Answer(NamedTuple):
    """The result of a job."""

    job: str
    outcome: Any


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with the descriptors attached to its first byte.

    ``OSError``: the peer no longer exists, or did not read within the socket's timeout.
    """
    body = pickle.dumps(message)
    raw = memoryview(_HEADER.pack(_MAGIC, len(descriptors), len(body)) + body)
    sent = socket.send_fds(sock, [raw[: _HEADER.size]], list(descriptors)) if descriptors else 0
    sock.sendall(raw[sent:])


class Receiver:
    """Reads messages from a socket; keeps a partly received message."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        """Received, in the order of their messages, each of which has begun to arrive."""

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, or ``None`` at the end of the stream.

        After ``TimeoutError`` (the socket's timeout) or ``BlockingIOError`` (a timeout kept by the
        system) call again; nothing is lost. ``ProtocolError``: not a message.
        """
        while len(self._buffer) < self._begun()[1]:
            try:
                piece, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, _MOST_DESCRIPTORS)
            except ConnectionError:
                return None
            self._descriptors += descriptors
            if not piece:
                return None
            self._buffer += piece
        count, end = self._begun()
        try:
            message = pickle.loads(self._buffer[_HEADER.size : end])
        except Exception as error:
            raise ProtocolError(f"a message cannot be read: {error!r:.200}") from error
        descriptors = self._descriptors[:count]
        if len(descriptors) < count:
            raise ProtocolError(f"a message has {count} descriptors, {len(descriptors)} received")
        del self._buffer[:end], self._descriptors[:count]
        return message, descriptors

    def _begun(self) -> tuple[int, int]:
        """Descriptor count of the buffered message, and its length with the header; before the
        header is complete, 0 and the header's length.
        """
        if len(self._buffer) < _HEADER.size:
            return 0, _HEADER.size
        magic, count, nbytes = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"not a message: starts with {magic!r} and claims {nbytes} bytes")
        return count, _HEADER.size + nbytes


# --- a background process -------------------------------------------------------------------------

STARTED = "NOSTALL_BACKGROUND_PROCESS"
"""Environment variable of a program that was started as a background process, until it is one."""
_LOOK_EVERY = struct.pack("ll", 1, 0)
"""A second: interval of looks at the parent. Not a process descriptor, which container profiles may
refuse and portable builds of Python lack."""


def messages_from_parent(
    sock: socket.socket, parent_pid: int
) -> Iterator[tuple[Message, list[int]]]:
    """Yield the trainer's messages with their descriptors, until the socket ends or this process
    has another parent: a forked child of the trainer may hold the socket open.

    Messages sent before that are yielded, too.
    """
    # A timeout of receiving only: an answer is sent however long the trainer takes to read it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK_EVERY)
    if os.getppid() != parent_pid:
        sock.setblocking(False)
    receiver = Receiver(sock)
    while True:
        try:
            received = receiver.receive()
        except BlockingIOError:
            if os.getppid() != parent_pid:
                return
            continue
        if received is None:
            return
        yield received


def say_ready(sock: socket.socket, parent_pid: int, name: str = "nostall-writer") -> None:
    """Tell the trainer that this process listens, unless another program started it.

    ``name``, at most 15 characters, is shown by ``top`` and ``ps``.
    """
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)
    os.environ.pop(STARTED, None)  # this process is nostall's; what user code starts here may save
    if os.getppid() == parent_pid:
        with suppress(OSError):  # the trainer may be gone already
            send(sock, Ready())


def ignore_signals(*others: signal.Signals) -> None:
    """Ignore ``others`` and the signals that all processes of a job get, as before a preemption:
    the trainer decides when this process ends.
    """
    for each in (*_SENT_TO_ALL, *others):
        signal.signal(each, signal.SIG_IGN)


_SENT_TO_ALL = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
)


def make_importable(paths: Sequence[str]) -> None:
    """Let this process import what the trainer can, if there are any of its import paths."""
    if paths:
        site.main()  # also imports what is not found by a path, such as editable installations
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
