"""The directory of a step: its name, whether it is committed, its removal.

``root/step-000000100`` holds the checkpoint of step 100; with parts, ``step-000000100/model`` and
``step-000000100/optimizer`` do.

A step is *committed* when all its parts are: listing and policies count these. Listing reads the
names in ``root`` and asks for the status of one file per part; it opens nothing. A committed step
is *complete* if all its files are there: one is restored only then.
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
from nostall._manager.contents import read_about
from nostall._model.names import is_metadata_of_one_rank
from nostall._storage.deadlines import in_time
from nostall._storage.directories import is_in_use
from nostall._storage.places import identity, is_address, storage_at
from nostall._storage.port import how_to_read
from nostall._storage.reading import open_to_read
from nostall.errors import NostallError, OptionError, ReadError
from nostall.integrity import why_damaged
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

    Args:
        root: An absolute path.
        parts: Names of the directories within a step's; none if a step is one checkpoint.

    Raises:
        OSError: From all methods but :meth:`look`: storage refuses to answer.
    """

    root: str
    parts: tuple[str, ...] = ()

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

    @property
    def is_at_a_step(self) -> bool:
        """Whether the root is the directory of a committed step, or of one with these parts."""
        below = (f"{self.root}/{part}" for part in self.parts)
        is_named = step_of(os.path.basename(self.root)) is not None
        return is_named and any(map(_may_have_metadata, (self.root, *below)))

    @property
    def count(self) -> int:
        """Number of checkpoints of a step."""
        return max(1, len(self.parts))

    def checkpoints(self, step: int) -> list[str]:
        """The checkpoint directories of a step."""
        path = self.path(step)
        return [f"{path}/{part}" for part in self.parts] or [path]

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
        """When the last part of a step was committed; ``None`` if a part is not."""
        places = map(storage_at, self.checkpoints(step))
        try:
            return max(place.stat(_torch.METADATA_NAME).modified_s for place in places)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ReadError:  # something else has its name: a damaged step, not an absent one
            return 0.0

    def manifest_time_s(self, step: int) -> float:
        """When the last part of a committed step was committed, by the clock of its coordinator."""
        return max(map(_manifest_time_s, self.checkpoints(step)))

    def under_other_names(self) -> list[str]:
        """Checkpoints at the root, in it and one level below that are in no step's directory.

        Sorted by path; what this user must not look into is left out.
        """
        found = [self.root] if _may_have_metadata(self.root) else []
        for path in _directories_in(self.root):
            if _may_have_metadata(path):
                found.append(path)
                continue
            # A step whose save was interrupted may have some of its parts.
            own = self.parts if step_of(os.path.basename(path)) is not None else ()
            inside = (each for each in _directories_in(path) if os.path.basename(each) not in own)
            found += filter(_may_have_metadata, inside)
        # Once each, also if links lead there.
        return sorted({identity(path): path for path in sorted(found)}.values())

    def why_damaged(self, step: int) -> str | None:
        """What is wrong with a committed step; ``None`` if all its files have their sizes.

        Raises:
            ReadError: Storage does not answer, or denies access.
        """
        found = map(why_damaged, self.checkpoints(step))
        return next((why for why in found if why is not None), None)

    def what_is_there(self, step: int) -> str | None:
        """What a save of a step would replace, in words; ``None`` if it is not committed."""
        if self.committed_at_s(step) is None:
            return None
        with suppress(NostallError):  # not understood, or not readable at present
            if self.why_damaged(step) is not None:
                return "damaged step"
        return "committed step"

    def remove(self, step: int) -> None:
        """Remove a step, or the rest of one: the metadata of a checkpoint first.

        Files that no save has made stay, and with them the directory.

        Raises:
            WriteError: Storage refused.
        """
        for checkpoint in self.checkpoints(step):
            with suppress(OptionError):  # holds only other files, or is promoted to
                remove_checkpoint(checkpoint)
        if self.parts:
            with suppress(OSError):  # other files are left
                storage_at(self.path(step)).remove_place()

    def remove_unfinished(self) -> None:
        """Remove what interrupted saves and removals have left.

        Not while another process saves below this root.
        """
        for step in self.listed():
            if self._is_unfinished(step):
                self.remove(step)
                if self._is_there(step):
                    what = "it was not finished; files that no save has made stay there"
                    _log.warning("not removed: %s: %s", self.path(step), what)
                else:
                    _log.warning("removed %s: it was not finished", self.path(step))

    def _is_there(self, step: int) -> bool:
        try:
            names = storage_at(self.path(step)).list()
        except FileNotFoundError:
            return False
        return bool(names) or not is_address(self.root)

    def _is_unfinished(self, step: int) -> bool:
        """Whether a checkpoint of a step has no metadata, and the others were saved in these parts.

        A step that a manager with other parts has committed does not count.
        """
        checkpoints = self.checkpoints(step)
        if any(map(is_in_use, checkpoints)):  # another manager of this process is saving it
            return False
        if any(map(_has_metadata_of_ranks, checkpoints)):  # another program has committed it
            return False
        committed = [each for each in checkpoints if _has_metadata(each)]
        return len(committed) < len(checkpoints) and all(
            _parts_at(each) == self.parts for each in committed
        )

    def require_own_parts(self, step: int) -> None:
        """Require that no checkpoint of a step is known to have been saved in other parts.

        Raises:
            OptionError: One was.
        """
        path = self.path(step)
        with suppress(FileNotFoundError, NotADirectoryError):
            for checkpoint in [path, *(f"{path}/{name}" for name in storage_at(path).list())]:
                parts = _parts_at(checkpoint) if _has_metadata(checkpoint) else None
                if parts is not None and parts != self.parts:
                    raise OptionError(
                        f"step {step} was saved with parts={parts}, not {self.parts}",
                        path=checkpoint,
                        hint="pass the same parts, or use another root",
                    )


