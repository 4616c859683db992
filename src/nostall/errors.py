"""Everything nostall raises.

.. code-block:: text

    NostallError
    ├── OptionError              (also ValueError)   a wrong option, or two that exclude each other
    ├── SaveError                                    a save went wrong; this rank has committed nothing
    │   ├── StagingError                             the snapshot could not be taken
    │   ├── WriteError           (also OSError)      storage refused a shard file or the metadata
    │   ├── WriterDiedError                          the writer process ended before it answered
    │   ├── SaveTimeoutError     (also TimeoutError) a deadline passed
    │   ├── SaveAbortedError                         the save was abandoned on request
    │   ├── RankLostError        (also RuntimeError) another rank has ended, or cannot be reached
    │   ├── RankMismatchError    (also RuntimeError) ranks finalise different requests, or save to different directories
    │   ├── IncompleteSaveError                      a planned item has no result
    │   └── CheckpointExistsError                    a committed checkpoint is there and overwrite=False
    ├── NotDurableError          (also OSError)      the checkpoint is there, or may be; it may not survive a power failure
    ├── ReservationError         (also MemoryError)  host memory for the snapshot cannot be reserved
    ├── ProtocolError                                trainer and writer process disagree about a message
    ├── ReadError                (also OSError)      a file or directory cannot be read
    ├── DamagedCheckpointError                       a checkpoint on storage is not what was committed
    ├── IllegalTransitionError                       a request was moved to a state it cannot reach
    ├── UntrustedMetadataError                       ``.metadata`` cannot be true, or is not understood
    │   └── UnknownMetadataError                     it is not understood: a newer torch's, a planner's own classes, or hostile
    └── UnsupportedTorchError (also ImportError)     the installed torch lacks something that nostall is built on

Every one of them survives pickling with its attributes and notes: errors cross process and rank boundaries.
"""

from __future__ import annotations

from typing import Any


class NostallError(Exception):
    """Base of all errors of this package; carries where it happened and what to do next.

    Args:
        message: What went wrong, without the place.
        rank: Rank it happened on, in the process group of the save.
        phase: Stage of the save: ``plan``, ``stage``, ``write``, ``fsync``, ``commit``, ...
        path: File or directory concerned.
        job: Identifier of the save.
        hint: What the user can do about it.
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
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.path = path
        self.job = job
        self.hint = hint

    def __str__(self) -> str:
        place = [
            f"{name}={value}"
            for name, value in (
                ("rank", self.rank),
                ("phase", self.phase),
                ("path", self.path),
                ("job", self.job),
            )
            if value is not None
        ]
        text = self.message
        if place:
            text += f" [{' '.join(place)}]"
        if self.hint:
            text += f" ({self.hint})"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if isinstance(self, OSError):  # which keeps the code outside of __dict__
            state["errno"] = self.errno
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[NostallError], message: str, state: dict[str, Any]) -> NostallError:
    error = cls(message)
    for name, value in state.items():
        setattr(error, name, value)
    return error


class OptionError(NostallError, ValueError):
    """An option is wrong or excludes another one; raised where the caller passed it."""


class SaveError(NostallError):
    """A save failed, and this rank has published no ``.metadata`` for it.

    Nor has another one, but for :class:`RankLostError` and :class:`SaveTimeoutError`: the ranks that this one no longer hears
    of may include the coordinator. See :class:`NotDurableError` for metadata that may have been published.
    """


class StagingError(SaveError):
    """The snapshot of this rank's tensors could not be taken."""


class WriteError(SaveError, OSError):
    """Storage refused an operation; ``errno`` is the system's code where there is one."""

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno

    __str__ = SaveError.__str__


class NotDurableError(NostallError, OSError):
    """Storage failed when the metadata was being published or made durable. Not a :class:`SaveError`: the checkpoint is there,
    or may be, but may not survive a power failure.

    Nothing of it was removed. Do not remove the directory; look with :func:`nostall.is_complete` when storage answers again.
    ``errno`` is the system's code where there is one.
    """

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno

    __str__ = NostallError.__str__


class WriterDiedError(SaveError):
    """The writer process ended before it answered; ``exit_code`` is negative for a signal."""

    def __init__(self, message: str, *, exit_code: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.exit_code = exit_code


class SaveTimeoutError(SaveError, TimeoutError):
    """A wait reached its deadline; what was waited for may still be running."""

    __str__ = SaveError.__str__


class SaveAbortedError(SaveError):
    """The save was abandoned on request before it was committed."""


class RankLostError(SaveError, RuntimeError):
    """Ranks could not talk to each other: one of them has ended, or the process group cannot be used any more."""


class RankMismatchError(SaveError, RuntimeError):
    """Ranks have scheduled different numbers of requests, are about to finalise different ones, or save to different
    directories.
    """


class IncompleteSaveError(SaveError):
    """A planned item has no result, or more than one from the same rank."""


class CheckpointExistsError(SaveError):
    """The target holds a committed checkpoint and ``overwrite=False``."""


class ReservationError(NostallError, MemoryError):
    """Host memory for a snapshot could not be reserved; ``nbytes`` says how much was asked for."""

    def __init__(self, message: str, *, nbytes: int = 0, **place: Any) -> None:
        super().__init__(message, **place)
        self.nbytes = nbytes

    __str__ = NostallError.__str__


class ProtocolError(NostallError):
    """A message between trainer and writer process is not what the other side sends."""


class ReadError(NostallError, OSError):
    """A file or directory cannot be read: it is of another kind than it should be, or longer than is read."""

    def __init__(self, message: str, *, errno: int | None = None, **place: Any) -> None:
        super().__init__(message, **place)
        self.errno = errno

    __str__ = NostallError.__str__


class DamagedCheckpointError(NostallError):
    """A committed checkpoint is not what was written: bytes have changed, or files are missing."""


class IllegalTransitionError(NostallError):
    """A request was asked to enter a state that its present one does not lead to."""

    @classmethod
    def between(cls, present: str, wanted: str) -> IllegalTransitionError:
        """The error for a request in state ``present`` that was asked to become ``wanted``."""
        return cls(f"a request that is {present} cannot become {wanted}")


class UntrustedMetadataError(NostallError):
    """A ``.metadata`` file names a class, path or size that DCP metadata never needs."""


class UnknownMetadataError(UntrustedMetadataError):
    """A ``.metadata`` file is not understood: it has something that this nostall and this torch do not know.

    A newer torch or a planner with classes of its own may have written it. It may be hostile, too; nothing of it has run.
    """


class UnsupportedTorchError(NostallError, ImportError):
    """The installed torch lacks something that nostall is built on; raised when nostall is imported."""

    __str__ = NostallError.__str__

    def __reduce__(self) -> tuple[Any, ...]:
        # ImportError keeps the path outside of __dict__.
        return (_rebuild, (type(self), self.message, {**self.__dict__, "path": self.path}))
