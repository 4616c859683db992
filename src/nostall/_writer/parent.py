"""A background process's side: messages of the trainer until that ends, and what it can import."""

from __future__ import annotations

import os
import signal
import site
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from nostall._writer.messages import Message, Ready, Receiver, send

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
