"""Addresses of NVIDIA's multi-storage client: ``msc://profile/path``.

A profile of files leads to a directory, which is then written like any other. Other profiles are
written through the client, which has no condition on anything: the version of an object is compared
right before it is replaced.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nostall._model.names import is_ours_to_remove
from nostall._storage.objects.client import Content
from nostall._storage.port import Conflict, Stat, Version, version_of
from nostall.errors import OptionError


class MscClient:
    """One profile; a :class:`~nostall._storage.objects.client.Client`.

    Args:
        profile: Its address, such as ``msc://profile``.
    """

    def __init__(self, profile: str) -> None:
        from multistorageclient import resolve_storage_client

        self._profile = profile
        self._client: Any = resolve_storage_client(f"{profile}/")[0]
        self._lock = threading.Lock()

    def put(self, key: str, content: Content, *, expected: Version | None) -> None:
        with self._lock, _errors_at(self._where(key)):
            if expected is not None and version_of(self.stat, key) != expected:
                raise Conflict(self._where(key))
            self._client.write(key, b"".join(content))

    def upload(self, key: str, nbytes: int, part_nbytes: int, parts: Iterator[memoryview]) -> None:
        del part_nbytes
        with _errors_at(self._where(key)):
            try:
                self._client.upload_file(key, _Stream(nbytes, parts))
            except BaseException:  # passed on; the client may take a stream that ends for whole
                with suppress(Exception):
                    self._client.delete(key)
                raise

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


class _Stream:
    """Parts that arrive in order, as a file of known length that the client reads once."""

    def __init__(self, nbytes: int, parts: Iterator[memoryview]) -> None:
        self._nbytes = nbytes
        self._parts = parts
        self._left = memoryview(b"")
        self._at = 0

    def read(self, nbytes: int = -1, /) -> bytes:
        end = self._nbytes if nbytes < 0 else min(self._nbytes, self._at + nbytes)
        content = bytearray()
        while self._at + len(content) < end:
            self._left = self._left or next(self._parts)
            piece = self._left[: end - self._at - len(content)]
            content += piece
            self._left = self._left[len(piece) :]
        self._at = end
        return bytes(content)

    def seekable(self) -> bool:
        """Whether it has a length; it is read from front to back all the same."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Errors of the client as those of storage."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, str(error), where) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, str(error), where) from error
    except Exception as error:  # of the package of the store
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", where) from error


def require_client() -> None:
    """Require that the client is installed.

    Raises:
        OptionError: It is not.
    """
    try:
        import multistorageclient  # noqa: F401  # a second import is free
    except ImportError as error:
        raise OptionError(
            "addresses that begin with msc:// need the package multi-storage-client",
            hint="pip install multi-storage-client, and what its storage providers need",
        ) from error


def directory_of(address: str) -> str | None:
    """The directory that an address leads to; ``None`` if it is in an object store.

    Raises:
        OptionError: There is no such profile.
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
