"""The directory of a step: its name, whether it is committed, its removal.

``root/step-000000100`` holds the checkpoint of step 100.

A step is *committed* when its metadata is there: listing and policies count these. Listing reads
the names in ``root`` and asks for the status of one file per step; it opens nothing. A committed
step is *complete* if all its files are there: one is restored only then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from nostall import _torch
from nostall._commit.manifest import manifest_alone
from nostall._engine import default_engine
from nostall._model.names import is_metadata_of_one_rank
from nostall._storage.deadlines import in_time
from nostall._storage.directories import is_in_use
from nostall._storage.places import storage_at
from nostall._storage.port import how_to_read
from nostall._storage.reading import open_to_read
from nostall.errors import NostallError, OptionError, ReadError
from nostall.removal import remove_checkpoint

T = TypeVar("T")

_log = logging.getLogger("nostall")
_NAME = re.compile(r"step-(\d{9}|[1-9]\d{9,})", re.ASCII)


def name_of(step: int) -> str:
    """The name of a step's directory; such names sort like steps below a billion."""
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step whose directory has this name; ``None`` for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class StepDirectories:
    """The steps below one directory.

    All methods but :meth:`look` raise ``OSError`` if storage refuses to answer.
    """

    root: str

    def look(self, find: Callable[[], T]) -> T:
        """What ``find``, which looks at the steps, returns in time: other ranks may wait for it.

        Raises:
            ReadError: Storage refuses to answer.
            SaveTimeoutError: It does not answer within ``EngineOptions.save_timeout_s``.
        """
        timeout_s = default_engine().options.save_timeout_s
        doing = "looking for steps"
        try:
            return in_time(find, timeout_s=timeout_s, doing=doing, phase="read", path=self.root)
        except NostallError:
            raise
        except OSError as error:
            raise ReadError(
                f"steps cannot be read: {error.strerror or error}",
                errno=error.errno,
                phase="read",
                path=error.filename or self.root,
                hint=how_to_read(error),
            ) from error

    def path(self, step: int) -> str:
        """The directory of a step."""
        return f"{self.root}/{name_of(step)}"

    def listed(self) -> list[int]:
        """All steps that have a directory, committed or not, in ascending order."""
        try:
            names = storage_at(self.root).list()
        except FileNotFoundError:
            return []
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def committed(self) -> list[int]:
        """The committed steps, in ascending order."""
        return [step for step in self.listed() if self.committed_at_s(step) is not None]

    def latest(self) -> int | None:
        """The highest committed step."""
        steps = reversed(self.listed())
        return next((step for step in steps if self.committed_at_s(step) is not None), None)

    def committed_at_s(self, step: int) -> float | None:
        """When a step was committed; ``None`` if it is not."""
        try:
            return storage_at(self.path(step)).stat(_torch.METADATA_NAME).modified_s
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ReadError:  # something else has its name: a damaged step, not an absent one
            return 0.0

    def manifest_time_s(self, step: int) -> float:
        """When a committed step was committed, by the clock of its coordinator."""
        storage = storage_at(self.path(step))
        try:
            with open_to_read(storage, _torch.METADATA_NAME) as stream:
                manifest = manifest_alone(stream)
        except ReadError:  # something else has its name: a damaged step
            return 0.0
        if manifest is None:
            return storage.stat(_torch.METADATA_NAME).modified_s
        return manifest.committed_at_s

    def remove(self, step: int) -> None:
        """Remove a step, or the rest of one. Files that no save has made stay."""
        with suppress(OptionError):  # holds only other files, or is promoted to
            remove_checkpoint(self.path(step))

    def remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals have left; the root has to be locked."""
        for step in self.listed():
            if not is_in_use(self.path(step)) and not self._has_metadata(step):
                what = "%s was not finished: removing it, except files that no save has made"
                _log.warning(what, self.path(step))
                self.remove(step)

    def _has_metadata(self, step: int) -> bool:
        """Read anew, while the status of a single name may come from a cache of NFS."""
        try:
            names = storage_at(self.path(step)).list()
        except (FileNotFoundError, NotADirectoryError):
            return False
        # Ranks may have committed there, each for itself.
        return _torch.METADATA_NAME in names or any(map(is_metadata_of_one_rank, names))


@contextmanager
def held(directory: str, *, to_remove: bool = False) -> Iterator[bool]:
    """Hold a step's directory for reading, or alone to remove it; false if another process does.

    The processes of one machine see each other. True also where a file system has no locks.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it is gone, which the caller notices itself
        yield True
        return
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if to_remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            is_ours = True
        except OSError as error:
            is_ours = not isinstance(error, BlockingIOError)
        yield is_ours
    finally:
        os.close(fd)
