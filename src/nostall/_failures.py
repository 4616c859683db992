"""One rank's failure, told to every rank as DCP's ``CheckpointException``.

The text on the coordinator contains ``Worker failure``, which frameworks look for; everywhere it names rank, phase,
file and cause.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from copy import copy

from nostall import _torch
from nostall.errors import NostallError, SaveError


def sendable(wrapped: _torch.WrappedException) -> _torch.WrappedException:
    """The same failure with an exception that survives the way to another rank."""
    error, trace = wrapped
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a user's exception may fail to pickle in any way
        error = SaveError(f"{type(error).__name__}: {error}")
    return error, trace


def exception_for(
    failures: Mapping[int, _torch.WrappedException], *, step: str, on_coordinator: bool
) -> _torch.CheckpointException:
    """What to raise on this rank.

    Args:
        failures: The failed ranks, within the save's group, and why.
        step: The part of the save that failed, in DCP's words.
        on_coordinator: Whether this rank is the coordinator.
    """
    named: dict[int, _torch.WrappedException] = {}
    for rank, (error, trace) in failures.items():
        told = (
            copy(error)
            if isinstance(error, NostallError)
            else SaveError(f"{type(error).__name__}: {error}", rank=rank, phase=step)
        )
        told.rank = rank
        if on_coordinator:
            told.message = f"Worker failure: {told.message}"
        told.__cause__ = error.__cause__ if told is error else error
        named[rank] = (told, trace)
    return _torch.CheckpointException(step, named)
