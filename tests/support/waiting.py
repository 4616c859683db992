"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import nostall
from nostall.options import EngineOptions

DEADLINE_S = 60.0
SOON_S = 20.0


class _OneCallOs:
    """``os`` but for calls of one function where ``part`` is in the path, or a descriptor's."""

    def __init__(self, operation: str, part: str = "") -> None:
        self._operation, self._part = operation, part

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self._call, real) if name == self._operation else real

    def _call(self, real: Any, target: Any, *arguments: Any, **options: Any) -> Any:
        path = path_of(target)
        if (inside := options.get("dir_fd")) is not None:
            path = f"{os.readlink(f'/proc/self/fd/{inside}')}/{path}"
        call = partial(real, target, *arguments, **options)
        return self._meant(call, path) if self._part in path else call()

    def _meant(self, call: Callable[[], Any], path: str) -> Any:
        raise NotImplementedError


class HangingOs(_OneCallOs):
    """Storage that does not answer for a while."""

    def __init__(self, operation: str, part: str = "") -> None:
        super().__init__(operation, part)
        self._answers = threading.Event()
        self.is_reached = threading.Event()
        """A thread waits for the answer, or has."""

    def _meant(self, call: Callable[[], Any], path: str) -> Any:
        self.is_reached.set()
        assert self._answers.wait(DEADLINE_S)
        return call()

    def answer(self) -> None:
        self._answers.set()


class AwayOs(_OneCallOs):
    """Storage that answers with an error, so often, after it has done what was asked or not."""

    def __init__(
        self,
        operation: str,
        part: str = "",
        *,
        code: int = errno.ESTALE,
        times: int = 1 << 30,
        is_done: bool = False,
    ) -> None:
        super().__init__(operation, part)
        self._code, self._times, self._is_done = code, times, is_done

    def _meant(self, call: Callable[[], Any], path: str) -> Any:
        self._times -= 1
        result = call() if self._is_done or self._times < 0 else None
        if self._times >= 0:
            raise OSError(self._code, os.strerror(self._code), path)
        return result


def path_of(target: Any) -> str:
    """A path, or that of a descriptor."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)


def is_direct(fd: int, *_: object) -> bool:
    """Whether a descriptor reads and writes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@contextmanager
def refusing(
    module: Any, name: str, is_meant: Callable[..., bool], code: int = errno.EINVAL
) -> Iterator[list[str]]:
    """A block in which such calls of a function fail; the paths of those that did."""
    refused: list[str] = []
    real = getattr(module, name)

    def call(target: Any, *arguments: Any) -> Any:
        if is_meant(target, *arguments):
            refused.append(path_of(target))
            raise OSError(code, os.strerror(code))
        return real(target, *arguments)

    with patch.object(module, name, call):
        yield refused


class RememberingOs:
    """``os`` of a host with NFS that remembers of some files that they do not exist.

    Until it lists their directory: that asks the server. ``part`` is in their paths.
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
