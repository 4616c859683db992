"""What this process is doing in checkpoint directories: which saves may use plain file names, and who commits.

A directory is known by where its path leads, not by how that is written, and whichever engine a save belongs to.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from nostall.errors import SaveTimeoutError

_KEPT = 4096
"""Directories with a checkpoint of ours that are remembered."""


class Claim:
    """The right to plain file names in a directory, for as long as somebody holds it and it is not released.

    Two saves that are under way in one directory must not share names, and neither may use those of a committed checkpoint.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key

    def release(self) -> None:
        """Let the next save have the names. Idempotent."""
        with _state.lock:
            if _state.claims.get(self._key) is self:  # and not a later save's
                del _state.claims[self._key]

    def keep(self) -> None:
        """Let no other save of this process have the names: a committed checkpoint has them now.

        Its metadata would tell as well, but a network file system may say for a while that it is not there.
        """
        with _state.lock:
            _state.claims.setdefault(self._key, self)
            _state.kept[self._key] = self
            while len(_state.kept) > _KEPT:
                _state.kept.popitem(last=False)


class _State:
    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Also in a forked child, where a lock may be held by a thread that the child does not have."""
        self.lock = threading.Lock()
        self.claims: WeakValueDictionary[tuple[str, str], Claim] = WeakValueDictionary()
        self.kept: OrderedDict[tuple[str, str], Claim] = OrderedDict()
        self.committing: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()


_state = _State()


def claim(directory: str, prefix: str, *, committed: bool) -> Claim | None:
    """The right to plain file names in a directory, or ``None`` if somebody has it.

    Args:
        directory: The checkpoint directory, which need not be there yet.
        prefix: What this rank's file names begin with.
        committed: Whether a checkpoint is there, or may be.
    """
    key = (os.path.realpath(directory), prefix)
    with _state.lock:
        if committed or key in _state.claims:
            return None
        made = _state.claims[key] = Claim(key)
        return made


@contextmanager
def committing(directory: str, *, timeout_s: float) -> Iterator[None]:
    """While inside, no other thread of this process commits to this directory.

    Raises:
        SaveTimeoutError: Another one has been at it for ``timeout_s`` seconds.
    """
    where = os.path.realpath(directory)
    with _state.lock:
        lock = _state.committing.setdefault(where, threading.Lock())
    if not lock.acquire(timeout=timeout_s):
        raise SaveTimeoutError(
            f"another save has been committing to this directory for {timeout_s:g} s",
            phase="commit",
            path=directory,
            hint="storage may hang; nothing of this save was committed",
        )
    try:
        yield
    finally:
        lock.release()


def forget(directory: str) -> None:
    """There is no checkpoint in this directory any more."""
    where = os.path.realpath(directory)
    with _state.lock:
        for key in [key for key in _state.kept if key[0] == where]:
            del _state.kept[key]
            _state.claims.pop(key, None)


os.register_at_fork(after_in_child=_state.start_over)
