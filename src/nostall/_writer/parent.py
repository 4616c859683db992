"""A background process's side: messages of the trainer until that ends, and what it can import."""

from __future__ import annotations

import os
import select
import site
import socket
import sys
from collections.abc import Iterator, Sequence

from nostall._writer.framing import Message, Receiver


def messages_from_parent(
    sock: socket.socket, parent_pid: int
) -> Iterator[tuple[Message, list[int]]]:
    """Yield the trainer's messages with their descriptors; never returns.

    When the trainer is gone, this process exits at once, whatever its other threads are doing. The
    trainer is gone when the socket ends or its process descriptor becomes readable: a forked child
    of the trainer may hold the socket open.
    """
    parent = _descriptor_of(parent_pid)
    poller = select.poll()
    poller.register(parent, select.POLLIN)
    poller.register(sock, select.POLLIN)
    # Without waiting: an incomplete message must not hide the end of the trainer. The socket itself
    # blocks, as an answer is sent however long the trainer takes to read it.
    receiver = Receiver(sock, wait=False)
    while True:
        if not receiver.buffered() and parent in {fd for fd, _ in poller.poll()}:
            os._exit(0)
        try:
            received = receiver.receive()
        except BlockingIOError:
            continue
        if received is None:
            os._exit(0)
        yield received


def make_importable(paths: Sequence[str]) -> None:
    """Let this process import what the trainer can, if there are any of its import paths."""
    if paths:
        site.main()  # also imports what is not found by a path, such as editable installations
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]


def _descriptor_of(parent_pid: int) -> int:
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != parent_pid:  # it ended first, and its pid may be reused
        os._exit(0)
    return parent
