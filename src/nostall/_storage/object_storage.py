"""The files of one checkpoint in an object store.

There is no rename here. Callers give each file a unique name, so a request that arrives after its
save was given up cannot hit a file of a later save. A file that is sent again has the same name and
bytes, and is not removed before. Unfinished files are in no list. ``publish`` is one conditional
put. If its answer is lost, the object itself says whether it was done: no other save has metadata
of the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from nostall._model.jobs import page_aligned
from nostall._storage.port import Conflict, Stat, Version, between, is_transient, reason
from nostall.errors import NotDurableError

if TYPE_CHECKING:
    from nostall._storage import over_msc, over_obstore

    Client: TypeAlias = over_obstore.ObstoreClient | over_msc.MscClient

_MOST_PARTS = 10_000
_LEAST_PART_NBYTES = 5 << 20
"""S3's limit, except for the last part; 10,000 parts at most."""


class ObjectStorage:
    """A prefix of keys in a bucket; a :class:`~nostall._storage.port.Storage`.

    ``url`` has no slash at its end; ``prefix`` ends with one, or is empty.
    """

    publishes_conditionally = True

    def __init__(self, url: str, prefix: str, client: Client) -> None:
        self._url = url
        self._prefix = prefix
        self._client = client

    def where(self, name: str = "") -> str:
        return f"{self._url}/{name}" if name else self._url

    def make_place(self) -> None:
        """Nothing to make: there are no directories."""

    def least_part(self, nbytes: int) -> int:
        return page_aligned(max(_LEAST_PART_NBYTES, -(-nbytes // _MOST_PARTS)))

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> _Upload:
        on_created(name)
        is_short = nbytes <= self.least_part(nbytes)
        return _Upload(self._client, self._key(name), name, is_short=is_short)

    def flush(self) -> None:
        """Nothing to do: what a store has accepted is durable."""

    def open(self, name: str) -> _Source:
        return _Source(self._client, self._key(name), self.stat(name))

    def stat(self, name: str) -> Stat:
        return self._client.stat(self._key(name))

    def list(self) -> list[str]:
        return self._client.list(self._prefix)

    def remove(self, names: Iterable[str]) -> None:
        self._client.remove([self._key(name) for name in names])

    def remove_place(self) -> None:
        """Nothing to remove: a prefix without objects does not exist."""

    def publish(
        self,
        name: str,
        content: Sequence[bytes],
        *,
        expected: Version | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        before()
        try:
            self._client.put(self._key(name), content, expected=expected)
        except OSError as error:
            # Of several attempts this is the last one's: an earlier one may have succeeded.
            if not self._has(name, b"".join(content), doubt=error):
                is_clear = isinstance(error, Conflict) or not is_transient(error)
                # A put whose answer is lost may still arrive.
                raise error if is_clear else self._unknown(name, error) from error

    def _has(self, name: str, content: bytes, *, doubt: OSError) -> bool:
        """Whether an object has this content; ``NotDurableError`` if the store does not say."""
        try:
            source = self.open(name)
            if source.stat.nbytes != len(content):
                return False
            found = bytearray(len(content))
            source.read_into(0, memoryview(found))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unknown(name, doubt, error) from doubt
        return found == content

    def _unknown(self, name: str, *errors: OSError) -> NotDurableError:
        return NotDurableError(
            "cannot determine whether the metadata was published: "
            + ", and then ".join(dict.fromkeys(map(reason, errors))),
            errno=errors[0].errno,
            phase="commit",
            path=self.where(name),
            hint="look at the checkpoint when the store answers again",
        )

    def _key(self, name: str) -> str:
        return self._prefix + name


class _Upload:
    """A new object; one that fits into a part is sent as a whole when it is finished."""

    any_order = False

    def __init__(self, client: Client, key: str, name: str, *, is_short: bool) -> None:
        self.name = name
        self._client = client
        self._key = key
        self._is_short = is_short
        self._pieces: list[memoryview] = []
        self._writer: over_obstore.Writer | over_msc.Writer | None = None

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        piece = memory[begin - origin : end - origin]
        if self._is_short:
            self._pieces.append(piece)
            return
        if self._writer is None:
            self._writer = self._client.begin(self._key, len(piece))
        self._writer.write(piece)

    def finish(self, crc32: int | None = None) -> None:
        del crc32  # no client sends it
        if self._writer is None:
            self._client.put(self._key, self._pieces, expected=None)
        else:
            self._writer.finish()
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None


class _Source:
    """One version of an object."""

    def __init__(self, client: Client, key: str, stat: Stat) -> None:
        self.stat = stat
        self._client = client
        self._key = key

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = min(sum(map(len, memories)), max(0, self.stat.nbytes - offset))
        if nbytes:
            wanted = between(memories, 0, nbytes)
            self._client.read_into(self._key, offset, wanted, self.stat)
        return nbytes

    def close(self) -> None:
        """Nothing to release."""
