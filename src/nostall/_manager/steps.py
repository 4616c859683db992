"""The directory of a step: its name, whether it is committed, its removal.

``root/step-000000100`` holds the checkpoint of step 100; with parts, ``step-000000100/model`` and
``step-000000100/optimizer`` do. A step is committed when all its parts are. Listing reads the names
in ``root`` and asks for the status of one file per part; it opens nothing.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nostall import _torch
from nostall._manager.contents import read_about
from nostall._storage.posix import remove_directory
from nostall.errors import NostallError, OptionError, ReadError
from nostall.integrity import is_complete
from nostall.removal import remove_checkpoint

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
    """

    root: str
    parts: tuple[str, ...] = ()

    def path(self, step: int) -> str:
        """The directory of a step."""
        return f"{self.root}/{name_of(step)}"

    def checkpoints(self, step: int) -> list[str]:
        """The checkpoint directories of a step."""
        path = self.path(step)
        return [f"{path}/{part}" for part in self.parts] or [path]

    def listed(self) -> list[int]:
        """All steps that have a directory, committed or not, in ascending order.

        Raises:
            ReadError: The root exists and cannot be listed.
        """
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable("steps cannot be listed", self.root, error) from error
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def committed(self) -> list[int]:
        """The committed steps, in ascending order."""
        return [step for step in self.listed() if self.committed_at_s(step) is not None]

    def latest(self) -> int | None:
        """The highest committed step."""
        steps = reversed(self.listed())
        return next((step for step in steps if self.committed_at_s(step) is not None), None)

    def committed_at_s(self, step: int) -> float | None:
        """When the last part of a step was committed; ``None`` if a part is not.

        Raises:
            ReadError: Storage does not say.
        """
        latest = 0.0
        for checkpoint in self.checkpoints(step):
            path = f"{checkpoint}/{_torch.METADATA_NAME}"
            try:
                latest = max(latest, os.stat(path).st_mtime)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise _unreadable("a step cannot be examined", path, error) from error
        return latest

    def is_complete(self, step: int) -> bool:
        """Whether all files of a committed step are there, with their sizes."""
        return all(is_complete(checkpoint) for checkpoint in self.checkpoints(step))

    def remove(self, step: int) -> None:
        """Remove a step, or the rest of one: the metadata of a checkpoint first.

        Files that no save has made stay, and with them the directory.

        Raises:
            WriteError: Storage refused.
        """
        for checkpoint in self.checkpoints(step):
            with suppress(OptionError):  # holds nothing but other files
                remove_checkpoint(checkpoint)
        if self.parts:
            with suppress(OSError):  # other files are left
                remove_directory(self.path(step))

    def remove_unfinished(self) -> list[int]:
        """Remove what interrupted saves and removals have left; the steps concerned.

        Not while another process saves below this root.
        """
        left = [step for step in self.listed() if self._is_unfinished(step)]
        for step in left:
            self.remove(step)
        return left

    def _is_unfinished(self, step: int) -> bool:
        """Whether a checkpoint of a step has no metadata, and the others were saved in these parts.

        What a manager with other parts has committed is none of this one's.
        """
        checkpoints = self.checkpoints(step)
        committed = [each for each in checkpoints if _has_metadata(each)]
        return len(committed) < len(checkpoints) and all(
            _parts_at(each) == self.parts for each in committed
        )

    def require_own_parts(self, step: int) -> None:
        """Require that no checkpoint of a step is known to have been saved in other parts.

        Raises:
            OptionError: One was.
            ReadError: Storage does not say.
        """
        path = self.path(step)
        with suppress(FileNotFoundError, NotADirectoryError):
            for checkpoint in [path, *(f"{path}/{name}" for name in os.listdir(path))]:
                parts = _parts_at(checkpoint) if _has_metadata(checkpoint) else None
                if parts is not None and parts != self.parts:
                    raise OptionError(
                        f"step {step} was saved with parts={parts}, not {self.parts}",
                        path=checkpoint,
                        hint="pass the same parts, or use another root",
                    )


def _has_metadata(checkpoint: str) -> bool:
    """Whether a checkpoint is committed, by the names in its directory.

    They are read anew, while the status of a single name may come from a cache of NFS.
    """
    try:
        return _torch.METADATA_NAME in os.listdir(checkpoint)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable("a step cannot be examined", checkpoint, error) from error


def _parts_at(checkpoint: str) -> tuple[str, ...] | None:
    """The parts that a checkpoint was saved with; ``None`` if it does not tell."""
    try:
        about = read_about(checkpoint)
    except (NostallError, FileNotFoundError):  # damaged, unreadable, or removed meanwhile
        return None
    return None if about is None else about.parts


def _unreadable(what: str, path: str, error: OSError) -> ReadError:
    return ReadError(
        f"{what}: {error.strerror}",
        errno=error.errno,
        phase="read",
        path=path,
        hint="try again when storage answers",
    )


@contextmanager
def held(directory: str, *, to_remove: bool = False) -> Iterator[bool]:
    """Hold a step's directory for reading or removal; false if another process prevents it.

    The processes of one machine see each other. True also where a file system has no locks.

    Args:
        directory: The directory.
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


def require_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """The names of the parts.

    Raises:
        OptionError: A name is not that of a directory, or occurs twice.
    """
    names = (parts,) if isinstance(parts, str) else tuple(parts)
    for name in names:
        if os.sep in name or name.startswith(".") or not name:
            raise OptionError(f"the part {name!r} is not possible", hint="use names of directories")
    if len(set(names)) != len(names):
        raise OptionError(f"parts={names!r} has a name twice", hint="name each part once")
    return names
