"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import nostall
from nostall.options import EngineOptions

DEADLINE_S = 60.0
SOON_S = 20.0


class HangingOs:
    """``os`` for ``_storage.posix``, on storage that does not answer one kind of call for a while.

    Args:
        operation: Which function of ``os``.
        part: What is in the paths, or in those behind the descriptors, for which it hangs.
    """

    def __init__(self, operation: str, part: str = "") -> None:
        self._operation = operation
        self._part = part
        self._answers = threading.Event()
        self.is_reached = threading.Event()
        """A thread waits for the answer, or has."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._hang if name == self._operation else real

    def _hang(self, target: str | int, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
        if (inside := options.get("dir_fd")) is not None:
            path = f"{os.readlink(f'/proc/self/fd/{inside}')}/{path}"
        if self._part in path:
            self.is_reached.set()
            assert self._answers.wait(DEADLINE_S)
        return getattr(os, self._operation)(target, *arguments, **options)

    def answer(self) -> None:
        """Let all calls end."""
        self._answers.set()


class AwayOs:
    """``os`` while a server does not know some files for a moment."""

    def __init__(self, operation: str, part: str) -> None:
        self._operation = operation
        self._part = part

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._refuse if name == self._operation else real

    def _refuse(self, path: Any, *arguments: Any) -> Any:
        if self._part in str(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return getattr(os, self._operation)(path, *arguments)


class RememberingOs:
    """``os`` of a host with NFS that remembers of some files that they do not exist.

    Until it lists their directory: that asks the server.

    Args:
        part: What is in their paths.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._listed: set[str] = set()
        self.denied = 0
        """How often it has said so."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: str) -> list[str]:
        self._listed.add(path)
        return os.listdir(path)

    def _require_known(self, path: str) -> None:
        if self._part in path and os.path.dirname(path) not in self._listed:
            self.denied += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def stat(self, path: str, *arguments: Any) -> os.stat_result:
        self._require_known(path)
        return os.stat(path, *arguments)

    def open(self, path: str, *arguments: Any) -> int:
        self._require_known(path)
        return os.open(path, *arguments)


@contextmanager
def impatient() -> Iterator[None]:
    """A block in which no wait for storage lasts longer than a second."""
    nostall.configure(EngineOptions(save_timeout_s=1.0))
    try:
        yield
    finally:
        nostall.configure(EngineOptions())


def error_of(call: Callable[[], object]) -> BaseException | None:
    """The exception that a call raises, if any; the call must not hang."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception(SOON_S)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds; that it does not within a minute is a failure.

    It looks every millisecond: without a pause it would keep a processor from what it waits for.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def stands_in(thread: threading.Thread, function: Callable[..., Any]) -> bool:
    """Whether a thread has called a function that has not returned yet."""
    return is_inside(sys._current_frames().get(thread.ident or 0), function)


def is_inside(frame: FrameType | None, function: Callable[..., Any]) -> bool:
    """Whether a frame is that of a function, or of something that it has called."""
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
