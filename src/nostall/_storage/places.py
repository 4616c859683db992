"""Where a checkpoint is: a directory of a file system, or a prefix of keys in an object store.

A place is its absolute path, or its address without a slash at its end; both are texts in which a
slash separates names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nostall._storage import posix
from nostall._storage.port import Storage
from nostall._storage.posix_storage import PosixStorage
from nostall.errors import OptionError

if TYPE_CHECKING:
    from nostall._storage.objects.object_storage import ObjectStorage

_NO_OPTIONS = "{}"
_options: dict[str, str] = {}
"""What users pass to the clients of buckets, as JSON. A later one replaces an earlier one, as with
environment variables; each process that saves or promotes gets them with its jobs."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_address(path: object) -> bool:
    """Whether a path is an address in an object store."""
    return _ADDRESS.match(str(path)) is not None


def normal(address: str) -> str:
    """An address in its shortest form.

    Raises:
        OptionError: It names no bucket, or a part of the key is empty, ``.`` or ``..``.
    """
    found = _ADDRESS.match(address)
    assert found is not None, address
    names = found[2].rstrip("/").split("/")
    if not all(names) or {".", ".."} & set(names):
        raise OptionError(
            "the address contains an empty name, '.' or '..'",
            path=address,
            hint="use the form s3://bucket/key",
        )
    return f"{found[1].lower()}://{'/'.join(names)}"


def resolved(address: str) -> str:
    """The place that an address leads to: itself, unless it is one of files.

    Raises:
        OptionError: The client for its kind of object store is not installed.
    """
    protocol, _, _ = address.partition("://")
    if protocol == "msc":
        _require("multistorageclient", protocol, "pip install multi-storage-client")
        from nostall._storage.objects import over_msc

        return over_msc.directory_of(address) or address
    if protocol not in ("s3", "gs", "az"):
        raise OptionError(
            f"addresses that begin with {protocol}:// are not supported",
            path=address,
            hint="use s3://, gs://, az:// or msc://, or a directory of a mounted store",
        )
    _require("obstore", protocol, "pip install 'obstore>=0.11'")
    return address


def _require(package: str, protocol: str, hint: str) -> None:
    try:
        import_module(package)
    except ImportError as error:
        raise OptionError(
            f"addresses that begin with {protocol}:// need the package {package}", hint=hint
        ) from error


def set_storage_options(place: str, options: Mapping[str, Any] | None) -> None:
    """Use options for the bucket of a place, in all of this process; ``None`` leaves it as it is.

    Raises:
        OptionError: The place has no client that takes them, or the client refuses them.
    """
    if options is None:
        return
    if not is_address(place) or place.startswith("msc://"):
        raise OptionError(
            "storage_options are for s3://, gs:// and az://",
            path=place,
            hint="leave them out; profiles of msc:// are in its own configuration",
        )
    from nostall._storage.objects import over_obstore

    try:
        plain = json.dumps(dict(options))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"storage_options must be texts, numbers and dictionaries of these: {error}",
            hint="the writer process gets them, too; objects such as credential providers cannot"
            " be sent",
        ) from error
    over_obstore.store_of(bucket_of(place), plain)
    _options[bucket_of(place)] = plain


def storage_options_of(place: str) -> str:
    """The options for a place, as JSON, for :func:`take_storage_options` in another process."""
    return _options.get(bucket_of(place), _NO_OPTIONS)


def take_storage_options(place: str, plain: str) -> None:
    """Use the options of the process that has sent a job."""
    if plain != _NO_OPTIONS:
        _options[bucket_of(place)] = plain


def bucket_of(place: str) -> str:
    """The address of a place's bucket."""
    return "/".join(place.split("/")[:3])


def storage_at(place: str, *, sync: bool = True, direct: bool = False) -> Storage:
    """The storage of a place; touches nothing.

    Args:
        place: The place.
        sync: Whether to fsync what is put, removed and published in a file system.
        direct: Whether to put files past the page cache of a file system.

    Raises:
        OptionError: The client for its kind of object store is not installed.
    """
    if is_address(place):
        return object_storage_at(place)
    return PosixStorage(place, sync=sync, direct=direct)


def object_storage_at(place: str) -> ObjectStorage:
    """As :func:`storage_at`, for an address."""
    # Here and not at the top: no save to a file system needs them.
    from nostall._storage.objects.object_storage import ObjectStorage

    protocol, _, rest = place.partition("://")
    if protocol == "msc":
        from nostall._storage.objects.over_msc import MscClient

        profile, _, key = rest.partition("/")
        return ObjectStorage(place, f"{key}/" if key else "", MscClient(f"msc://{profile}"))
    from nostall._storage.objects.over_obstore import ObstoreClient

    key = rest.partition("/")[2]
    client = ObstoreClient(bucket_of(place), storage_options_of(place))
    return ObjectStorage(place, f"{key}/" if key else "", client)


def is_same(one: str, other: str) -> bool:
    """Whether both are the same existing directory, or the same address."""
    if is_address(one) or is_address(other):
        return one == other
    return posix.is_same(one, other)


def identity(place: str) -> str:
    """A text that is the same for all ways to write a place. Looks at the file system."""
    return place if is_address(place) else os.path.realpath(place)
