"""What an object store can do, as far as checkpoints need it.

Errors are ``OSError``: ``FileNotFoundError`` for a key that does not exist,
:class:`~nostall._storage.port.Conflict` for one with another version than expected, and an errno
of :func:`~nostall._storage.port.may_pass` for a store that is away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeAlias

from nostall._storage.port import Stat, Version

Content: TypeAlias = Sequence[bytes | memoryview]
"""The whole content of an object, in pieces."""


class Writer(Protocol):
    """A new object in parts, from memory that stays unchanged until it is finished or aborted."""

    def write(self, part: memoryview) -> None:
        """Send the next part, sooner or later."""

    def finish(self) -> None:
        """Wait until all is sent, and make the object; a failure aborts."""

    def abort(self) -> None:
        """Give up all parts; errors are ignored."""


class Client(Protocol):
    """The objects of one bucket. Methods may be called from several threads at once."""

    def put(self, key: str, content: Content, *, expected: Version | None) -> None:
        """Make or replace an object at one instant, if the key has the expected version.

        Raises:
            Conflict: It has another one. After a lost answer the key may have this content already.
        """

    def begin(self, key: str, part_nbytes: int) -> Writer:
        """Begin an object whose parts have this length, but for the last one."""

    def read_into(self, key: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        """Fill pieces of memory, one after the other, with bytes of a version, in one request.

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
