"""Where a checkpoint is: a directory of a file system, or a prefix of keys in an object store.

What a user names becomes a place: its absolute path, or its address without a slash at its end;
both are texts in which a slash separates names.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nostall._storage import posix
from nostall._storage.port import Storage
from nostall.errors import OptionError

if TYPE_CHECKING:
    from nostall._storage.object_storage import ObjectStorage

_FILE = "file://"
_LOST_SLASH = re.compile(r"(s3|gs|az|msc|file):/[^/]")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_OBSTORE = ("obstore", "pip install 'obstore>=0.11'")
_CLIENTS = {
    **dict.fromkeys(("s3", "gs", "az"), _OBSTORE),
    "msc": ("multistorageclient", "pip install multi-storage-client"),
}
"""The package that each kind of address needs, and how to install it."""
_NO_OPTIONS = "{}"
_options: dict[str, str] = {}
"""Options that users pass to the clients of buckets, as JSON. A later one replaces an earlier one,
as with environment variables; each process that saves or promotes gets them with its jobs."""


def require_possible(path: str | os.PathLike[str]) -> None:
    """Refuse, with ``OptionError``, a path that cannot name a checkpoint directory."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"the checkpoint path is {path!r:.50}", hint="pass a string or a pathlib.Path"
        )
    if not os.fspath(path):
        raise OptionError("the checkpoint path is empty", hint="'.' is the current directory")
    if "\0" in str(path):
        raise OptionError(
            f"the checkpoint path {path!r} contains a null character", hint="remove it"
        )
    if _LOST_SLASH.match(str(path)):
        raise OptionError(
            "the path was an address, but one of its slashes is lost, as in a pathlib.Path",
            path=str(path),
            hint="pass addresses as strings: s3://bucket/key",
        )


