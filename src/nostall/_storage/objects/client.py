"""What an object store can do, as far as checkpoints need it.

Errors are ``OSError``: ``FileNotFoundError`` for a key that does not exist,
:class:`~nostall._storage.port.Conflict` for one with another version than expected, and an errno
of :func:`~nostall._storage.port.may_pass` for a store that is away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeAlias

from nostall._storage.port import Stat, Version

Content: TypeAlias = Sequence[bytes | memoryview]
"""The whole content of an object, in pieces."""


class Client(Protocol):
    """The objects of one bucket. Methods may be called from several threads at once."""

    def put(self, key: str, content: Content, *, expected: Version | None) -> None:
        """Make or replace an object at one instant.

        Args:
            key: Its key.
            content: What it is to have.
            expected: Only if the key has this version; ``None`` for any.

        Raises:
            Conflict: It has another one. After a lost answer the key may have this content already.
        """

    def upload(self, key: str, nbytes: int, part_nbytes: int, parts: Iterator[memoryview]) -> None:
        """Make or replace an object whose content arrives in parts; nothing is copied.

        If the iterator raises, the upload is aborted, and its error raised.

        Args:
            key: Its key.
            nbytes: Its length.
            part_nbytes: Length of all parts but the last.
            parts: Its content. The memory stays unchanged until the call returns.
        """

    def read_into(self, key: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        """Fill pieces of memory, one after the other, with bytes that a version has, in a request.

        Raises:
            Conflict: The object has another version.
            OSError: The answer has other bytes than were asked for; memory has no values then.
        """

    def stat(self, key: str) -> Stat:
        """Length, version and age of an object."""

    def list(self, prefix: str) -> list[str]:
        """What follows the prefix in keys, up to the next ``/``, once each; in any order."""

    def remove(self, keys: Collection[str]) -> None:
        """Remove objects; absent ones are no error."""
