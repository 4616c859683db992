"""Messages between ranks, of any length, in one collective if they are short.

torch's object collectives need NumPy, and send lengths first and contents second. Finalising a save
of a known structure takes a few hundred bytes (529 with eight files per rank, and 63 back). So here
the first collective carries a block of fixed size: the message's length, and room for a short
message. A long message follows in a second collective.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nostall._model.collection import no_collection

BLOCK_NBYTES = 1024
"""Bytes that every rank sends to every rank; with 10,000 ranks, each receives 10 MB."""
_LENGTH = struct.Struct("<Q")
ROOM_NBYTES = BLOCK_NBYTES - _LENGTH.size
"""Longest short message."""


def gather_messages(
    message: bytes, *, receiver: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> list[memoryview] | None:
    """Every rank's message, in the order of ranks, on the receiver; ``None`` elsewhere. Collective.

    Args:
        message: This rank's message.
        receiver: The receiver's rank in the default group; ``None`` for all ranks.
        group: The ranks; the default group if ``None``.
        device: One on which the group can run a collective.
    """
    is_receiver, size = receiver in (None, dist.get_rank()), dist.get_world_size(group)
    blocks = _Rows(size, BLOCK_NBYTES, device)
    dist.all_gather(blocks.to_fill, _block(message).to(device), group=group)
    filled = blocks.filled()
    lengths = [_length(block) for block in filled]
    longest = max(lengths)
    if longest <= ROOM_NBYTES:
        return [_short(block) for block in filled] if is_receiver else None
    mine = _padded(message, longest).to(device)
    if not is_receiver:
        dist.gather(mine, None, dst=receiver, group=group)
        return None
    messages = _Rows(size, longest, device)
    if receiver is None:
        dist.all_gather(messages.to_fill, mine, group=group)
    else:
        dist.gather(mine, messages.to_fill, dst=receiver, group=group)
    return [row[:length] for row, length in zip(messages.filled(), lengths, strict=True)]


def broadcast_message(
    message: bytes, *, sender: int, group: dist.ProcessGroup | None, device: torch.device
) -> memoryview:
    """One rank's message on every rank. Collective.

    Args:
        message: The sender's message; ignored on other ranks.
        sender: The sender's rank in the default group.
        group: The ranks; the default group if ``None``.
        device: One on which the group can run a collective.
    """
    block = _broadcast(_block(message), sender, group, device)
    if _length(block) <= ROOM_NBYTES:
        return _short(block)
    return _broadcast(_padded(message, _length(block)), sender, group, device)


def scatter_messages(
    messages: Sequence[bytes] | None,
    *,
    sender: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> memoryview:
    """This rank's message of those that one rank has. Collective.

    Args:
        messages: The sender's, one for each rank, in the order of ranks; ignored on other ranks.
        sender: The sender's rank in the default group.
        group: The ranks; the default group if ``None``.
        device: One on which the group can run a collective.
    """
    mine = messages if messages is not None and dist.get_rank() == sender else ()
    longest = _LENGTH.pack(max(map(len, mine), default=0))
    told = broadcast_message(longest, sender=sender, group=group, device=device)
    nbytes = _LENGTH.size + _length(told)
    row = _Rows(1, nbytes, device)
    (received,) = row.to_fill
    sent = [_block(message, nbytes).to(device) for message in mine]
    dist.scatter(received, sent or None, src=sender, group=group)
    (block,) = row.filled()
    return _short(block)


def _broadcast(
    mine: torch.Tensor, sender: int, group: dist.ProcessGroup | None, device: torch.device
) -> memoryview:
    row = _Rows(1, len(mine), device)
    (tensor,) = row.to_fill
    tensor.copy_(mine)
    dist.broadcast(tensor, src=sender, group=group)
    (received,) = row.filled()
    return received


class _Rows:
    """Room for equally many bytes from each rank, on the group's device and then on the host."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._content = bytearray(count * nbytes)
        self._here = torch.frombuffer(self._content, dtype=torch.uint8).view(count, nbytes)
        self._there = self._here.to(device)
        """On the CPU the same tensor, without a copy."""

    @property
    def to_fill(self) -> list[torch.Tensor]:
        """A tensor for each row."""
        return list(self._there)

    def filled(self) -> list[memoryview]:
        """The rows on the host, after the collective."""
        self._here.copy_(self._there)
        content = memoryview(self._content)
        starts = range(0, len(content), self._nbytes)
        return [content[start : start + self._nbytes] for start in starts]


def _block(message: bytes, nbytes: int = BLOCK_NBYTES) -> torch.Tensor:
    """The message's length, and as much of the message as there is room for."""
    return _padded(_LENGTH.pack(len(message)) + message[: nbytes - _LENGTH.size], nbytes)


def _padded(content: bytes, nbytes: int) -> torch.Tensor:
    """The content, truncated or padded with zeros."""
    return torch.frombuffer(bytearray(content[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)


def _length(block: memoryview) -> int:
    """Length of the message that begins with this block."""
    (length,) = _LENGTH.unpack_from(block)
    return int(length)


def _short(block: memoryview) -> memoryview:
    return block[_LENGTH.size :][: _length(block)]


@no_collection()
def pickled(values: Iterable[object]) -> list[bytes]:
    """A message for each value."""
    return [pickle.dumps(each) for each in values]


@no_collection()
def unpickled(messages: Iterable[bytes | memoryview]) -> list[Any]:
    """The values in messages."""
    return [pickle.loads(each) for each in messages]
