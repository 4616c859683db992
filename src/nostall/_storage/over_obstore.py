"""S3, Google Cloud Storage and Azure Blob Storage through obstore (the extra ``objects``).

Credentials, region and endpoint come from obstore: environment variables, roles of the machine,
and a user's ``storage_options``. obstore repeats requests, asks for ranges and refuses answers with
others, sends parts side by side, and aborts an upload that fails. It lists no uploads: a process
that is killed leaves one, which a lifecycle rule has to remove.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

from nostall._model.names import METADATA_NAME
from nostall._storage import port
from nostall._storage.object_storage import ObjectStorage
from nostall._storage.port import ABSENT, Conflict, Stat, Version, between, version_of
from nostall.errors import OptionError

_log = logging.getLogger("nostall")

_CLIENT_OPTIONS = {"connect_timeout": "10s", "timeout": "60s", "allow_http": True}
"""For each request; an endpoint that begins with ``http://`` is always a user's own."""
_ATTEMPTS = 4
_RETRIES = {"max_retries": _ATTEMPTS - 1, "retry_timeout": timedelta(minutes=4)}
_CONFLICT_PAUSE_S = 0.2
"""Before the second attempt, doubled before each further one."""
_PIECE_NBYTES = 1 << 20
"""How much of an answer is copied to its place at once, while the rest arrives."""


class ObstoreStorage(ObjectStorage):
    """A checkpoint in a bucket. Methods may be called from several threads at once.

    ``options`` is what a user passes to obstore, as JSON. ``OptionError`` if obstore refuses it, or
    does not work in this process.
    """

    def __init__(self, place: str, options: str) -> None:
        super().__init__(place)
        if _first_process() != os.getpid():
            raise OptionError(
                "this process was forked from one that has used an object store, whose client would"
                " hang here",
                path=self._bucket,
                hint='start processes by "spawn", or before the first use of a store',
            )
        self._store = store_of(self._bucket, options)

    def replace(
        self, name: str, content: Sequence[bytes | memoryview], *, expected: Version | None
    ) -> None:
        mode: Any = "overwrite"
        if expected is not None:
            mode = "create" if expected == ABSENT else _update_of(expected)
        try:
            self._put(name, content, mode)
        except OSError as error:
            if error.errno != errno.ENOTSUP or not isinstance(mode, dict):
                raise
            # OpenStack Swift: it knows "if absent" only. Compared here, with a gap before the put.
            _tell_of_the_gap(self._bucket)
            if version_of(self.stat, name) != expected:
                raise Conflict(self.where(name)) from error
            self._put(name, content, "overwrite")

    def _put(self, name: str, content: Sequence[bytes | memoryview], mode: Any) -> None:
        import obstore

        for attempt in range(_ATTEMPTS):
            try:
                with _errors_at(self.where(name)):
                    pieces: Any = iter(content)
                    obstore.put(
                        self._store, self._key(name), pieces, mode=mode, use_multipart=False
                    )
            except OSError as error:  # obstore does not always repeat what meets another request
                if error.errno != errno.EBUSY or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_CONFLICT_PAUSE_S * 2**attempt)
            else:
                return

    def put(self, name: str, nbytes: int, *, on_created: Callable[[str], None]) -> port.Upload:
        if nbytes <= self.least_part(nbytes):
            return super().put(name, nbytes, on_created=on_created)
        on_created(name)
        return _UploadInParts(self._store, self._key(name), name, self.where(name))

    def read_into(self, name: str, offset: int, memories: Sequence[memoryview], stat: Stat) -> None:
        import obstore

        asked = offset, offset + sum(map(len, memories))
        options: Any = {"if_match": _update_of(stat.version)["e_tag"]}
        if asked != (0, stat.nbytes):  # otherwise no range: some stores always send all
            options["range"] = asked
        with _errors_at(self.where(name)):
            got = obstore.get(self._store, self._key(name), options=options)
            if got.range != asked:
                what = f"the store was asked for bytes {asked}, and sent {got.range}"
                raise OSError(errno.EREMOTEIO, what, self.where(name))
            done = 0
            for answer in got.stream(min_chunk_size=_PIECE_NBYTES):
                piece = memoryview(answer)
                for memory in between(memories, done, done + len(piece)):
                    memory[:], piece = piece[: len(memory)], piece[len(memory) :]
                    done += len(memory)
                if piece:
                    raise OSError(errno.EREMOTEIO, "the answer is too long", self.where(name))
            if done < asked[1] - offset:
                raise OSError(errno.EIO, "the answer is too short", self.where(name))

    def stat(self, name: str) -> Stat:
        import obstore

        with _errors_at(self.where(name)):
            found = obstore.head(self._store, self._key(name))
        if not found["e_tag"]:  # a proxy's page
            what = "the answer is not one of an object store: it has no ETag"
            raise OSError(errno.EREMOTEIO, what, self.where(name))
        modified_s = found["last_modified"].timestamp()
        version = f"{found['e_tag']}\n{found['version'] or ''}"
        return Stat(found["size"], Version(version), modified_s, modified_s)

    def list(self) -> list[str]:
        import obstore

        with _errors_at(self.where()):
            found = obstore.list_with_delimiter(self._store, self._prefix or None)
        keys = [*(each["path"] for each in found["objects"]), *found["common_prefixes"]]
        if not keys:  # obstore takes any page for an empty list, and a proxy's has everything
            with suppress(FileNotFoundError):
                self.stat(METADATA_NAME)
        return [name for key in keys if (name := key[len(self._prefix) :])]

    def remove(self, names: Iterable[str]) -> None:
        import obstore

        names = list(names)
        try:
            with _errors_at(self.where(next(iter(names), ""))):
                obstore.delete(self._store, [self._key(name) for name in names])
        except FileNotFoundError:  # not of S3; others may not be removed yet
            for name in names if len(names) > 1 else ():
                self.remove([name])


