"""Metadata of a few tensors, treated as if they were long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nostall._commit import ahead
from nostall._model import shared_bytes


def treat_metadata_as_long(set_to: Callable[[Any, str, int], object] = setattr) -> None:
    """From now on what is known is written ahead, and by a writer process.

    Args:
        set_to: Sets an attribute; ``MonkeyPatch.setattr`` does so until the end of a test.
    """
    set_to(ahead, "WORTH_IT_NBYTES", 0)
    set_to(shared_bytes, "LONG_NBYTES", 256)
