"""What a way of saving has to offer to be measured."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from nostall._bench.ranks import Ranks
from nostall._bench.workloads import State


class Pending(Protocol):
    """A save under way; every rank polls it until it is durable."""

    def poll(self) -> bool:
        """Whether the checkpoint is durable; finalises it when possible, raises if it failed."""
        ...

    def wait_staged(self) -> None:
        """Return once the state may be changed; at once if the save call has made sure of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a contender is told before its first save."""

    ranks: Ranks
    nbytes: int
    """Of this rank's state dict."""
    scratch: Path
    """An empty directory of this contender's own."""


class Contender(Protocol):
    """A way of saving, from its first save to its last.

    ``open`` is called once before any save, ``close`` at the end, also after a failure. ``save``
    and ``load`` are collective.
    """

    name: str
    description: str
    warmups: int
    """Saves before the timed ones: three for what caches, one for what does not."""

    def available(self) -> str | None:
        """Why it cannot take part here, or ``None`` if it can."""
        ...

    def open(self, setting: Setting) -> None:
        """Get ready: start processes, reserve memory."""
        ...

    def save(self, state: State, path: Path) -> Pending:
        """Start saving into a directory that does not exist."""
        ...

    def load(self, path: Path, into: State) -> State:
        """Load what was saved, with the loader that users of it would use."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Durable:
    """A save that was durable when the call returned."""

    def poll(self) -> bool:
        return True

    def wait_staged(self) -> None:
        return None


@dataclass(slots=True)
class PendingFuture:
    """A save whose future is done when it is durable."""

    future: Future[Any]

    def poll(self) -> bool:
        if not self.future.done():
            return False
        self.future.result()
        return True

    def wait_staged(self) -> None:
        return None


@dataclass(slots=True)
class SyncedAfterwards:
    """A save by something that does not fsync: afterwards a thread syncs its files, which counts.

    Without this, a page cache would be compared with a disk.
    """

    finished: Future[Any]
    path: Path
    _synced: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="bench-sync", daemon=True).start()

    def _run(self) -> None:
        try:
            self.finished.result()
            sync_tree(self.path)
        except BaseException as error:  # whoever polls must hear of it
            self._synced.set_exception(error)
        else:
            self._synced.set_result(None)

    def poll(self) -> bool:
        if not self._synced.done():
            return False
        self._synced.result()
        return True

    def wait_staged(self) -> None:
        return None


def why_not_importable(*modules: str) -> str | None:
    """Why one of these modules cannot be imported, or ``None`` if all can."""
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # an old library fails in its own ways with a new torch
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def file_name(name: str) -> str:
    """The name of a contender's or a form's directory."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def sync_tree(path: Path) -> None:
    """Fsync every file and directory below a path, and the path itself."""
    for folder, _, names in os.walk(path):
        for name in [*names, ""]:
            sync(os.path.join(folder, name))


def sync(path: str | os.PathLike[str]) -> None:
    """Fsync one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