def _has_metadata(checkpoint: str) -> bool:
    """Whether a checkpoint is committed, by the names in its directory."""
    return _torch.METADATA_NAME in _names_in(checkpoint)


def _manifest_time_s(checkpoint: str) -> float:
    storage = storage_at(checkpoint)
    try:
        with open_to_read(storage, _torch.METADATA_NAME) as stream:
            manifest = manifest_alone(stream)
    except ReadError:  # something else has its name: a damaged step
        return 0.0
    if manifest is None:
        return storage.stat(_torch.METADATA_NAME).modified_s
    return manifest.committed_at_s


def _has_metadata_of_ranks(checkpoint: str) -> bool:
    """Whether ranks have committed there, each for itself."""
    return any(map(is_metadata_of_one_rank, _names_in(checkpoint)))


def _names_in(checkpoint: str) -> list[str]:
    """Read anew, while the status of a single name may come from a cache of NFS."""
    try:
        return storage_at(checkpoint).list()
    except (FileNotFoundError, NotADirectoryError):
        return []


def _may_have_metadata(checkpoint: str) -> bool:
    with suppress(OSError):
        return _has_metadata(checkpoint)
    return False


def _directories_in(path: str) -> list[str]:
    if is_address(path):
        with suppress(OSError):
            return [f"{path}/{name}" for name in storage_at(path).list()]
        return []
    with suppress(OSError), os.scandir(path) as entries:
        return [entry.path for entry in entries if entry.is_dir()]
    return []


def _parts_at(checkpoint: str) -> tuple[str, ...] | None:
    """The parts that a checkpoint was saved with; ``None`` if it does not tell."""
    try:
        about = read_about(checkpoint)
    except (NostallError, FileNotFoundError):  # damaged, unreadable, or removed meanwhile
        return None
    return None if about is None else about.parts


@contextmanager
def held(directory: str, *, to_remove: bool = False) -> Iterator[bool]:
    """Hold a step's directory for reading or removal; false if another process prevents it.

    The processes of one machine see each other. True also where a file system has no locks.

    Args:
        directory: The directory; an object store has no locks.
        to_remove: Hold it alone. Any number of readers can hold it together.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it is gone, which the caller notices itself
        yield True
        return
    try:
        yield _is_locked(fd, fcntl.LOCK_EX if to_remove else fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _is_locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
