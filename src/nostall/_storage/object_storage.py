"""The files of one checkpoint in an object store.

There is no rename here. Callers give each file a unique name, so a request that arrives after its
save was given up cannot hit a file of a later save. A file that is sent again has the same name and
bytes, and is not removed before. Unfinished files are in no list. ``publish`` is one conditional
put. If its answer is lost, the object itself says whether it was done: no other save has metadata
of the same content.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from nostall._model.jobs import page_aligned
from nostall._storage import port
from nostall._storage.port import Conflict, Stat, Version, between, is_transient, unknown_outcome

_MOST_PARTS = 10_000
_LEAST_PART_NBYTES = 5 << 20
"""S3's limit, except for the last part; 10,000 parts at most."""


class ObjectStorage(port.Storage):
    """A prefix of keys in a bucket.

    ``place`` is an address without a slash at its end. A subclass has the client. Its errors are
    ``OSError``: ``FileNotFoundError`` for a key that does not exist, ``Conflict`` for one with
    another version than expected, and an errno of ``port.is_transient`` for a store that is away.
    """

    publishes_conditionally = True
    """The condition is on the put, or, in a store that has none, checked right before it."""

    def __init__(self, place: str) -> None:
        self._place = place
        protocol, _, rest = place.partition("://")
        bucket, _, key = rest.partition("/")
        self._bucket = f"{protocol}://{bucket}"
        self._prefix = f"{key}/" if key else ""

    @abstractmethod
    def replace(
        self, name: str, content: Sequence[bytes | memoryview], *, expected: Version | None
    ) -> None:
        """Make or replace an object at one instant, if the name has the expected version.

        ``Conflict`` if it has another one: perhaps this content, if an answer was lost.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        """Fill pieces of memory, one after the other, with bytes of a version, in one request."""

    def where(self, name: str = "") -> str:
        return f"{self._place}/{name}" if name else self._place

    def make_place(self) -> None:
        """Nothing to make: there are no directories."""

    def least_part(self, nbytes: int) -> int:
        return page_aligned(max(_LEAST_PART_NBYTES, -(-nbytes // _MOST_PARTS)))

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> port.Upload:
        del nbytes
        on_created(name)
        return Upload(self, name)

    def flush(self) -> None:
        """Nothing to do: what a store has accepted is durable."""

    def open(self, name: str) -> _Source:
        return _Source(self, name, self.stat(name))

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
            self.replace(name, content, expected=expected)
        except OSError as error:
            # Of several attempts this is the last one's: an earlier one may have succeeded.
            if not self._has(name, b"".join(content), doubt=error):
                if isinstance(error, Conflict) or not is_transient(error):
                    raise
                # A put whose answer is lost may still arrive.
                raise unknown_outcome(self.where(name), "the metadata", error) from error

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
            raise unknown_outcome(self.where(name), "the metadata", doubt, error) from doubt
        return found == content

    def _key(self, name: str) -> str:
        return self._prefix + name


class Upload:
    """A new object, sent as a whole when it is finished."""

    any_order = False

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self.name = name
        self._storage = storage
        self._pieces: list[memoryview] = []

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        self._pieces.append(memory[begin - origin : end - origin])

    def finish(self) -> None:
        self._storage.replace(self.name, self._pieces, expected=None)

    def close(self) -> None:
        """Nothing to remove: nothing is sent before."""


class _Source:
    """One version of an object."""

    def __init__(self, storage: ObjectStorage, name: str, stat: Stat) -> None:
        self.stat = stat
        self._storage = storage
        self._name = name

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = min(sum(map(len, memories)), max(0, self.stat.nbytes - offset))
        if nbytes:
            self._storage.read_into(self._name, offset, between(memories, 0, nbytes), self.stat)
        return nbytes

    def close(self) -> None:
        """Nothing to release."""
