"""Options, checked where the caller passes them. Frozen; every default is explained in ``docs/options.md``."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from nostall._jobs import MOST_IO_THREADS
from nostall.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How this process copies and writes; one set for all saves of the process.

    Raises:
        OptionError: A value is out of range.
    """

    copy_threads: int | None = None
    """Threads that copy large CPU tensors into a snapshot; ``None`` for as many as torch computes with."""
    io_threads: int | None = None
    """Threads per writer process that checksum and write; ``None`` for 12, and fewer where many ranks share a host."""
    chunk_nbytes: int = 8 << 20
    """Bytes per write; a multiple of 4096."""
    direct_io: bool = True
    """Write past the page cache where the file system supports it."""
    write_retries: int = 3
    """How often a file is written anew when storage fails it for a reason that may pass, after 0.1, 0.4, 1.6, ... seconds."""
    max_in_flight: int = 2
    """Saves whose snapshot may exist at the same time; the next one waits for the oldest."""
    max_staging_bytes: int | None = None
    """Snapshot memory of this process; what is larger is saved in waves. ``None`` for as much as the saves need."""
    cpu_priority: int | None = 10
    """Niceness of writer processes, 0 to 19; ``None`` leaves it alone."""
    io_priority: int | None = None
    """I/O scheduling class of writer processes (Linux ``ionice``): 1 real time, 2 best effort, 3 idle."""
    save_timeout_s: float = 1800.0
    """Longest wait for a snapshot buffer, or for a rank's files once somebody asks for them."""
    exit_timeout_s: float = 300.0
    """Longest time for which an interpreter that ends completes what is scheduled."""

    def __post_init__(self) -> None:
        if self.copy_threads is not None:
            require_integer("copy_threads", self.copy_threads, at_least=1)
        if self.io_threads is not None:
            require_integer("io_threads", self.io_threads, at_least=1)
            _require(
                self.io_threads <= MOST_IO_THREADS,
                f"io_threads={self.io_threads}",
                f"at most {MOST_IO_THREADS}",
            )
        _require(
            _is_number(self.chunk_nbytes)
            and self.chunk_nbytes >= 4096
            and self.chunk_nbytes % 4096 == 0,
            f"chunk_nbytes={self.chunk_nbytes}",
            "a positive multiple of 4096",
        )
        _require(isinstance(self.direct_io, bool), f"direct_io={self.direct_io!r}", "True or False")
        require_integer("write_retries", self.write_retries, at_least=0)
        require_integer("max_in_flight", self.max_in_flight, at_least=1)
        if self.max_staging_bytes is not None:
            require_integer("max_staging_bytes", self.max_staging_bytes, at_least=1)
        _require(
            self.cpu_priority is None or self.cpu_priority in range(20),
            f"cpu_priority={self.cpu_priority}",
            "None or 0 to 19",
        )
        _require(
            self.io_priority is None or self.io_priority in (0, 1, 2, 3),
            f"io_priority={self.io_priority}",
            "None or an ionice class: 0, 1, 2 or 3",
        )
        for name in ("save_timeout_s", "exit_timeout_s"):
            seconds = getattr(self, name)
            _require(
                _is_number(seconds) and 0 < seconds <= threading.TIMEOUT_MAX,
                f"{name}={seconds!r}",
                "a positive number of seconds that the system can wait for; 1e9 is as good as none",
            )

    @property
    def max_wave_nbytes(self) -> int | None:
        """Snapshot memory for one wave, so that as many as may be in flight have room."""
        if self.max_staging_bytes is None:
            return None
        return max(1, self.max_staging_bytes // self.max_in_flight)


STAGING = ("blocking", "overlapped")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """What one ``FileSystemWriterAsync`` was told, after translation from its keyword arguments."""

    thread_count: int
    file_per_item: bool
    sync_files: bool
    overwrite: bool
    separation_hint: str | None
    processes: int
    staging: str = "blocking"

    def __post_init__(self) -> None:
        require_integer("thread_count", self.thread_count, at_least=1)
        _require(self.staging in STAGING, f"staging={self.staging!r}", " or ".join(STAGING))
        if self.separation_hint is not None:
            _require(
                self.thread_count >= 2,
                f"separation_hint={self.separation_hint!r} with thread_count={self.thread_count}",
                "thread_count >= 2, as each group gets half of the files",
            )
            _require(
                bool(self.separation_hint)
                and os.sep not in self.separation_hint
                and not self.separation_hint.startswith("."),
                f"separation_hint={self.separation_hint!r}",
                "a prefix of names that can begin a file name",
            )


def is_possible_wait(seconds: object) -> bool:
    """Whether the system can wait for so many seconds; not a number is neither."""
    return isinstance(seconds, int | float) and 0 <= seconds <= threading.TIMEOUT_MAX


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def require_integer(name: str, value: object, *, at_least: int) -> None:
    """Refuse what is no integer, or too small a one.

    Raises:
        OptionError: It is not possible.
    """
    _require(
        isinstance(value, int) and value >= at_least,
        f"{name}={value!r}",
        f"an integer of at least {at_least}",
    )


def _require(condition: object, given: str, wanted: str) -> None:
    if not condition:
        raise OptionError(f"{given} is not possible", hint=f"use {wanted}")
