"""What an object store can do, as far as checkpoints need it.

Errors are ``OSError``: ``FileNotFoundError`` for a key that does not exist,
:class:`~nostall._storage.port.Conflict` for one with another version than expected, and an errno
of :func:`~nostall._storage.port.may_pass` for a store that is away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from nostall._storage.port import Stat, Version


class Parts(Protocol):
    """An object that is sent in parts, and exists once it is completed."""

    any_order: bool
    """Whether several threads may send parts in any order; otherwise from front to back."""

    def send(self, number: int, memory: memoryview) -> None:
        """Send a part; ``number`` grows with the part's offset, from 1 to 10,000."""

    def complete(self, crc32: int | None) -> None:
        """Make the object of all parts; with its CRC-32, if known, for the store to compare."""

    def abort(self) -> None:
        """Give up all parts; errors are ignored. Idempotent, and without effect once complete."""


class Client(Protocol):
    """The objects of one bucket. Methods may be called from several threads at once."""

    def put(self, key: str, content: Sequence[bytes], *, expected: Version | None) -> None:
        """Make or replace an object at one instant.

        Args:
            key: Its key.
            content: The whole content, in pieces.
            expected: Only if the key has this version; ``None`` for any.

        Raises:
            Conflict: It has another one. After a lost answer the key may have this content already.
        """

    def parts(self, key: str, nbytes: int) -> Parts:
        """Begin an object of this length."""

    def read_into(
        self, key: str, offset: int, memories: Sequence[memoryview], version: Version
    ) -> tuple[int, int]:
        """Fill pieces of memory, one after the other, with bytes that a version has, in a request.

        Returns:
            Begin and end of the bytes that the answer has, as the answer itself says. Unless they
            are those that were asked for, the memory has no values.

        Raises:
            Conflict: The object has another version.
        """

    def stat(self, key: str) -> Stat:
        """Length, version and age of an object."""

    def list(self, prefix: str) -> list[str]:
        """What follows the prefix in keys, up to the next ``/``, once each; in any order."""

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects, and parts of unfinished ones; absent ones are no error."""

    def unfinished(self, prefix: str) -> Sequence[str]:
        """Keys of unfinished objects that begin with this, at any depth."""

    def abort_unfinished(self, prefix: str, older_than_s: float | None) -> int:
        """Abort unfinished objects; returns their number.

        Args:
            prefix: What their keys begin with, up to the next slash.
            older_than_s: Seconds since they were begun, at least, by the clock of the store, which
                may be off by one; ``None`` for all.
        """
