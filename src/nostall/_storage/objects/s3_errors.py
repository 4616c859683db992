"""Errors of botocore, as those of storage."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nostall._storage.port import Conflict

_CODES = {
    "NoSuchKey": errno.ENOENT,
    "NoSuchBucket": errno.ENOENT,
    "NoSuchUpload": errno.ENOENT,
    "404": errno.ENOENT,
    "AccessDenied": errno.EACCES,
    "ExpiredToken": errno.EACCES,
    "InvalidAccessKeyId": errno.EACCES,
    "SignatureDoesNotMatch": errno.EACCES,
    "QuotaExceeded": errno.EDQUOT,
    "EntityTooLarge": errno.EFBIG,
    "NotImplemented": errno.ENOTSUP,
    "InternalError": errno.EREMOTEIO,
    "ServiceUnavailable": errno.EAGAIN,
    "SlowDown": errno.EAGAIN,
    "Throttling": errno.EAGAIN,
    "ThrottlingException": errno.EAGAIN,
    "RequestTimeout": errno.ETIMEDOUT,
    "RequestTimeTooSkewed": errno.EACCES,
    "BadDigest": errno.EIO,
}
"""Answers of stores, as errors of this system."""
_STATUSES = {
    401: errno.EACCES,
    403: errno.EACCES,
    408: errno.ETIMEDOUT,
    409: errno.EBUSY,  # with another request for the key: perhaps an earlier attempt of this one
    429: errno.EAGAIN,
}
"""Answers with a code of another store, or without any, as those to HEAD."""
_CONDITIONS = {"PreconditionFailed", "412"}


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Errors of botocore as those of storage.

    Args:
        where: What the request is about, for messages.
    """
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        yield
    except exceptions.ClientError as error:
        answer = error.response.get("Error", {})
        code, message = answer.get("Code", ""), answer.get("Message") or str(error)
        if code in _CONDITIONS:
            raise Conflict(where) from error
        raise OSError(_errno_of(error, code), f"{message} ({code})", where) from error
    except (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
    ) as error:
        raise OSError(errno.EACCES, str(error), where) from error
    except (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError) as error:
        raise OSError(errno.ETIMEDOUT, str(error), where) from error
    except exceptions.BotoCoreError as error:
        # Of these two, one is for connections that were not made.
        is_away = isinstance(error, exceptions.HTTPClientError | exceptions.ConnectionError)
        raise OSError(errno.ECONNRESET if is_away else errno.EINVAL, str(error), where) from error
    except (LookupError, TypeError, ValueError, ResponseParserError) as error:
        what = f"the answer is not one of S3: {type(error).__name__}: {error!s:.200}"
        raise OSError(errno.EREMOTEIO, what, where) from error


def errno_of_code(code: str) -> int:
    """The errno of a store's answer about one of several objects."""
    return _CODES.get(code, errno.EIO)


def _errno_of(error: Any, code: str) -> int:
    if code in _CODES:
        return _CODES[code]
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return _STATUSES.get(status, errno.EREMOTEIO if status >= 500 else errno.EINVAL)
