"""Any other store, through its fsspec file system (the extra ``fsspec``, and the store's package).

fsspec sends the parts of a file one after the other, has no checksum of a whole object, and its
only condition is that a key does not exist yet, where the store's package knows that.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from nostall._model.names import is_ours_to_remove
from nostall._storage.port import ABSENT, Conflict, Stat, Version, version_of
from nostall.errors import OptionError

_PART_NBYTES = 16 << 20


class FsspecClient:
    """One file system; a :class:`~nostall._storage.objects.client.Client`.

    It copies nothing: some of fsspec's file systems load and send, and it does not say which.

    Args:
        protocol: The part of addresses before ``://``.
    """

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._fs = _file_system(protocol, os.getpid())
        self._lock = threading.Lock()

    def put(self, key: str, content: Sequence[bytes], *, expected: Version | None) -> None:
        body = b"".join(content)
        with _errors(self._where(key)):
            if expected == ABSENT:
                self._create(key, body)
                return
            with self._lock:  # fsspec cannot ask the store to compare
                if expected is not None and version_of(self.stat, key) != expected:
                    raise Conflict(self._where(key))
                self._fs.pipe_file(key, body)

    def _create(self, key: str, body: bytes) -> None:
        with self._lock:
            try:
                self._fs.pipe_file(key, body, mode="create")
            except FileExistsError as error:
                raise Conflict(self._where(key)) from error
            except (NotImplementedError, TypeError, ValueError):
                if self._fs.exists(key):
                    raise Conflict(self._where(key)) from None
                self._fs.pipe_file(key, body)

    def parts(self, key: str, nbytes: int) -> _Stream:
        del nbytes
        with _errors(self._where(key)):
            try:
                stream = self._fs.open(key, "wb", block_size=_PART_NBYTES)
            except TypeError:  # the multi-storage client's stream has no blocks
                stream = self._fs.open(key, "wb")
            return _Stream(stream, self._where(key), remove=partial(self._remove_if_there, key))

    def read_into(
        self, key: str, offset: int, memories: Sequence[memoryview], version: Version
    ) -> tuple[int, int]:
        nbytes = sum(map(len, memories))
        with _errors(self._where(key)):
            content = memoryview(self._fs.cat_file(key, start=offset, end=offset + nbytes))
        # There is no condition on reads. Shard files are never replaced, and need none.
        is_shard = is_ours_to_remove(key.rpartition("/")[2])
        if not is_shard and version_of(self.stat, key) != version:
            raise Conflict(self._where(key))
        sent = offset, offset + len(content)  # fsspec does not say which bytes, only how many
        for memory in memories if len(content) == nbytes else ():
            memory[:], content = content[: len(memory)], content[len(memory) :]
        return sent

    def stat(self, key: str) -> Stat:
        with _errors(self._where(key)):
            self._fs.invalidate_cache(key)
            found = self._fs.info(key)
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._where(key))
        modified_s = _modified_s(found)
        return Stat(found["size"], _version_in(found), modified_s, modified_s)

    def list(self, prefix: str) -> list[str]:
        directory = prefix.rstrip("/")
        with _errors(self._where(prefix)), suppress(FileNotFoundError):
            self._fs.invalidate_cache(directory)
            found = self._fs.ls(directory, detail=False)
            return [each.rstrip("/").rpartition("/")[2] for each in found]
        return []

    def remove(self, keys: Collection[str]) -> None:
        for key in keys:
            with _errors(self._where(key)), suppress(FileNotFoundError):
                self._fs.rm_file(key)

    def unfinished(self, prefix: str) -> Sequence[str]:
        del prefix  # fsspec has no name for them
        return []

    def abort_unfinished(self, prefix: str, older_than_s: float | None) -> int:
        del prefix, older_than_s
        return 0

    def _remove_if_there(self, key: str) -> None:
        if version_of(self.stat, key) != ABSENT:
            self._fs.rm_file(key)

    def _where(self, key: str) -> str:
        return f"{self._protocol}://{key}"


class _Stream:
    """An object that is written front to back."""

    any_order = False

    def __init__(self, stream: Any, where: str, *, remove: Callable[[], object]) -> None:
        self._stream = stream
        self._where = where
        self._remove = remove

    def send(self, number: int, memory: memoryview) -> None:
        del number
        with _errors(self._where):
            self._stream.write(memory)

    def complete(self, crc32: int | None) -> None:
        del crc32
        with _errors(self._where):
            self._stream.close()

    def abort(self) -> None:
        """Discard the stream; one without that is closed. Either may leave an object."""
        with suppress(Exception):  # of any kind: packages differ, and the failure is known
            discard = getattr(self._stream, "discard", None) or self._stream.close
            discard()
            self._stream.closed = True  # otherwise it is completed when it is collected
        with suppress(Exception):
            self._remove()


def _version_in(found: dict[str, Any]) -> Version:
    for name in ("ETag", "etag", "generation", "md5Hash", "uuid", "mtime", "created"):
        if found.get(name):
            return Version(f"{found[name]}-{found['size']}")
    return Version(str(found["size"]))


def _modified_s(found: dict[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        match found.get(name):
            case datetime() as at:
                return at.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                with suppress(ValueError):
                    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return float("inf")  # of unknown age: never old


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Errors of a store's package as those of storage."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # packages differ in what they raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", where) from error


def require_client(protocol: str) -> None:
    """Require fsspec and the package of a store.

    Raises:
        OptionError: One of them is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise OptionError(
            f"addresses that begin with {protocol}:// need the package fsspec",
            hint="pip install 'nostall[fsspec]'",
        ) from error
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise OptionError(
            f"there is no file system for {protocol}://: {error}",
            hint="install the package that fsspec names, or use another address",
        ) from error


@lru_cache(maxsize=8)
def _file_system(protocol: str, _process: int) -> Any:
    """The file system of a process, as a fork must not share connections."""
    import fsspec

    return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)
