"""Fault injection: storage fails, a writer dies, a save pauses. The hooks are in the library."""

from __future__ import annotations

import os
import pickle
import select
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from nostall._engine import default_engine
from support.points import Planned

_POINTS = ("stage", "start", "open", "chunk", "fsync", "report", "commit", "publish")


@dataclass(frozen=True, slots=True)
class Fault:
    """An event at a point of a save.

    Points in the trainer: ``stage``, before an overlapped snapshot is taken. In the process that
    writes files: ``start``, ``open``, ``chunk``, ``fsync`` and ``report``. In the coordinator, for
    saves committed while the fault is injected: ``commit``, before the metadata is written, and
    ``publish``, before it is renamed.
    """

    plain: dict[str, Any]

    def __post_init__(self) -> None:
        """Check the point: a fault at a misspelt one would make a test pass."""
        if self.plain["point"] not in _POINTS:
            raise ValueError(f"point={self.plain['point']!r}: not one of {', '.join(_POINTS)}")

    @classmethod
    def errno(
        cls, point: str, code: int, *, file: str = "", after: int = 0, times: int | None = None
    ) -> Fault:
        """Files whose path contains ``file`` fail after ``after`` successes, ``times`` times."""
        plain = {"point": point, "do": "errno", "errno": code, "file": file, "after": after}
        return cls(plain if times is None else {**plain, "times": times})

    @classmethod
    def raising(cls, point: str, message: str) -> Fault:
        return cls({"point": point, "do": "raise", "message": message})

    @classmethod
    def exit(cls, point: str, code: int, *, after: int = 0) -> Fault:
        return cls({"point": point, "do": "exit", "code": code, "after": after})

    @classmethod
    def kill(cls, point: str, signal: int, *, after: int = 0) -> Fault:
        return cls({"point": point, "do": "kill", "signal": signal, "after": after})

    @classmethod
    def delay(cls, point: str, seconds: float) -> Fault:
        return cls({"point": point, "do": "delay", "seconds": seconds})


class Hold:
    """Stops a save at a point until :meth:`release`, without a timer; later saves do not stop."""

    def __init__(self, point: str = "start") -> None:
        self._point = point
        self._directory = tempfile.TemporaryDirectory(prefix="nostall-hold-")
        reached, go = (str(Path(self._directory.name) / name) for name in ("reached", "go"))
        os.mkfifo(reached)
        os.mkfifo(go)
        self._reached_fd = os.open(reached, os.O_RDONLY | os.O_NONBLOCK)
        self._go_fd = os.open(go, os.O_RDWR)  # opened for writing only, it would wait for a reader
        self._was_reached = False
        self.fault = Fault({"point": point, "do": "hold", "reached": reached, "go": go})

    def stop(self, begin: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Begin a save that stops at the point; return when it has."""
        with inject(self.fault):
            begun = begin(*arguments, **options)
            self.wait_reached()  # some saves are planned in the background
        return begun

    def wait_reached(self, timeout_s: float = 60.0) -> None:
        """Wait until a save has stopped at the point; it may have failed before."""
        if not self._was_reached and not select.select([self._reached_fd], [], [], timeout_s)[0]:
            raise TimeoutError(f"no save has reached the point {self._point!r} in {timeout_s:g} s")
        self._was_reached = True

    def release(self) -> None:
        """Let the stopped save continue; waits until it reaches the point."""
        self.wait_reached()
        os.write(self._go_fd, b"1" * 4096)  # enough for all later passages

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._go_fd)  # stopped saves continue
        os.close(self._reached_fd)
        self._directory.cleanup()


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Apply these faults to every save of this process that starts inside the block."""
    engine = default_engine()
    before = engine.faults
    outer = pickle.loads(before) if before else ()
    engine.faults = pickle.dumps((*outer, *(Planned(fault.plain) for fault in faults)))
    try:
        yield
    finally:
        engine.faults = before


def writer_pids() -> list[int]:
    """Process ids of this process's writer processes; starts one if there is none."""
    return [default_engine().writer().pid]
