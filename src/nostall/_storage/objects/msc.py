"""Addresses of NVIDIA's multi-storage client: ``msc://profile/path``.

A profile of files leads to a directory, which is then written like any other. Other profiles are
written through the client's fsspec file system, which has a temporary file for each object.
"""

from __future__ import annotations

from nostall.errors import OptionError


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
