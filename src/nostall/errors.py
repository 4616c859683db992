"""Everything nostall raises.

.. code-block:: text

    NostallError
    ├── OptionError           (also ValueError)   an invalid option, or two that exclude each other
    ├── SaveError                                 a save failed
    │   ├── StagingError                          the snapshot could not be taken
    │   ├── WriteError        (also OSError)      storage refused a shard file or the metadata
    │   ├── WriterDiedError                       the writer process ended before it answered
    │   ├── SaveTimeoutError  (also TimeoutError) a deadline passed
    │   ├── SaveAbortedError                      the save was aborted on request
    │   ├── RankLostError     (also RuntimeError) another rank has ended or cannot be reached
    │   ├── RankMismatchError (also RuntimeError) ranks differ in request, directory or shapes
    │   ├── IncompleteSaveError                   a planned item has no result
    │   └── CheckpointExistsError                 a committed checkpoint exists, overwrite=False
    ├── NotDurableError       (also OSError)      a published checkpoint may not survive power loss
    ├── ReservationError      (also MemoryError)  host memory for the snapshot cannot be reserved
    ├── ProtocolError                             trainer and writer disagree about a message
    ├── ReadError             (also OSError)      a file or directory cannot be read
    ├── RankFailedError       (also RuntimeError) another rank failed to load what ranks share
    ├── DamagedCheckpointError                    a checkpoint differs from what was committed
    ├── UntrustedMetadataError                    ``.metadata`` is invalid or not understood
    │   └── UnknownMetadataError                  it has parts that this version does not know
    ├── UntrustedObjectError                      an object is of a class that is not allowed
    └── UnsupportedTorchError (also ImportError)  the installed torch lacks a required part

Each of them survives pickling with its attributes and notes, so that it can cross processes and
ranks.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointExistsError",
    "DamagedCheckpointError",
    "IncompleteSaveError",
    "NostallError",
    "NotDurableError",
    "OptionError",
    "ProtocolError",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
    "ReadError",
    "ReservationError",
    "SaveAbortedError",
    "SaveError",
    "SaveTimeoutError",
    "StagingError",
    "UnknownMetadataError",
    "UnsupportedTorchError",
    "UntrustedMetadataError",
    "UntrustedObjectError",
    "WriteError",
    "WriterDiedError",
]


class NostallError(Exception):
    """Base of all errors of this package; carries the place and the next step.

    Args:
        message: The failure, without the place.
        rank: Rank on which it occurred, in the process group of the save.
        phase: Phase of the save: ``plan``, ``stage``, ``wait``, ``write``, ``fsync``, ``commit``,
            ...
        path: File or directory concerned.
        job: Identifier of the save.
        hint: The next step for the user.
        cause: What led to some of the errors, instead of a chained exception: the caller's line
            comes first in the traceback then. Not sent to other processes.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        path: str | None = None,
        job: str | None = None,
        hint: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.path = path
        self.job = job
        self.hint = hint
        self.cause = cause

    def __str__(self) -> str:
        places = {name: getattr(self, name) for name in ("rank", "phase", "path", "job")}
        place = " ".join(f"{name}={each}" for name, each in places.items() if each is not None)
        shown = f" [{place}]" if place else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.message}{shown}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError and ImportError keep these outside of __dict__.
        state = {**self.__dict__, "path": self.path, "cause": None}
        if isinstance(self, OSError):
            state["errno"] = self.errno
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[NostallError], message: str, state: dict[str, Any]) -> NostallError:
    error = cls(message)
    for name, value in state.items():
        setattr(error, name, value)
    return error


class OptionError(NostallError, ValueError):
    """An option is invalid or excludes another one; raised where the caller passed it."""


class SaveError(NostallError):
    """A save failed, as a rule before its ``.metadata`` was published.

    After :class:`RankLostError`, :class:`RankMismatchError`, :class:`SaveAbortedError` and
    :class:`SaveTimeoutError` it may be committed all the same: the coordinator may be among the
    ranks that this one cannot reach, and in the steady state it commits as soon as all ranks have
    written. A checkpoint that was published is whole. See :class:`NotDurableError` for metadata
    that may not be durable.
    """


class StagingError(SaveError):
    """The snapshot of this rank's tensors could not be taken."""


class WriteError(SaveError, OSError):
    """Storage refused an operation; ``errno`` is the system's error code, if any."""

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno


class NotDurableError(NostallError, OSError):
    """Storage failed while the metadata was published or made durable.

    Not a :class:`SaveError`: the checkpoint exists, or may exist, but may not survive a power
    failure. None of its files was removed. Do not remove the directory; call
    :func:`nostall.is_complete` when storage answers again. ``errno`` is the system's error code, if
    any.
    """

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno


class WriterDiedError(SaveError):
    """The writer process ended before it answered; ``exit_code`` is negative for a signal."""

    def __init__(self, message: str, *, exit_code: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.exit_code = exit_code


class SaveTimeoutError(SaveError, TimeoutError):
    """A wait reached its deadline; the operation may still be running."""


class SaveAbortedError(SaveError):
    """The save was aborted on request."""


class RankLostError(SaveError, RuntimeError):
    """Ranks cannot communicate: one of them has ended, or the process group is unusable."""


class RankMismatchError(SaveError, RuntimeError):
    """Ranks differ in their requests, in the directory, or in the shape of a tensor."""


class IncompleteSaveError(SaveError):
    """A planned item has no result, or more than one from the same rank."""


class CheckpointExistsError(SaveError):
    """The target holds a committed checkpoint and ``overwrite=False``."""


class ReservationError(NostallError, MemoryError):
    """Host memory for a snapshot could not be reserved; ``nbytes`` is the size requested."""

    def __init__(self, message: str, *, nbytes: int = 0, **place: Any) -> None:
        super().__init__(message, **place)
        self.nbytes = nbytes


class ProtocolError(NostallError):
    """A message between trainer and writer process is malformed or unexpected."""


class ReadError(NostallError, OSError):
    """A file or directory cannot be read, although nothing shows that it is damaged.

    It has the wrong type, exceeds a size limit, or needs a module or class that this environment
    does not have.
    """

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno


class RankFailedError(NostallError, RuntimeError):
    """Another rank failed while ranks loaded a checkpoint together; ``rank`` is that rank."""


class DamagedCheckpointError(NostallError):
    """A committed checkpoint differs from what was written: changed bytes or missing files."""


class UntrustedMetadataError(NostallError):
    """A ``.metadata`` file is malformed, or names a class, path or size that DCP never writes."""


class UnknownMetadataError(UntrustedMetadataError):
    """A ``.metadata`` file has parts that this nostall and this torch do not know.

    A newer torch or a planner with its own classes may have written it. It may also be hostile;
    none of its code has run.
    """


class UntrustedObjectError(NostallError):
    """An object in a checkpoint is of a class that is loaded on request only; no code of it ran."""


class UnsupportedTorchError(NostallError, ImportError):
    """The installed torch lacks a part that nostall requires; raised when nostall is imported."""
