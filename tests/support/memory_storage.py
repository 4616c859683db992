"""A storage in memory that records operations and fails on request."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nostall._storage.port import ABSENT, Conflict, Stat, Version
from nostall.errors import NotDurableError


@dataclass(slots=True, kw_only=True)
class _Fault:
    operation: str
    error: OSError
    name: str
    times: int
    is_done: bool


class MemoryStorage:
    """Files in memory, with the rules of an object store: unfinished ones are invisible.

    :attr:`operations` lists what succeeded: ``put``, ``write``, ``finish``, ``abort``, ``flush``,
    ``open``, ``remove``, ``append`` and ``publish``, each with a name. Thread-safe.

    It is for code that takes a storage port; writers, ``verify`` and the like take paths.
    """

    publishes_conditionally = True

    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []
        self._files: dict[str, tuple[bytes, Stat]] = {}
        self._names: set[str] = set()
        """Also of unfinished files."""
        self._versions = 0
        self._faults: list[_Fault] = []
        self._lock = threading.RLock()

    def fail(
        self, operation: str, error: OSError, *, name: str = "", times: int = 1, done: bool = False
    ) -> None:
        """Let an operation fail.

        Args:
            operation: One of those in :attr:`operations`.
            error: What it raises.
            name: A part of the names for which it fails.
            times: How often it fails.
            done: Whether it is done nevertheless, as if the answer was lost. ``publish`` then
                raises ``NotDurableError``.
        """
        fault = _Fault(operation=operation, error=error, name=name, times=times, is_done=done)
        self._faults.append(fault)

    def where(self, name: str = "") -> str:
        return f"memory:///{name}"

    def make_place(self) -> None:
        """Does nothing."""

    def least_part(self, nbytes: int) -> int:
        del nbytes
        return mmap.PAGESIZE

    def put(
        self, name: str, nbytes: int, *, on_created: Callable[[str], None] = lambda _: None
    ) -> _Upload:
        with self._doing("put", name):
            while name in self._names:
                name += "-"
            on_created(name)
            self._names.add(name)
            return _Upload(self, name, bytearray(nbytes))

    def flush(self) -> None:
        with self._doing("flush", ""):
            pass

    def open(self, name: str) -> _Source:
        with self._doing("open", name):
            return _Source(*self._found(name))

    def stat(self, name: str) -> Stat:
        return self._found(name)[1]

    def list(self) -> list[str]:
        return list(self._files)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._doing("remove", name):
                self._files.pop(name, None)
                self._names.discard(name)

    def publish(
        self,
        name: str,
        content: Sequence[bytes],
        *,
        expected: Version | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        before()
        with self._doing("publish", name):
            present = self._files[name][1].version if name in self._files else ABSENT
            if expected is not None and present != expected:
                raise Conflict(self.where(name))
            self._store(name, b"".join(content))

    def _found(self, name: str) -> tuple[bytes, Stat]:
        with self._lock:
            if name not in self._files:
                raise FileNotFoundError(2, "no such file", self.where(name))
            return self._files[name]

    def _store(self, name: str, content: bytes) -> None:
        self._versions += 1
        version = Version(str(self._versions))
        self._names.add(name)
        now_s = time.time()
        self._files[name] = content, Stat(len(content), version, now_s, now_s)

    @contextmanager
    def _doing(self, operation: str, name: str) -> Iterator[None]:
        with self._lock:
            fault = self._fault_at(operation, name)
            if fault is not None and not fault.is_done:
                raise fault.error
            yield
            self.operations.append((operation, name))
            if fault is not None and operation == "publish":
                raise NotDurableError(
                    "cannot determine whether it was published", path=self.where(name)
                ) from fault.error
            if fault is not None:
                raise fault.error

    def _fault_at(self, operation: str, name: str) -> _Fault | None:
        for fault in self._faults:
            if fault.times and fault.operation == operation and fault.name in name:
                fault.times -= 1
                return fault
        return None


@dataclass
class _Upload:
    storage: MemoryStorage
    name: str
    content: bytearray
    any_order: bool = True
    is_over: bool = False

    def write(self, memory: memoryview, begin: int, end: int, *, origin: int = 0) -> None:
        with self.storage._doing("write", self.name):
            self.content[begin:end] = memory[begin - origin : end - origin]

    def finish(self, crc32: int | None = None) -> None:
        del crc32
        with self.storage._doing("finish", self.name):
            self.storage._store(self.name, bytes(self.content))
            self.is_over = True

    def close(self) -> None:
        if not self.is_over:
            self.is_over = True
            with suppress(OSError), self.storage._doing("abort", self.name):
                self.storage._names.discard(self.name)


@dataclass
class _Source:
    content: bytes
    stat: Stat

    def read_into(self, offset: int, *memories: memoryview) -> int:
        begin = offset
        for memory in memories:
            piece = self.content[offset : offset + memory.nbytes]
            memory[: len(piece)] = piece
            offset += len(piece)
        return offset - begin

    def close(self) -> None:
        """Does nothing."""
