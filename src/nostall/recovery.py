"""Recovery: commit a save whose trainer died, from the completion records of its ranks.

>>> writer = nostall.FileSystemWriterAsync("run/step-100", linger_s=120)
>>> ...  # a split save; the trainer is killed while it is written
>>> nostall.recover("run/step-100", wait_s=120)  # the next job does, on one rank, before it loads
Recovery(path='/run/step-100', state=<RecoveryState.COMMITTED: 'committed'>, missing_ranks=())
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from nostall import _torch
from nostall._engine import default_engine
from nostall._save.recovering import (
    CompleteSave,
    Found,
    commit,
    discard,
    is_committed,
    is_of_the_past,
    is_superseded,
    is_under_way,
    read_save,
    records_among,
    require_files,
)
from nostall._storage.destination import place_of
from nostall._storage.places import storage_at
from nostall._storage.port import Storage, how_to_read, reason
from nostall.errors import DamagedCheckpointError, NostallError, OptionError, ReadError
from nostall.options import is_possible_wait

__all__ = ["Recovery", "RecoveryState", "recover"]

_log = logging.getLogger("nostall")
_LOOK_AGAIN_S = (0.05, 2.0)
"""The first pause between two looks, and the longest one."""


class RecoveryState(str, Enum):
    """Result of a recovery."""

    COMMITTED = "committed"
    """The checkpoint of a save whose trainer had died is committed."""
    INCOMPLETE = "incomplete"
    """Files of a save are there, but not those of all ranks. Nothing was changed."""
    NOTHING = "nothing to recover"
    """There are no such files; or a later save is committed, and they are removed."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What :func:`recover` has found and done."""

    path: str
    state: RecoveryState
    missing_ranks: tuple[int, ...] = ()
    """The ranks whose files are not known to be complete, if any rank has left a record."""


def recover(path: str | os.PathLike[str], *, wait_s: float = 0.0) -> Recovery:
    """Commit the last save to a directory that all ranks have finished after their trainer's death.

    Saves with ``linger_s`` can be recovered. Call it on one rank of a job that does not save there
    yet; :meth:`nostall.CheckpointManager.restore` does so with ``recover_s``. What is committed is
    what the save would have committed. A checkpoint that was committed since that save began is
    never replaced.

    Args:
        path: Checkpoint directory, or an address in an object store.
        wait_s: How long to wait for writer processes that may still be at work, in seconds: the
            ``linger_s`` of the save. It returns at once if the directory does not exist, or holds a
            checkpoint and nothing else.

    Raises:
        DamagedCheckpointError: All ranks have finished, but a file or a record is not as it was
            written.
        UntrustedMetadataError: A record does not hold DCP metadata.
        IncompleteSaveError: The ranks have not written all that the metadata names.
        ReadError: Storage refuses to answer.
        WriteError: The metadata could not be published.
        OptionError: An argument is not possible.
    """
    if not is_possible_wait(wait_s):
        raise OptionError(f"wait_s={wait_s!r} is not possible", hint="use seconds")
    directory = place_of(path)
    with _readable(directory):
        storage = storage_at(directory)
        found = _await_a_complete_save(storage, time.monotonic() + wait_s)
        if found is None:
            return Recovery(directory, RecoveryState.NOTHING)
        complete = [each for each in found if each.is_complete]
        if complete:
            return Recovery(directory, _recover(storage, complete))
        return _without_complete(storage, found)


def _recover(storage: Storage, complete: list[Found]) -> RecoveryState:
    saves = _readable_ones(storage, complete)
    newest, *older = sorted(saves, key=lambda save: save.began_s, reverse=True)
    path = storage.where()
    is_over = is_committed(storage, newest)
    if not is_over and is_superseded(storage, newest):
        _log.warning("not recovered, as a later save is committed: path=%s", path)
        discard(storage, [each.found for each in saves])
        return RecoveryState.NOTHING
    if not is_over:
        commit(storage, newest, default_engine())
        _log.warning("recovered: path=%s: its trainer had died before the commit", path)
    discard(storage, [newest.found, *(each.found for each in older)])
    return RecoveryState.COMMITTED


def _readable_ones(storage: Storage, complete: list[Found]) -> list[CompleteSave]:
    """The saves whose records and files can be read; at least one.

    Raises:
        DamagedCheckpointError, OSError: None can.
    """
    saves: list[CompleteSave] = []
    first: DamagedCheckpointError | OSError | None = None
    for each in complete:
        try:
            save = read_save(storage, each)
            # A later save may have removed files of an earlier one, and not its records.
            if not (is_committed(storage, save) or is_superseded(storage, save)):
                require_files(storage, save)
            saves.append(save)
        except (DamagedCheckpointError, OSError) as error:
            _log.warning("a save cannot be recovered: %s", error)
            first = first or error
    if not saves:
        assert first is not None
        raise first
    return saves


def _without_complete(storage: Storage, found: list[Found]) -> Recovery:
    """The result for incomplete saves; records of those that a later commit supersedes go."""
    old = [each for each in found if is_of_the_past(storage, each)]
    discard(storage, old)
    waiting = [each for each in found if each not in old]
    if old and not waiting:
        return Recovery(storage.where(), RecoveryState.NOTHING)
    missing = min((each.missing for each in waiting), key=len, default=())
    return Recovery(storage.where(), RecoveryState.INCOMPLETE, missing)


def _await_a_complete_save(storage: Storage, deadline_s: float) -> list[Found] | None:
    """The saves that have left records, once one is complete or it is late.

    ``None`` if no file is of a save that is not committed.
    """
    pause_s, longest_s = _LOOK_AGAIN_S
    while True:
        try:
            names = storage.list()
        except (FileNotFoundError, NotADirectoryError):
            return None
        found, left_s = records_among(names), deadline_s - time.monotonic()
        is_last_look = left_s <= 0 or any(each.is_complete for each in found)
        if is_last_look or _torch.METADATA_NAME in names:
            is_begun = bool(found) or is_under_way(storage)
            if is_last_look or not is_begun:
                return found if is_begun else None
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)


@contextmanager
def _readable(directory: str) -> Iterator[None]:
    try:
        yield
    except NostallError:
        raise
    except OSError as error:
        raise ReadError(
            f"the records of saves cannot be read: {reason(error)}",
            errno=error.errno,
            phase="recover",
            path=error.filename or directory,
            hint=how_to_read(error),
        ) from error
