"""A background process's side: messages of the trainer until that ends, and what it can import."""

from __future__ import annotations

import os
import select
import signal
import site
import socket
import sys
from collections.abc import Iterator, Sequence

from nostall._writer.framing import Message, Receiver


def messages_from_parent(
    sock: socket.socket, parent_pid: int
) -> Iterator[tuple[Message, list[int]]]:
    """Yield the trainer's messages with their descriptors, until the trainer is gone.

    It is when the socket ends or its process descriptor becomes readable: a forked child of the
    trainer may hold the socket open. What it has sent before is yielded, too.
    """
    parent = _descriptor_of(parent_pid)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if parent is not None:
        poller.register(parent, select.POLLIN)
    is_gone = parent is None
    # Without waiting: an incomplete message must not hide the end of the trainer. The socket itself
    # blocks, as an answer is sent however long the trainer takes to read it.
    receiver = Receiver(sock, wait=False, descriptors=2)
    while True:
        if not is_gone and not receiver.buffered():
            is_gone = parent in {fd for fd, _ in poller.poll()}
        try:
            received = receiver.receive()
        except BlockingIOError:
            if is_gone:
                return
            continue
        if received is None:
            return
        yield received


def ignore_signals(*others: signal.Signals) -> None:
    """Ignore what is sent to all processes of a job, as before a preemption.

    The trainer decides when this process ends.

    Args:
        others: More signals to ignore.
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


def _descriptor_of(parent_pid: int) -> int | None:
    """A descriptor that becomes readable when the trainer ends; ``None`` if it has."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return None
    if os.getppid() != parent_pid:  # it ended first, and its pid may be reused
        os.close(parent)
        return None
    return parent
