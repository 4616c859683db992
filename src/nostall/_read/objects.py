"""Load archives of ``torch.save``: objects in checkpoints, and tensors that are not plain."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from typing import Any, BinaryIO

import torch

from nostall._storage.damage import is_to_blame
from nostall.errors import DamagedCheckpointError, ReadError, UntrustedObjectError

_ENVIRONMENT_HINT = (
    "its bytes do not seem to be damaged: make the modules of the program that saved it importable"
    " here, in the same versions"
)


class Broken(Exception):  # a finding; the reader makes an error of it
    """Not an archive as ``torch.save`` makes it."""


_OF_BYTES = (Broken, pickle.UnpicklingError, RuntimeError)
"""Raised for bytes that contradict each other; the last two by torch."""
_BEGIN = b"PK\x03\x04"
"""Anything else torch takes for a file of an older version, which has several pickles."""
_REFUSED = re.compile(
    r"(?:WeightsUnpickler error:\s*|trusted source\.\n\s*\n)(.*?)(?:\. |$)", re.MULTILINE
)


def object_in(content: io.BytesIO, name: str, *, path: str, trust: bool, hint: str) -> Any:
    """The object in an archive of ``torch.save``.

    With ``trust`` it may be of any class, which can run code; otherwise of those that
    ``weights_only`` allows; ``UntrustedObjectError``, with ``hint``, if it is of another class.
    ``DamagedCheckpointError`` if its bytes are damaged; ``ReadError`` if it needs something that
    this environment does not have.
    """
    what = f"cannot load the object {name!r}"
    try:
        if not trust:
            return loaded_safely(content)
        return torch.load(content, map_location="cpu", weights_only=False)
    except MemoryError:
        raise
    except Exception as error:  # a pickle can raise anything
        if not trust and isinstance(error, pickle.UnpicklingError):
            why = f"{what}: {reason_of(error)}"
            raise UntrustedObjectError(why, phase="read", path=path, hint=hint) from error
        raise unloadable(what, error, content, path=path) from error


def unloadable(
    what: str, error: Exception, archive: BinaryIO, *, path: str, damage_hint: str | None = None
) -> DamagedCheckpointError | ReadError:
    """The error for an archive that cannot be loaded: damage only if its bytes are the reason."""
    why = f"{what}: {type(error).__name__}: {reason_of(error)}"
    if isinstance(error, _OF_BYTES) or is_to_blame(archive, error):
        return DamagedCheckpointError(why, phase="read", path=path, hint=damage_hint)
    return ReadError(why, phase="read", path=path, hint=_ENVIRONMENT_HINT)


def loaded_safely(archive: BinaryIO) -> Any:
    """The object that ``torch.load(weights_only=True)`` makes of an archive.

    Raises :class:`Broken` for another file, and anything for a damaged archive.
    """
    require_archive(archive)
    return torch.load(archive, map_location="cpu", weights_only=True)


def require_archive(archive: BinaryIO) -> None:
    """Require an archive as ``torch.save`` makes it, with records no longer than itself.

    Raises :class:`Broken` for another file, or if records are compressed, or used several times,
    and anything for a damaged archive.
    """
    nbytes = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    if archive.read(len(_BEGIN)) != _BEGIN:
        raise Broken("not an archive of torch.save")
    with zipfile.ZipFile(archive) as records:
        entries = records.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > nbytes:
        raise Broken("its records are compressed, or longer than the archive")
    archive.seek(0)


def reason_of(error: Exception) -> str:
    """The message of ``torch.load`` in one line, or the class that ``weights_only`` refuses."""
    refused = _REFUSED.search(str(error))
    said = refused[1] if refused else str(error).partition("\n")[0]
    return f"{said or type(error).__name__:.200}"
