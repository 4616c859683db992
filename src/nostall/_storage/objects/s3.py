"""S3 and stores that speak its protocol, through botocore (the extra ``s3``).

Region, credentials, endpoint and the rest are those of the AWS tools: environment variables,
profiles, roles. Facts of the protocol are those of the API reference of Amazon S3.

botocore and not obstore, which is faster: it has no checksum of a whole object, no list of
unfinished uploads, and no condition on anything but a single put (decision 33).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache
from math import inf
from typing import Any

from nostall._model.names import is_ours_to_remove
from nostall._storage.objects.s3_errors import errno_of_code, errors_at
from nostall._storage.port import ABSENT, Conflict, Stat, Version, may_pass, version_of
from nostall.errors import OptionError

_log = logging.getLogger("nostall")

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_ATTEMPTS = 4
_CONNECTIONS = 32
_MOST_AT_A_TIME = 1 << 20
"""Bytes that go to a socket, or come from it, in one call."""
_REMOVED_AT_A_TIME = 1000

_CONFLICT_PAUSE_S = 0.2
"""Before the second attempt, doubled before each further one."""


class S3Client:
    """One bucket; a :class:`~nostall._storage.objects.client.Client`."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        self._s3 = _connected(os.getpid())

    def put(self, key: str, content: Sequence[bytes], *, expected: Version | None) -> None:
        condition: dict[str, str] = {}
        if expected is not None:
            condition = {"IfNoneMatch": "*"} if expected == ABSENT else {"IfMatch": expected}
        body = b"".join(content)
        try:
            self._put(key, body, condition)
        except OSError as error:
            if error.errno != errno.ENOTSUP or "IfMatch" not in condition:
                raise
            # OpenStack Swift: it knows "if absent" only. Compared here, with a gap before the put.
            _tell_of_the_gap(self._bucket)
            if version_of(self.stat, key) != expected:
                raise Conflict(self._where(key)) from error
            self._put(key, body, {})

    def _put(self, key: str, body: bytes, condition: dict[str, str]) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._call("put_object", key, Body=body, **condition)
            except OSError as error:  # botocore does not repeat what meets another request
                if error.errno != errno.EBUSY or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_CONFLICT_PAUSE_S * 2**attempt)
            else:
                return

    def parts(self, key: str, nbytes: int) -> _S3Parts:
        del nbytes
        begun = self._call(
            "create_multipart_upload", key, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
        )
        return _S3Parts(self, key, begun["UploadId"])

    def read_into(
        self, key: str, offset: int, memories: Sequence[memoryview], version: Version
    ) -> tuple[int, int]:
        for attempt in range(1, _ATTEMPTS + 1):  # botocore repeats a request, but not its body
            try:
                return self._read_once(key, offset, memories, version)
            except OSError as error:
                if attempt == _ATTEMPTS or isinstance(error, Conflict) or not may_pass(error):
                    raise
        raise AssertionError  # the last attempt returns or raises

    def _read_once(
        self, key: str, offset: int, memories: Sequence[memoryview], version: Version
    ) -> tuple[int, int]:
        end = offset + sum(map(len, memories))
        with errors_at(self._where(key)):
            got = self._s3.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={offset}-{end - 1}", IfMatch=version
            )
            with got["Body"] as body:
                sent = _range_of(got)
                for memory in memories if sent == (offset, end) else ():
                    self._fill(memory, body, key)
            return sent

    def _fill(self, memory: memoryview, body: Any, key: str) -> None:
        while memory:
            piece = body.read(min(len(memory), _MOST_AT_A_TIME))
            if not piece:
                raise OSError(errno.EIO, "the answer is too short", self._where(key))
            memory[: len(piece)] = piece
            memory = memory[len(piece) :]

    def stat(self, key: str) -> Stat:
        found = self._call("head_object", key)
        with errors_at(self._where(key)):
            modified_s = found["LastModified"].timestamp()
            return Stat(found["ContentLength"], Version(found["ETag"]), modified_s, modified_s)

    def list(self, prefix: str) -> list[str]:
        names = []
        for page in self._pages("list_objects_v2", Prefix=prefix, Delimiter="/"):
            if "IsTruncated" not in page:  # a proxy's answer must not look like an empty list
                what = "the answer is not a list of objects"
                raise OSError(errno.EREMOTEIO, what, self._where(prefix))
            keys = [each["Key"] for each in page.get("Contents", ())]
            keys += [each["Prefix"].rstrip("/") for each in page.get("CommonPrefixes", ())]
            names += [key[len(prefix) :] for key in keys]
        return [name for name in names if name]

    def remove(self, keys: Collection[str]) -> None:
        ordered = list(keys)
        for begin in range(0, len(ordered), _REMOVED_AT_A_TIME):
            some = ordered[begin : begin + _REMOVED_AT_A_TIME]
            objects = {"Objects": [{"Key": key} for key in some], "Quiet": True}
            with errors_at(self._where(some[0])):
                answer = self._s3.delete_objects(Bucket=self._bucket, Delete=objects)
            for refused in answer.get("Errors", ()):
                code = errno_of_code(refused.get("Code", ""))
                raise OSError(code, refused.get("Message", ""), self._where(refused["Key"]))

    def unfinished(self, prefix: str) -> Sequence[str]:
        pages = self._pages("list_multipart_uploads", Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Uploads", ())]

    def abort_unfinished(self, prefix: str, older_than_s: float | None) -> int:
        count = 0
        for page in self._pages("list_multipart_uploads", Prefix=prefix):
            newest_s = inf if older_than_s is None else _clock(page) - older_than_s
            for upload in page.get("Uploads", ()):
                key = upload["Key"]  # the prefix itself, or in the directory that it is
                is_there = "/" not in key[len(prefix) :]
                is_ours = is_there and is_ours_to_remove(key.rpartition("/")[2])
                if not is_ours or upload["Initiated"].timestamp() > newest_s:
                    continue
                count += 1
                with suppress(FileNotFoundError):  # it is over
                    self._call("abort_multipart_upload", key, UploadId=upload["UploadId"])
        return count

    def _pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        with errors_at(self._where(parameters["Prefix"])):
            paginator = self._s3.get_paginator(operation)
            yield from paginator.paginate(Bucket=self._bucket, **parameters)

    def _call(self, operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        call: Callable[..., dict[str, Any]] = getattr(self._s3, operation)
        with errors_at(self._where(key)):
            return call(Bucket=self._bucket, Key=key, **parameters)

    def _where(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"


def _range_of(got: Mapping[str, Any]) -> tuple[int, int]:
    """Begin and end of the bytes in an answer; without a range it has all of the object."""
    if "ContentRange" not in got:
        return 0, got["ContentLength"]
    first, last = map(int, got["ContentRange"].removeprefix("bytes ").partition("/")[0].split("-"))
    if got.get("ContentLength", last + 1 - first) != last + 1 - first:
        raise ValueError(f"{got['ContentLength']} bytes as {got['ContentRange']:.80}")
    return first, last + 1


class _S3Parts:
    """A multipart upload."""

    any_order = True

    def __init__(self, client: S3Client, key: str, upload: str) -> None:
        self._client = client
        self._upload = {"key": key, "UploadId": upload}
        self._sent: dict[int, str] = {}
        self._is_over = False
        self._lock = threading.Lock()

    def send(self, number: int, memory: memoryview) -> None:
        answer = self._client._call(
            "upload_part",
            **self._upload,
            PartNumber=number,
            ContentLength=len(memory),
            Body=_Body(memory),
        )
        with self._lock:
            self._sent[number] = answer["ETag"]

    def complete(self, crc32: int | None) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._sent.items())]
        checksum = {}
        if crc32 is not None:
            encoded = b64encode(crc32.to_bytes(4, "big")).decode()
            checksum = {"ChecksumCRC32": encoded, "ChecksumType": "FULL_OBJECT"}
        try:
            self._client._call(
                "complete_multipart_upload",
                **self._upload,
                MultipartUpload={"Parts": parts},
                **checksum,
            )
        except FileNotFoundError:
            # The answer to the first attempt may be lost: the object is there then.
            self._client.stat(self._upload["key"])
        self._is_over = True

    def abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            with suppress(OSError):
                self._client._call("abort_multipart_upload", **self._upload)


class _Body:
    """Memory as a file that is sent without copies.

    ``read`` returns more than it is asked for: the caller asks for 16 KiB at a time, to bound its
    buffer, and there is none.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def __len__(self) -> int:
        return len(self._memory)

    def read(self, _nbytes: int = -1, /) -> memoryview:
        piece = self._memory[self._at : self._at + _MOST_AT_A_TIME]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._memory)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at


def _clock(answer: dict[str, Any]) -> float:
    """The time of a store's answer, in seconds since the epoch, by its own clock, rounded up."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    if "date" not in headers:
        return time.time()
    return parsedate_to_datetime(headers["date"]).timestamp() + 1


def require_client() -> None:
    """Require that botocore is installed.

    Raises:
        OptionError: It is not.
    """
    try:
        import botocore.session  # noqa: F401  # a second import is free
    except ImportError as error:
        raise OptionError(
            "addresses that begin with s3:// need the package botocore",
            hint="pip install 'nostall[s3]'",
        ) from error


@lru_cache
def _tell_of_the_gap(bucket: str) -> None:
    """Log it, once per process and bucket."""
    _log.warning(
        "the store cannot replace an object on a condition: if two jobs save to one address at the "
        "same time, the later commit may win without an error: bucket=%s",
        bucket,
    )


@lru_cache(maxsize=1)
def _connected(_process: int) -> Any:
    """The client of a process, as a fork must not share connections; making one takes 0.2 s."""
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        max_pool_connections=_CONNECTIONS,
        # The object as a whole has a checksum; hashing each part would cost a core.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
    )
    return Session().create_client("s3", config=config)
