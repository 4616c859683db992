"""Verification of checkpoints, by their manifest or by the checksums that ``torch.save`` stores.

These functions only read: they change no file, and execute nothing that they read (metadata goes
through an allow-list). Checkpoints with a manifest need torch only if every byte is compared.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from nostall._commit.checking import (
    Damage,
    damage_by,
    look_at,
    read_inventory,
    require_answers,
    size_of,
)
from nostall._commit.commit import committed_latest_first, why_no_checkpoint
from nostall._model.checksum import use_fastest
from nostall._model.names import METADATA_NAME, counted, is_metadata_of_one_rank
from nostall._model.progress import ReadCounter
from nostall._storage.locations import is_address, place_of, require_possible, storage_at
from nostall._storage.port import Files, Version, reason
from nostall.errors import (
    DamagedCheckpointError,
    OptionError,
    ReadError,
    UnknownMetadataError,
    UntrustedMetadataError,
)

__all__ = ["Damage", "State", "Verification", "is_complete", "latest_complete", "verify"]

_log = logging.getLogger("nostall")
_THREADS = 8
_ATTEMPTS = 3
"""How often a checkpoint is looked at that saves replace meanwhile."""


class State(str, Enum):
    """Result of the verification of a checkpoint."""

    WHOLE = "whole"
    """It is as it was written, as far as there are checksums."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """Storage does not let some of it be read, and the rest is as it was written; or saves have
    replaced it again and again."""
    NOT_UNDERSTOOD = "not understood"
    """It has no manifest, and metadata with parts that this nostall and this torch do not know."""
    NOT_THERE = "not there"
    """No checkpoint was committed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Findings of :func:`verify`."""

    path: str
    state: State
    note: str | None = None
    """The missing file, or the part of the metadata that is not understood. In the latter case
    files with a manifest are compared nevertheless, without the names of their items."""
    damages: tuple[Damage, ...] = ()
    files: int = 0
    """Number of shard files examined."""
    nbytes: int = 0
    """Bytes in these files."""
    items: int = 0
    unchecked: tuple[str, ...] = ()
    """Names of items without any checksum; names of files whose items are not known."""
    has_manifest: bool = False
    """Whether files were compared with a manifest, or items with the checksums inside them."""

    @property
    def ok(self) -> bool:
        """Whether the checkpoint exists and is undamaged, as far as there are checksums."""
        return self.state is State.WHOLE


def _path_of(path: str | os.PathLike[str]) -> str:
    """The path, or the address in its shortest form."""
    require_possible(path)
    text = os.fspath(path)
    return place_of(text) if is_address(text) else text


def is_complete(path: str | os.PathLike[str], deep: bool = False) -> bool:
    """Whether a directory holds a complete, committed checkpoint.

    With a manifest, this checks the manifest, the checksum of the metadata and the sizes of the
    files; the metadata need not be understood.

    Args:
        path: Checkpoint directory, or an address in an object store.
        deep: Compare every byte with its checksum, see :func:`verify`. By default only the metadata
            and the sizes of the files are checked, which takes milliseconds.

    Raises:
        UnknownMetadataError: There is no manifest, and the metadata is not understood: a newer
            torch or a planner with its own classes may have written it.
        OptionError: The path is empty, or the client of an object store is missing.
    """
    return why_incomplete(_path_of(path), deep=deep) is None


def why_incomplete(
    directory: str, *, deep: bool = False, progress: Callable[[int, int], object] | None = None
) -> str | None:
    """The reason that a checkpoint is not complete; ``None`` if it is.

    Raises:
        UnknownMetadataError: As :func:`is_complete`.
    """
    found = _examined(directory, _THREADS, progress, deep=deep)
    what = [str(damage) for damage in found.damages]
    return None if found.ok else ", ".join(what) or found.note or found.state.value


def why_damaged(
    directory: str, *, deep: bool = False, progress: Callable[[int, int], object] | None = None
) -> str | None:
    """The reason that a checkpoint is damaged; storage that does not answer is no reason.

    Raises:
        UnknownMetadataError: As :func:`is_complete`.
        ReadError: Storage does not answer, or denies access.
    """
    why = why_incomplete(directory, deep=deep, progress=progress)
    if why is None:
        return None
    require_answers(directory)
    # Storage may have been away at the first look; reading every byte again would take too long.
    return why if deep else why_incomplete(directory)


def latest_complete(root: str | os.PathLike[str], deep: bool = False) -> str | None:
    """The last committed complete checkpoint among the directories in ``root``, or ``None``.

    Of several with the same time, such as copies, it is the one with the highest number at the end
    of its name. ``None`` also if ``root`` does not exist. Directories that hold other things, or a
    checkpoint that is not complete or not understood, are skipped; a warning names those that are
    newer than the result.

    Args:
        root: Directory of checkpoint directories, or an address in an object store.
        deep: As for :func:`is_complete`.

    Raises:
        UnknownMetadataError: No checkpoint is known to be complete, and one is not understood: a
            job that starts from scratch might lose it.
        ReadError: ``root`` is not a directory, or cannot be read; or no checkpoint is known to be
            complete, and one cannot be read at present.
        OptionError: ``root`` is a checkpoint itself, or is empty; or the client of an object store
            is missing.
    """
    unknown: list[UnknownMetadataError | ReadError] = []
    place = _path_of(root)
    for path in committed_latest_first(place):
        try:
            why = why_damaged(path, deep=deep)
            if why is None:
                return path
            _log.warning("skipped %s: the checkpoint is damaged: %s", path, why)
        except (UnknownMetadataError, ReadError) as error:
            _log.warning("skipped %s: %s", path, error.message)
            unknown.append(error)
    if unknown:
        newest = unknown[0]
        raise type(newest)(
            f"no complete checkpoint is known, and {counted(len(unknown), 'checkpoint')} cannot be"
            f" read or understood; the newest: {newest.message}",
            phase="read",
            path=newest.path,
            hint=newest.hint,
        ) from newest
    require_no_checkpoint(place)
    return None


def require_no_checkpoint(root: str) -> None:
    """Refuse a checkpoint: a job that starts from scratch would save over it, or beside it.

    It may be one of ranks that have saved alone.

    Raises:
        OptionError: It is one.
        ReadError: Storage does not tell.
    """
    files = storage_at(root)
    try:
        if not any(map(is_metadata_of_one_rank, files.list())):
            files.stat(METADATA_NAME)
    except (FileNotFoundError, NotADirectoryError, ReadError):  # the last: not a regular file
        return
    except OSError as error:
        raise ReadError(
            f"cannot look for a checkpoint: {reason(error)}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="look again when storage answers",
        ) from error
    raise OptionError(
        "this is a checkpoint itself", path=root, hint="pass the directory that holds it"
    )


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int = _THREADS,
    progress: Callable[[int, int], object] | None = None,
) -> Verification:
    """Read a whole checkpoint and report any damage.

    nostall's checkpoints have a manifest, unless a user's stream wrote them; it covers every bit of
    the shard files and the metadata. Without a manifest, as with stock DCP, files and the records
    inside them are checked against the sizes and CRC-32 sums that ``torch.save`` stores; this does
    not detect two exchanged files of the same layout.

    If there is damage, and a save has replaced the checkpoint meanwhile, the new one is verified,
    and ``progress`` begins anew. One that is replaced three times in a row is ``UNREADABLE``.

    Args:
        path: Checkpoint directory, or an address in an object store.
        threads: Number of files to read at a time.
        progress: Called with bytes read and bytes to read, from any thread.

    Returns:
        The findings; the content of the checkpoint never raises.

    Raises:
        OptionError: The path is empty, or the client of an object store is missing.
    """
    directory = _path_of(path)
    try:
        return _examined(directory, threads, progress, deep=True)
    except UnknownMetadataError as error:
        return Verification(path=directory, state=State.NOT_UNDERSTOOD, note=error.message)


def _examined(
    directory: str, threads: int, progress: Callable[[int, int], object] | None, *, deep: bool
) -> Verification:
    """The findings, those of another look if a save has replaced the checkpoint meanwhile.

    Unless ``deep``, without items, and with the sizes of files up to the first that is wrong.
    ``UnknownMetadataError`` if the metadata is not understood.
    """
    files = storage_at(directory)
    for _ in range(_ATTEMPTS):
        version = _version_of(files)
        found = _seen(files, threads, progress, deep=deep)
        if found.ok or _version_of(files) == version:
            return found
    again = Damage(file=METADATA_NAME, what="replaced whenever it was read", is_certain=False)
    return Verification(path=files.where(), state=State.UNREADABLE, damages=(again,))


def _version_of(files: Files) -> Version | None:
    """The version of the metadata; ``None`` if there is none, or storage does not answer."""
    with suppress(OSError):
        return files.stat(METADATA_NAME).version
    return None


def _seen(
    files: Files, threads: int, progress: Callable[[int, int], object] | None, *, deep: bool
) -> Verification:
    """The findings of one look, for :func:`_examined`."""
    directory = files.where()
    try:
        inventory = read_inventory(files, with_items=deep)
    except (FileNotFoundError, NotADirectoryError):
        # Only a deep look may take the time to search below the directory.
        note = why_no_checkpoint(directory) if deep else "no checkpoint was committed here"
        return Verification(path=directory, state=State.NOT_THERE, note=note)
    except UnknownMetadataError:
        raise
    except (OSError, DamagedCheckpointError, UntrustedMetadataError) as error:
        damage = damage_by(error, METADATA_NAME)
        return Verification(path=directory, state=_state_with([damage]), damages=(damage,))
    sizes = []
    for file in inventory.files:
        sizes.append((file, *size_of(files, file)))
        if not deep and sizes[-1][-1] is not None:
            break
    whole = [(file, nbytes) for file, nbytes, damage in sizes if deep and damage is None]
    if deep:
        use_fastest()
    counter = ReadCounter(sum(nbytes for _, nbytes in whole), progress)
    with ThreadPoolExecutor(max(1, threads), "nostall-verify") as pool:
        looked_at = list(pool.map(lambda each: look_at(files, each[0], counter.add), whole))
    found = [damage for _, _, damage in sizes if damage is not None]
    found += [each.damage for each in looked_at if each.damage is not None]
    unchecked = [item for each in looked_at for item in each.unchecked]
    written_as_archives = any(each.archives for each in looked_at)
    for each in looked_at:
        if not each.strangers:
            continue
        if written_as_archives:
            # The planner writes archives, so these were overwritten from end to end.
            what = "contains an overwritten archive"
            found.append(Damage(file=each.file, what=what, items=each.strangers))
        else:
            unchecked += each.strangers
    return Verification(
        path=directory,
        state=_state_with(found),
        note=inventory.note,
        damages=tuple(found),
        files=len(sizes),
        nbytes=sum(nbytes for _, nbytes, _ in sizes),
        items=inventory.items,
        unchecked=tuple(unchecked),
        has_manifest=inventory.has_manifest,
    )


def _state_with(damages: Sequence[Damage]) -> State:
    if any(damage.is_certain for damage in damages):
        return State.DAMAGED
    return State.UNREADABLE if damages else State.WHOLE
