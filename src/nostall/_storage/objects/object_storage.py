"""The files of one checkpoint in an object store.

There is no rename here. Callers give each file a unique name, so a request that arrives after its
save was given up cannot hit a file of a later save. A file that is sent again has the same name and
bytes, and is not removed before. Unfinished files are in no list. ``publish`` is one conditional
put. If its answer is lost, the object itself says whether it was done: no other save has metadata
of the same content.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from nostall._model.jobs import page_aligned
from nostall._model.names import is_ours_to_remove
from nostall._storage.objects.client import Client, Parts
from nostall._storage.port import Conflict, Stat, Version, may_pass, reason
from nostall._storage.posix_files import between
from nostall.errors import NotDurableError

_MOST_PARTS = 10_000
_LEAST_PART_NBYTES = 5 << 20
"""Of S3, except for the last part; 10,000 parts at most."""


class ObjectStorage:
    """A prefix of keys in a bucket; a :class:`~nostall._storage.port.Storage`.

    Args:
        url: Address of the checkpoint, without a slash at its end.
        prefix: What all keys begin with; it ends with a slash, or is empty.
        client: The bucket.
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
        part_nbytes = self.least_part(nbytes)
        if nbytes <= part_nbytes:
            return _Upload(self, name, nbytes, part_nbytes, None)
        try:
            parts = self._client.parts(self._key(name), nbytes)
        except BaseException:  # passed on; it may be begun, if an answer was lost
            self.abort([name])
            raise
        return _Upload(self, name, nbytes, part_nbytes, parts)

    def flush(self) -> None:
        """Nothing to do: what a store has accepted is durable."""

    def open(self, name: str) -> _Source:
        return _Source(self._client, self._key(name), self.stat(name), self.where(name))

    def stat(self, name: str) -> Stat:
        return self._client.stat(self._key(name))

    def list(self) -> list[str]:
        return self._client.list(self._prefix)

    def remove(self, names: Iterable[str]) -> None:
        self._client.remove([self._key(name) for name in names])

    def abort(self, names: Iterable[str]) -> None:
        """Abort unfinished files; errors are ignored. They may be begun anew."""
        for name in names:
            with suppress(OSError):
                self._client.abort_unfinished(self._key(name), None)

    def discard(self, names: Collection[str]) -> None:
        """Remove files, also unfinished ones, that will never be committed; errors are ignored.

        No file may have one of these names again: a removal may be done after its answer was lost.
        """
        self.abort(names)
        with suppress(OSError):
            self.remove(names)

    def remove_place(self) -> None:
        """Abort unfinished files; a prefix without objects does not exist."""
        self._client.abort_unfinished(self._prefix, None)

    def directories_with_unfinished(self) -> Collection[str]:
        names = (key[len(self._prefix) :] for key in self._client.unfinished(self._prefix))
        found = (name.rpartition("/") for name in names)
        return {directory for directory, _, name in found if is_ours_to_remove(name)}

    def abort_unfinished(self, older_than_s: float) -> int:
        return self._client.abort_unfinished(self._prefix, older_than_s)

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
                is_clear = isinstance(error, Conflict) or not may_pass(error)
                # A put whose answer is lost may still arrive.
                raise error if is_clear else self._unknown(name, error) from error

    def _has(self, name: str, content: bytes, *, doubt: OSError) -> bool:
        """Whether an object has this content.

        Raises:
            NotDurableError: The store does not say.
        """
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
    """A new object.

    One that fits into a part is sent as a whole; if several writes make it, they are collected.
    """

    def __init__(
        self, storage: ObjectStorage, name: str, nbytes: int, part_nbytes: int, parts: Parts | None
    ) -> None:
        self.name = name
        self._storage = storage
        self._nbytes = nbytes
        self._part_nbytes = part_nbytes
        self._parts = parts
        self._collected = bytearray(0 if parts else nbytes)
        self._is_finished = False
        self._lock = threading.Lock()

    @property
    def any_order(self) -> bool:
        return self._parts is None or self._parts.any_order

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        piece = memory[begin - origin : end - origin]
        if self._parts is None:
            self._collected[begin:end] = piece
            return
        # Longer parts than the shortest have numbers that differ, in the order of their offsets.
        self._parts.send(begin // self._part_nbytes + 1, piece)

    def finish(self, crc32: int | None = None) -> None:
        if self._parts is not None:
            self._parts.complete(crc32)
        else:
            key = self._storage._key(self.name)
            self._storage._client.put(key, (bytes(self._collected),), expected=None)
        self._is_finished = True

    def close(self) -> None:
        with self._lock:
            is_over, self._is_finished = self._is_finished, True
        if is_over:
            return
        if self._parts is not None:
            self._parts.abort()
            self._storage.abort([self.name])


class _Source:
    """One version of an object."""

    def __init__(self, client: Client, key: str, stat: Stat, where: str) -> None:
        self.stat = stat
        self._where = where
        self._client = client
        self._key = key

    def read_into(self, offset: int, *memories: memoryview) -> int:
        nbytes = min(sum(map(len, memories)), max(0, self.stat.nbytes - offset))
        if nbytes:
            wanted = between(memories, 0, nbytes)
            asked = offset, offset + nbytes
            sent = self._client.read_into(self._key, offset, wanted, self.stat.version)
            # A proxy may ignore ranges, and other bytes may look like those of another item.
            if sent != asked:
                what = "the store was asked for bytes {}-{}, and sent {}-{}".format(*asked, *sent)
                raise OSError(errno.EREMOTEIO, what, self._where)
        return nbytes

    def close(self) -> None:
        """Nothing to release."""
