"""Transport between trainer and background process: length-prefixed JSON and descriptors.

Received JSON cannot run code, and both sides bound what they read. :mod:`nostall._writer.messages`
defines the content of the messages.
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
"""Far above the largest seal tables seen (about 16 bytes per tensor); a longer announcement comes
from a broken or hostile peer."""
_HEADER = struct.Struct("<4sQ")
_MAGIC = b"nst1"

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(_MAGIC, len(body)) + body


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with the descriptors attached to its first byte.

    Raises:
        OSError: The peer is gone, or did not read within the socket's timeout.
    """
    raw = memoryview(encode({**message, "descriptors": len(descriptors)}))
    sent = socket.send_fds(sock, [raw[: _HEADER.size]], list(descriptors)) if descriptors else 0
    sock.sendall(raw[sent:])


class Receiver:
    """Reads messages from a socket; keeps a partly received message.

    Args:
        sock: The socket.
        wait: Whether to wait for data.
        descriptors: How many a message may carry; the kernel closes others.
    """

    def __init__(self, sock: socket.socket, *, wait: bool = True, descriptors: int = 1) -> None:
        self._sock = sock
        self._most_descriptors = descriptors
        self._flags = 0 if wait else socket.MSG_DONTWAIT
        self._buffer = bytearray()
        self._received_nbytes = self._taken_nbytes = 0
        self._descriptors: list[tuple[int, list[int]]] = []
        """Received descriptors, each with the byte count at that time: it covers at least the first
        byte of their message, and nothing after the message."""

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, or ``None`` at the end of the stream.

        Raises:
            TimeoutError: Nothing was received within the socket's timeout; call again, nothing is
                lost.
            BlockingIOError: The same, with ``wait=False``.
            ProtocolError: Not a message.
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

    def _descriptors_of(self, message: Message) -> list[int]:
        """The descriptors of the message just taken."""
        count = message.pop("descriptors", 0)
        mine: list[int] = []
        while self._descriptors and self._descriptors[0][0] <= self._taken_nbytes:
            mine += self._descriptors.pop(0)[1]
        is_true = type(count) is int and 0 <= count <= len(mine)
        wanted = count if is_true else 0
        for fd in mine[wanted:]:
            os.close(fd)
        if not is_true:
            raise ProtocolError(f"a message claims {count!r:.20} descriptors, {len(mine)} received")
        return mine[:wanted]

    def _read(self) -> tuple[bytes, list[int]]:
        # As socket.recv_fds(), which ignores its flags.
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
        """Whether a whole message is buffered, so that the socket need not be polled."""
        return len(self._buffer) >= self._end()

    def _end(self) -> int:
        """Length of the buffered message with its header; until that is complete, of the header."""
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
