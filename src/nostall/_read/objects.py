"""Objects in checkpoints, which ``torch.save`` has pickled."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

from nostall.errors import DamagedCheckpointError, UntrustedObjectError

_REFUSED = re.compile(r"WeightsUnpickler error: (.*?)(?:\. |$)", re.MULTILINE)


def object_in(content: io.BytesIO, name: str, *, trust: bool, hint: str) -> Any:
    """The object in an archive of ``torch.save``.

    Args:
        content: The archive.
        name: Name of the item, for errors.
        trust: Unpickle any class, which can run code; otherwise those that ``weights_only`` allows.
        hint: How to trust it, for errors.

    Raises:
        UntrustedObjectError: It is of a class that is not allowed.
        DamagedCheckpointError: It cannot be loaded.
    """
    what = f"cannot load the object {name!r}"
    try:
        return torch.load(content, map_location="cpu", weights_only=not trust)
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        kind = DamagedCheckpointError if trust else UntrustedObjectError
        why = f"{what}: {reason_of(error)}"
        raise kind(why, phase="read", hint=None if trust else hint) from error
    except Exception as error:  # a pickle can raise anything
        raise DamagedCheckpointError(f"{what}: {reason_of(error)}", phase="read") from error


def reason_of(error: Exception) -> str:
    """What ``torch.load`` says, in one line; of ``weights_only`` the class that is refused."""
    refused = _REFUSED.search(str(error))
    said = refused[1] if refused else str(error).partition("\n")[0]
    return f"{said or type(error).__name__:.200}"
