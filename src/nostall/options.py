"""Options, checked where the caller passes them; ``docs/options.md`` explains them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeAlias, TypeGuard

from nostall._model.jobs import MOST_IO_THREADS
from nostall.errors import OptionError

__all__ = ["EngineOptions", "StagingMode", "dequantized_on_save"]

dequantized_on_save: set[str] = {"transformer_engine"}
"""Tensor classes that are saved as the result of their ``dequantize()``: ``module.Class``, or the
module or package that defines the class or one of its bases. All other wrappers are saved
unchanged, as stock DCP does."""


def is_dequantized_on_save(kind: type) -> bool:
    """Whether ``dequantized_on_save`` names a class or one of its bases."""
    names = (f"{each.__module__}.{each.__qualname__}." for each in kind.__mro__)
    return any(name.startswith(f"{known}.") for name in names for known in dequantized_on_save)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How this process copies and writes; one set for all saves of the process.

    Raises:
        OptionError: A value is out of range.
    """

    copy_threads: int | None = None
    """Threads that copy large CPU tensors into a snapshot; ``None`` for torch's thread count."""
    copy_past_caches: bool = True
    """Copy large snapshots of CPU tensors with non-temporal stores, by a loop of machine code, on
    processors with AVX."""
    io_threads: int | None = None
    """Threads per writer process that checksum and write; ``None`` for 12, or fewer if many ranks
    share a host."""
    chunk_nbytes: int = 8 << 20
    """Bytes per write; a multiple of 4096."""
    direct_io: bool = True
    """Bypass the page cache where the file system supports it."""
    write_retries: int = 3
    """Retries per file after transient storage errors, delayed by 0.1, 0.4, 1.6, ... seconds."""
    max_in_flight: int = 2
    """Saves whose snapshots may exist at the same time; the next save waits for the oldest."""
    max_staging_bytes: int | None = None
    """Snapshot memory of this process; larger saves are split into waves. ``None`` for no limit."""
    cpu_priority: int | None = 10
    """Niceness of writer processes, 0 to 19; ``None`` leaves it unchanged."""
    io_priority: int | None = None
    """I/O scheduling class of writer processes (Linux ``ionice``): 1 real time, 2 best effort, 3
    idle."""
    save_timeout_s: float = 1800.0
    """Longest wait for a snapshot buffer, or for a rank's files once a caller waits for them.

    A wait during which the process was suspended begins again, once."""
    exit_timeout_s: float = 300.0
    """Longest time that interpreter shutdown spends on completing scheduled saves."""
    on_error: Literal["raise", "warn"] = "raise"
    """Whether a queue raises the error of a failed save, or logs it and goes on; for queues made
    without ``on_error``, such as a framework's."""

    def __post_init__(self) -> None:
        require_on_error(self.on_error)
        # Values are kept in Python's own types.
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, require_integer(name, value, at_least=least))
        threads, nbytes = self.io_threads, self.chunk_nbytes
        possible = threads is None or threads <= MOST_IO_THREADS
        require(possible, f"io_threads={threads}", f"at most {MOST_IO_THREADS}")
        possible = _is_integer(nbytes) and nbytes > 0 and nbytes % 4096 == 0
        require(possible, f"chunk_nbytes={nbytes!r}", "a positive multiple of 4096")
        object.__setattr__(self, "chunk_nbytes", int(nbytes))
        for name in ("copy_past_caches", "direct_io"):
            object.__setattr__(self, name, require_switch(name, getattr(self, name)))
        for name, classes, wanted in _PRIORITIES:
            value = getattr(self, name)
            possible = value is None or (_is_integer(value) and value in classes)
            require(possible, f"{name}={value!r}", wanted)
        for name in ("save_timeout_s", "exit_timeout_s"):
            seconds = getattr(self, name)
            possible = _is_number(seconds) and 0 < seconds <= threading.TIMEOUT_MAX
            wanted = "a positive number of seconds, at most threading.TIMEOUT_MAX"
            require(possible, f"{name}={seconds!r}", wanted)
            object.__setattr__(self, name, float(seconds))

    @property
    def max_wave_nbytes(self) -> int | None:
        """Snapshot memory for one wave, so that ``max_in_flight`` waves fit."""
        if self.max_staging_bytes is None:
            return None
        return max(1, self.max_staging_bytes // self.max_in_flight)


_LEAST = {
    "copy_threads": 1,
    "io_threads": 1,
    "write_retries": 0,
    "max_in_flight": 1,
    "max_staging_bytes": 1,
}
_OPTIONAL = ("copy_threads", "io_threads", "max_staging_bytes")
_PRIORITIES = (
    ("cpu_priority", range(20), "None or 0 to 19"),
    ("io_priority", range(4), "None or an ionice class: 0, 1, 2 or 3"),
)

StagingMode: TypeAlias = Literal["blocking", "overlapped"]
"""When a save call returns; see :class:`nostall.FileSystemWriterAsync`."""


def is_possible_wait(seconds: object) -> bool:
    """Whether the system can wait for this many seconds; it cannot for NaN."""
    return isinstance(seconds, int | float) and 0 <= seconds <= threading.TIMEOUT_MAX


def require_integer(name: str, value: object, *, at_least: int) -> int:
    """The value as a Python integer; numpy integers are accepted.

    Raises:
        OptionError: It is not an integer, or too small.
    """
    if not _is_integer(value) or value < at_least:
        raise _refusal(f"{name}={value!r}", f"an integer of at least {at_least}")
    return int(value)


def require_on_error(value: object) -> None:
    """Raise ``OptionError`` if it is no way to treat the error of a failed save."""
    require(value in ("raise", "warn"), f"on_error={value!r}", '"raise" or "warn"')


def require_switch(name: str, value: object) -> bool:
    """The value as a ``bool``; values equal to one are accepted: 0, 1, ``numpy.True_``.

    Raises:
        OptionError: It is neither.
    """
    try:
        chosen = {True: True, False: False}.get(value)  # type: ignore[call-overload]  # of any type
    except TypeError:  # unhashable
        chosen = None
    if chosen is None:
        raise _refusal(f"{name}={value!r}", "True or False")
    return bool(chosen)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def require(condition: object, given: str, wanted: str) -> None:
    """Raise ``OptionError``, which names what is ``given`` and what to use, unless it is right."""
    if not condition:
        raise _refusal(given, wanted)


def _refusal(given: str, wanted: str) -> OptionError:
    in_one_line = " ".join(given.split())
    return OptionError(f"invalid {in_one_line:.200}", hint=f"use {wanted}")


def require_flags(**flags: object) -> None:
    """Require that each is ``True`` or ``False``."""
    for name, flag in flags.items():
        require(isinstance(flag, bool), f"{name}={flag!r}", "True or False")
