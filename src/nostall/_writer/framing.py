"""How trainer and background process talk: length-prefixed JSON over a socket, and descriptors.

JSON, because nothing that arrives can run code and both sides can bound what they read. What the messages say is the
matter of :mod:`nostall._writer.messages`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from typing import Any

from nostall.errors import ProtocolError

MAX_MESSAGE_NBYTES = 256 << 20
"""Far above the largest seal tables seen (about 16 bytes per tensor); a longer announcement is a broken or hostile peer."""
_HEADER = struct.Struct("<4sQ")
_MAGIC = b"nst1"

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, len(body)) + body


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, the descriptors with its first byte.

    Raises:
        OSError: The peer is gone, or did not read within the socket's timeout.
    """
    raw = memoryview(encode({**message, "descriptors": len(descriptors)}))
    sent = socket.send_fds(sock, [raw[: _HEADER.size]], list(descriptors)) if descriptors else 0
    sock.sendall(raw[sent:])


class Receiver:
    """Takes messages off a socket; keeps the part of a message that arrived so far.

    Args:
        sock: Where they come from.
        wait: Whether to wait for what has not come yet.
        descriptors: How many may come with a message; the kernel closes others.
    """

    def __init__(self, sock: socket.socket, *, wait: bool = True, descriptors: int = 1) -> None:
        self._sock = sock
        self._most_descriptors = descriptors
        self._flags = 0 if wait else socket.MSG_DONTWAIT
        self._buffer = bytearray()
        self._received_nbytes = self._taken_nbytes = 0
        self._descriptors: list[tuple[int, list[int]]] = []
        """Those that have come, and how much had been received by then: at least the first byte of their message, and
        nothing behind it."""

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and the descriptors that came with it, or ``None`` at the end of the stream.

        Raises:
            TimeoutError: Nothing came within the socket's timeout; call again, nothing is lost.
            BlockingIOError: The same, for one that was told not to wait.
            ProtocolError: What came is no message.
        """
        while True:
            message = self._take()
            if message is not None:
                return message, self._descriptors_of(message)
            try:
                piece, descriptors = self._read()
            except ConnectionError:
                return None
            self._received_nbytes += len(piece)
            if descriptors:
                self._descriptors.append((self._received_nbytes, descriptors))
            if not piece:
                return None
            self._buffer += piece

    def close(self) -> None:
        """Close descriptors that came and were not asked for; idempotent."""
        while self._descriptors:
            _, descriptors = self._descriptors.pop()
            for fd in descriptors:
                os.close(fd)

    def _descriptors_of(self, message: Message) -> list[int]:
        """Those that came with the message that was just taken."""
        count = message.pop("descriptors", 0)
        mine: list[int] = []
        while self._descriptors and self._descriptors[0][0] <= self._taken_nbytes:
            mine += self._descriptors.pop(0)[1]
        is_true = type(count) is int and 0 <= count <= len(mine)
        wanted = count if is_true else 0
        for fd in mine[wanted:]:
            os.close(fd)
        if not is_true:
            raise ProtocolError(
                f"a message claims {count!r:.20} descriptors, {len(mine)} have come"
            )
        return mine[:wanted]

    def _read(self) -> tuple[bytes, list[int]]:
        # As socket.recv_fds() does it, which takes flags and ignores them.
        descriptors = array("i")
        room = socket.CMSG_LEN(self._most_descriptors * descriptors.itemsize)
        if not self._most_descriptors:
            room = 0
        piece, ancillary, _, _ = self._sock.recvmsg(1 << 16, room, self._flags)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) // descriptors.itemsize * descriptors.itemsize
                descriptors.frombytes(content[:whole])
        return piece, list(descriptors)

    def buffered(self) -> bool:
        """Whether a whole message is here already, so that the socket need not be waited for."""
        return len(self._buffer) >= self._end()

    def _end(self) -> int:
        """Length of the buffered message with its header; of a header alone as long as that is not complete."""
        if len(self._buffer) < _HEADER.size:
            return _HEADER.size
        magic, nbytes = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC or nbytes > MAX_MESSAGE_NBYTES:
            raise ProtocolError(f"not a message: starts with {magic!r} and claims {nbytes} bytes")
        return int(_HEADER.size + nbytes)

    def _take(self) -> Message | None:
        end = self._end()
        if len(self._buffer) < end:
            return None
        try:
            message = json.loads(self._buffer[_HEADER.size : end].decode())
        except (ValueError, RecursionError) as error:
            raise ProtocolError("a message is not JSON") from error
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise ProtocolError("a message has no type")
        del self._buffer[:end]
        self._taken_nbytes += end
        return message