class _UploadInParts:
    """An object that obstore sends from memory, 12 parts at a time, on threads of its own.

    The memory stays unchanged until the object is finished or closed.
    """

    any_order = False

    def __init__(self, store: Any, key: str, name: str, where: str) -> None:
        self.name = name
        self._store = store
        self._key = key
        self._where = where
        self._file: Any = None

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        import obstore

        with _errors_at(self._where):
            if self._file is None:  # all parts are as long as the first, but for the last one
                nbytes = end - begin
                self._file = obstore.open_writer(self._store, self._key, buffer_size=nbytes)
            self._file.write(memory[begin - origin : end - origin])

    def finish(self) -> None:
        """Wait until all is sent, and make the object; a failure aborts."""
        with _errors_at(self._where):
            self._file.close()
        self._file = None

    def close(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # of any kind; one that was closed is refused
                self._file.__exit__(Exception, None, None)
            self._file = None


def _update_of(version: Version) -> dict[str, str]:
    """A version in the form that obstore compares."""
    e_tag, _, number = version.partition("\n")
    return {"e_tag": e_tag, "version": number} if number else {"e_tag": e_tag}


# --- errors -----------------------------------------------------------------------------------

_STATUSES = {
    400: errno.EINVAL,
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    408: errno.ETIMEDOUT,
    409: errno.ESTALE,
    412: errno.ESTALE,
    429: errno.EAGAIN,
    501: errno.ENOTSUP,
    503: errno.EAGAIN,
}
_CODES = {
    # With another request for the key: perhaps an earlier attempt of this one.
    "ConditionalRequestConflict": errno.EBUSY,
    "OperationAborted": errno.EBUSY,
    "ExpiredToken": errno.EACCES,
    "BadDigest": errno.EIO,
    "RequestTimeout": errno.ETIMEDOUT,
}
"""Answers whose status says less."""
_HINTS = {
    "RequestTimeTooSkewed": "set the clock of this machine",
    "AuthorizationHeaderMalformed": "set the region of the bucket, as in AWS_REGION",
}
_STATUS = re.compile(r"code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]*)")


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Turn obstore's errors into storage's.

    They have no attributes: the status and code of an answer are in their text only.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.BaseError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not obstore's
            raise
        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else ""
        number = _CODES.get(code) or _STATUSES.get(status, errno.EREMOTEIO)
        if number == errno.ESTALE:
            raise Conflict(where) from error
        hint = f"; {_HINTS[code]}" if code in _HINTS else ""
        raise OSError(number, f"{_said(text)}{hint}", where) from error


def _said(text: str) -> str:
    """The message of a store or of obstore, without what is for obstore's developers."""
    message, code = _MESSAGE.search(text), _CODE.search(text)
    if message and code:
        return f"{message[1]} ({code[1]})"
    return f"{text.partition(chr(10))[0]:.500}"


# --- stores -----------------------------------------------------------------------------------


@lru_cache
def _tell_of_the_gap(bucket: str) -> None:
    """Log it, once per process and bucket."""
    _log.warning(
        "the store cannot replace an object on a condition: if two jobs save to one address at the "
        "same time, the later commit may win without an error: bucket=%s",
        bucket,
    )


@lru_cache(maxsize=1)
def _first_process() -> int:
    """The process that was the first to use a store; its forks have none of obstore's threads."""
    return os.getpid()


@lru_cache(maxsize=32)
def store_of(bucket: str, options: str) -> Any:
    """The client of a bucket, which keeps its connections; ``OptionError`` if obstore refuses it.

    ``options`` is what a user passes to obstore, as JSON.
    """
    from obstore import exceptions
    from obstore.store import from_url

    given = json.loads(options)
    client_options = {**_CLIENT_OPTIONS, **given.pop("client_options", {})}
    try:
        options_of: Any = {"retry_config": _RETRIES, **given, "client_options": client_options}
        return from_url(bucket, **options_of)
    except (exceptions.BaseError, TypeError, ValueError) as error:
        raise OptionError(
            f"obstore does not accept the address or an option: {_said(str(error))}",
            path=bucket,
            hint="look at storage_options, and at the environment variables of the store",
        ) from error
