"""Addresses of NVIDIA's multi-storage client: ``msc://profile/path``.

A profile of files leads to a directory, which is then written like any other. Other profiles are
written through the client, which has no condition on anything: the version of an object is compared
right before it is replaced.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nostall._model.names import is_ours_to_remove
from nostall._storage.port import Conflict, Stat, Version, between, version_of
from nostall.errors import OptionError


class MscClient:
    """A profile, such as ``msc://profile``; with the methods of ``over_obstore.ObstoreClient``."""

    def __init__(self, profile: str) -> None:
        from multistorageclient import resolve_storage_client

        self._profile = profile
        self._client: Any = resolve_storage_client(f"{profile}/")[0]
        self._lock = threading.Lock()

    def put(
        self, key: str, content: Sequence[bytes | memoryview], *, expected: Version | None
    ) -> None:
        with self._lock, _errors_at(self._where(key)):
            if expected is not None and version_of(self.stat, key) != expected:
                raise Conflict(self._where(key))
            self._client.write(key, b"".join(content))

    def begin(self, key: str, part_nbytes: int) -> Writer:
        del part_nbytes  # the client has its own
        return Writer(self._client, key, self._where(key))

    def read_into(self, key: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        from multistorageclient.types import Range

        nbytes = sum(map(len, memories))
        with _errors_at(self._where(key)):
            content = memoryview(self._client.read(key, Range(offset, nbytes)))
        if len(content) != nbytes:  # the client does not say which bytes it has got
            what = f"the store was asked for {nbytes} bytes, and sent {len(content)}"
            raise OSError(errno.EREMOTEIO, what, self._where(key))
        # There is no condition on reads. Shard files are never replaced, and need none.
        is_shard = is_ours_to_remove(key.rpartition("/")[2])
        if not is_shard and version_of(self.stat, key) != stat.version:
            raise Conflict(self._where(key))
        for memory in memories:
            memory[:], content = content[: len(memory)], content[len(memory) :]

    def stat(self, key: str) -> Stat:
        with _errors_at(self._where(key)):
            found = self._client.info(key)
        if found.type != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._where(key))
        modified_s = found.last_modified.timestamp()
        version = Version(f"{found.etag}-{modified_s}-{found.content_length}")
        return Stat(found.content_length, version, modified_s, modified_s)

    def list(self, prefix: str) -> list[str]:
        with _errors_at(self._where(prefix)), suppress(FileNotFoundError):
            found = self._client.list(path=prefix, include_directories=True)
            names = {each.key.rstrip("/").rpartition("/")[2] for each in found}
            return [name for name in names if name]
        return []

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            with _errors_at(self._where(key)), suppress(FileNotFoundError):
                self._client.delete(key)

    def _where(self, key: str) -> str:
        return f"{self._profile}/{key}"


class Writer:
    """An object that is sent when it is finished, from the memory of its parts."""

    def __init__(self, client: Any, key: str, where: str) -> None:
        self._client = client
        self._key = key
        self._where = where
        self._parts: list[memoryview] = []

    def write(self, part: memoryview) -> None:
        self._parts.append(part)

    def finish(self) -> None:
        with _errors_at(self._where):
            self._client.upload_file(self._key, _Content(self._parts))

    def abort(self) -> None:
        """Nothing to give up: nothing is sent before."""


class _Content(io.RawIOBase):
    """Parts as a file."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        begin, memory = self._at, memoryview(memory)
        for piece in between(self._parts, begin, begin + len(memory)):
            memory[: len(piece)], memory = piece, memory[len(piece) :]
            self._at += len(piece)
        return self._at - begin

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        nbytes = sum(map(len, self._parts))
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: nbytes}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Turn the client's errors into storage's."""
    try:
        yield
    except Exception as error:  # of the package of the store
        if isinstance(error, OSError) and error.errno is not None:
            raise
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
        raise OSError(number, f"{type(error).__name__}: {error}", where) from error


def directory_of(address: str) -> str | None:
    """The directory that an address leads to; ``None`` if it is in an object store.

    ``OptionError`` if the profile does not exist.
    """
    from multistorageclient import resolve_storage_client

    try:
        client, path = resolve_storage_client(address)
    except ValueError as error:
        raise OptionError(
            f"the multi-storage client does not accept the address: {error!s:.500}",
            path=address,
            hint="name a profile of its configuration, as in msc://profile/path",
        ) from error
    found: str | None = client.get_posix_path(path)
    return found