def place_of(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> str:
    """The place that a user names: an absolute path, or an address.

    ``storage_options`` are for the client of its bucket, from now on, in all of this process.
    ``OptionError`` if it cannot name a checkpoint, or the client of the object store is not
    installed; ``SaveTimeoutError`` as :func:`absolute`.
    """
    require_possible(path)
    text = os.fspath(path)
    if text.startswith(_FILE):
        text = text.removeprefix(_FILE)
        if not text.startswith("/"):
            raise OptionError(
                "a file:// address needs an absolute path", path=str(path), hint="file:///path"
            )
    place = _place_at(text) if is_address(text) else absolute(text)
    if storage_options is not None:
        _set_storage_options(place, storage_options)
    return place


def is_place(path: object) -> bool:
    """Whether :func:`place_of` accepts a path or address; true for every ``msc://``."""
    try:
        place_of(path)  # type: ignore[arg-type]  # it refuses other types
    except OptionError:
        return str(path).startswith("msc://")  # frameworks probe it without the client
    return True


def local_tier_of(path: str | os.PathLike[str]) -> str:
    """The directory named as ``local_staging_dir``; ``OptionError`` for an object store."""
    if is_address(path) and not os.fspath(path).startswith(_FILE):
        raise OptionError(
            "local_staging_dir does not support object stores",
            path=str(path),
            hint="use a path on a disk",
        )
    return place_of(path)


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute form of a path: trainer and writer process have different working directories.

    It leads where the system finds the path, whose ``..`` is not what is written before it if that
    is a link. ``OptionError`` if the path is relative and the working directory was removed;
    ``SaveTimeoutError`` if it has a ``..``, and storage did not answer.
    """
    try:
        parts = os.fspath(path).split("/")
        if ".." in parts:
            last = len(parts) - parts[::-1].index("..")
            path = os.path.join(without_links("/".join(parts[:last])), *parts[last:])
        return os.path.abspath(os.fspath(path))
    except OSError as error:
        raise OptionError(
            f"the path is relative, and the working directory no longer exists: {error.strerror}",
            path=os.fsdecode(path),
            hint="pass an absolute path, or change to an existing directory",
        ) from error


def without_links(path: str) -> str:
    """The path that links in it lead to; ``SaveTimeoutError`` if storage does not answer."""
    # Here and not at the top: the writer process follows no links, and starts without these.
    from nostall._storage.deadlines import call_with_deadline
    from nostall.options import EngineOptions

    return call_with_deadline(
        lambda: os.path.realpath(path),
        timeout_s=EngineOptions().save_timeout_s,  # there may be no engine yet
        doing="following links",
        phase="plan",
        path=path,
    )


def is_address(path: object) -> bool:
    """Whether a path is an address in an object store."""
    return _ADDRESS.match(str(path)) is not None


def _place_at(address: str) -> str:
    """The place of an address: its shortest form, or the directory of a profile of files.

    ``OptionError`` if the address has an empty name, ``.`` or ``..``, or the client for its kind of
    object store is unknown or not installed.
    """
    found = _ADDRESS.match(address)
    assert found is not None, address
    protocol, names = found[1].lower(), found[2].rstrip("/").split("/")
    if not all(names) or {".", ".."} & set(names):
        raise OptionError(
            "the address contains an empty name, '.' or '..'",
            path=address,
            hint="use the form s3://bucket/key",
        )
    place = f"{protocol}://{'/'.join(names)}"
    if protocol not in _CLIENTS:
        raise OptionError(
            f"addresses that begin with {protocol}:// are not supported",
            path=place,
            hint="use s3://, gs://, az:// or msc://, or a directory of a mounted store",
        )
    package, hint = _CLIENTS[protocol]
    try:
        import_module(package)
    except ImportError as error:
        raise OptionError(
            f"addresses that begin with {protocol}:// need the package {package}", hint=hint
        ) from error
    if protocol == "msc":
        from nostall._storage import over_msc

        return over_msc.directory_of(place) or place
    return place


# --- what is at a place ---------------------------------------------------------------------------


def require_directory(path: str) -> None:
    """Raise ``OptionError`` for a path that cannot be a directory. Looks at storage."""
    hint = None if is_address(path) else why_no_directory(path)
    if hint is not None:
        raise OptionError("the path is not a directory", path=path, hint=hint)


def why_no_directory(path: str, code: int | None = None) -> str | None:
    """A hint about what is in the way of a directory and what to do, if that is known.

    ``code`` is the errno with which it could not be made.
    """
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.exists(path):
        return f"{path} is a broken symbolic link; remove it or choose another path"
    if not os.path.isdir(path):
        return f"{path} is a file; remove it or choose another path"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return f"user {os.geteuid()} may not make directories in {path}; choose another path"
    return None


def storage_at(place: str, *, sync: bool = True, direct: bool = False) -> Storage:
    """The storage of a place; touches nothing. Takes the options of :class:`posix.PosixStorage`.

    ``OptionError`` if an object store's client refuses its options, or was used before a fork.
    """
    if is_address(place):
        return object_storage_at(place)
    return posix.PosixStorage(place, sync=sync, direct=direct)


def object_storage_at(place: str) -> ObjectStorage:
    """The storage at an address; raises as :func:`storage_at`."""
    # Here and not at the top: no save to a file system needs them.
    if place.startswith("msc://"):
        from nostall._storage.over_msc import MscStorage

        return MscStorage(place)
    from nostall._storage.over_obstore import ObstoreStorage

    return ObstoreStorage(place, storage_options_of(place))


def is_same(one: str, other: str) -> bool:
    """Whether both are the same existing directory, or the same address."""
    if is_address(one) or is_address(other):
        return one == other
    return posix.is_same(one, other)


def identity(place: str) -> str:
    """A text that is the same for all ways to write a place. Looks at the file system."""
    return place if is_address(place) else os.path.realpath(place)


# --- options of buckets ---------------------------------------------------------------------------


def _set_storage_options(place: str, options: Mapping[str, Any]) -> None:
    """Use options for the bucket of a place, in all of this process.

    ``OptionError`` if the place has no client that takes them, or the client refuses them.
    """
    if not is_address(place) or place.startswith("msc://"):
        raise OptionError(
            "storage_options are for s3://, gs:// and az://",
            path=place,
            hint="leave them out; profiles of msc:// are in its own configuration",
        )
    from nostall._storage import over_obstore

    try:
        plain = json.dumps(dict(options))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"storage_options must hold strings, numbers and dictionaries of these: {error}",
            hint="the writer process gets them, too; objects such as credential providers cannot"
            " be sent",
        ) from error
    over_obstore.store_of(_bucket_of(place), plain)
    _options[_bucket_of(place)] = plain


def storage_options_of(place: str) -> str:
    """The options for a place, as JSON, for :func:`take_storage_options` in another process."""
    return _options.get(_bucket_of(place), _NO_OPTIONS) if is_address(place) else _NO_OPTIONS


def take_storage_options(place: str, plain: str) -> None:
    """Use the options of the process that has sent a job."""
    if plain != _NO_OPTIONS:
        _options[_bucket_of(place)] = plain


def _bucket_of(place: str) -> str:
    """The address of a place's bucket."""
    return "/".join(place.split("/")[:3])
