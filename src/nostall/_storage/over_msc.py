"""Addresses of NVIDIA's multi-storage client: ``msc://profile/path``.

A profile of files leads to a directory, which is then written like any other. Other profiles are
written through the client, which has no condition on anything: the version of an object is compared
right before it is replaced.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nostall._model.names import is_ours_to_remove
from nostall._storage.object_storage import ObjectStorage
from nostall._storage.port import Conflict, InMemory, Stat, Version, as_stream, version_of
from nostall.errors import OptionError


class MscStorage(ObjectStorage):
    """A checkpoint in a profile, such as ``msc://profile/path``."""

    def __init__(self, place: str) -> None:
        from multistorageclient import resolve_storage_client

        super().__init__(place)
        self._client: Any = resolve_storage_client(f"{self._bucket}/")[0]
        self._lock = threading.Lock()

    def replace(
        self, name: str, content: Sequence[bytes | memoryview], *, expected: Version | None
    ) -> None:
        nbytes = sum(map(len, content))
        with _errors_at(self.where(name)):
            if expected is None and nbytes > self.least_part(nbytes):
                self._client.upload_file(self._key(name), as_stream(InMemory(content)))
                return
            with self._lock:
                if expected is not None and version_of(self.stat, name) != expected:
                    raise Conflict(self.where(name))
                self._client.write(self._key(name), b"".join(content))

    def read_into(self, name: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        from multistorageclient.types import Range

        nbytes = sum(map(len, memories))
        with _errors_at(self.where(name)):
            content = memoryview(self._client.read(self._key(name), Range(offset, nbytes)))
        if len(content) != nbytes:  # the client does not say which bytes it has got
            what = f"the store was asked for {nbytes} bytes, and sent {len(content)}"
            raise OSError(errno.EREMOTEIO, what, self.where(name))
        # There is no condition on reads. Shard files are never replaced, and need none.
        if not is_ours_to_remove(name) and version_of(self.stat, name) != stat.version:
            raise Conflict(self.where(name))
        for memory in memories:
            memory[:], content = content[: len(memory)], content[len(memory) :]

    def stat(self, name: str) -> Stat:
        with _errors_at(self.where(name)):
            found = self._client.info(self._key(name))
        if found.type != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(name))
        modified_s = found.last_modified.timestamp()
        version = Version(f"{found.etag}-{modified_s}-{found.content_length}")
        return Stat(found.content_length, version, modified_s, modified_s)

    def list(self) -> list[str]:
        with _errors_at(self.where()), suppress(FileNotFoundError):
            found = self._client.list(path=self._prefix, include_directories=True)
            names = {each.key.rstrip("/").rpartition("/")[2] for each in found}
            return [name for name in names if name]
        return []

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with _errors_at(self.where(name)), suppress(FileNotFoundError):
                self._client.delete(self._key(name))


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
