"""The checkpoints in a directory, and their state, by metadata and file sizes.

No torch, unless a checkpoint has no manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from nostall._cli.arguments import NotThere
from nostall._commit.manifest import Manifest, manifest_of
from nostall._model.names import (
    METADATA_NAME,
    OF_FILE_SYSTEM,
    is_metadata_of_one_rank,
    is_ours_to_remove,
    order_of_commit,
    step_in,
)
from nostall._model.wording import counted
from nostall._storage.destination import place_of
from nostall._storage.places import is_address, storage_at
from nostall._storage.port import Files, Stat, leaves_open, reason
from nostall._storage.reading import open_to_read
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    ReadError,
    UnknownMetadataError,
)


class State(str, Enum):
    """State of a checkpoint directory."""

    COMPLETE = "complete"
    """Committed, and every file has its size; ``verify`` reads the bytes."""
    DAMAGED = "damaged"
    UNFINISHED = "not committed"
    """Files without metadata: a save that is under way, or was interrupted."""
    PER_RANK = "per rank"
    """Ranks saved without coordination, each with metadata of its own."""
    NOT_UNDERSTOOD = "not understood"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint directory."""

    path: str
    name: str
    """The path below the directory that was listed."""
    state: State
    nbytes: int
    """Bytes in its files."""
    files: int
    """Number of shard files."""
    at_s: float
    """When it was committed, in seconds since the epoch; or its last change."""
    manifest: bool
    """Whether nostall has committed it."""
    link: str | None = None
    """Where a symbolic link leads that has this path; ``None`` for a directory."""

    @property
    def step(self) -> int | None:
        """The number at the end of the name, as in ``step-100`` or ``step=100.ckpt``."""
        return step_in(self.name)

    @property
    def order(self) -> tuple[float, bool, int, str]:
        """As ``latest`` orders checkpoints."""
        return order_of_commit(self.path, self.at_s, is_link=self.link is not None)

    @property
    def is_inside(self) -> bool:
        """Whether it is a part of a step, or one of another root: ``latest`` does not see it."""
        return os.sep in self.name


def list_checkpoints(root: str) -> list[Listed]:
    """The checkpoints that are subdirectories of ``root``, oldest first; not behind links.

    A subdirectory that is not a checkpoint may hold checkpoints, such as the parts
    ``step-100/model`` and ``step-100/optimizer``.

    Raises:
        NotThere: ``root`` does not exist.
        ReadError: It cannot be read, a symbolic link in its path is broken, or its bucket does not
            exist.
        OptionError: It is a file.
    """
    require_no_file(root)
    try:
        paths = _directories_in(root)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        if is_absent and not is_address(root):
            raise NotThere(f"{root}: {why_not_there(root)}") from error
        raise ReadError(
            f"cannot list checkpoints: {reason(error)}",
            errno=error.errno,
            path=root,
            hint=f"check the {'address' if is_address(root) else 'path'}, and the right to list it",
        ) from error
    found = [each for path in paths for each in _at_or_in(path)]
    return sorted(found, key=lambda each: each.order)


def list_links(root: str) -> list[Listed]:
    """The checkpoints directly behind symbolic links in ``root``, as ``latest`` follows them."""
    if is_address(root):
        return []
    with os.scandir(root) as entries:
        links = [entry.path for entry in entries if entry.is_symlink()]
    found = ((path, look_at(path)) for path in links)
    return [replace(each, link=os.readlink(path)) for path, each in found if each is not None]


def _directories_in(path: str) -> list[str]:
    if is_address(path):
        return [f"{path}/{name}" for name in storage_at(path).list() if name != METADATA_NAME]
    with os.scandir(path) as entries:
        return [
            entry.path
            for entry in entries
            if entry.is_dir(follow_symlinks=False) and entry.name != OF_FILE_SYSTEM
        ]


def _at_or_in(path: str) -> list[Listed]:
    itself = look_at(path)
    if itself is not None:
        return [itself]
    try:
        parts = map(look_at, _directories_in(path))
    except OSError as error:
        return [_unreadable(path)] if leaves_open(error) else []
    name = os.path.basename(path)
    return [replace(each, name=f"{name}/{each.name}") for each in parts if each is not None]


def _unreadable(path: str) -> Listed:
    """A directory that this user must not look into; it may hold a checkpoint."""
    return Listed(
        path=path,
        name=os.path.basename(path),
        state=State.UNREADABLE,
        nbytes=0,
        files=0,
        at_s=0.0 if is_address(path) else os.lstat(path).st_mtime,
        manifest=False,
    )


def require_no_file(path: str) -> None:
    """Require that a path, if it exists, is that of a directory; an address always is.

    Raises:
        OptionError: The path is that of a file.
        ReadError: A symbolic link in it is broken, as that to a volume that is not mounted is.
    """
    if is_address(path):
        return
    require_no_broken_link(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise OptionError("not a directory", path=path)


def require_no_broken_link(path: str) -> None:
    """Require that no symbolic link in a path leads nowhere: it stands for something.

    Raises:
        ReadError: One does.
    """
    if os.path.exists(path):
        return
    whole = Path(os.path.abspath(path))
    for each in (whole, *whole.parents):
        if each.is_symlink() and not each.exists():
            raise ReadError(
                f"the symbolic link {each} is broken",
                path=path,
                hint=f"mount or make {os.readlink(each)}, or remove the link",
            )


def require_no_checkpoint(root: str) -> None:
    """Require that a directory without checkpoints in it is not a checkpoint itself.

    Raises:
        OptionError: It is.
    """
    itself = look_at(place_of(root))
    if itself is not None and itself.state is not State.UNFINISHED:
        raise OptionError(
            "it is a checkpoint itself", path=root, hint="pass the directory that holds it"
        )


def why_not_there(path: str) -> str:
    """Why there is no checkpoint at a path, for messages."""
    is_there = is_address(path) or os.path.isdir(path)
    return "no checkpoint was committed here" if is_there else "no such directory"


def elsewhere(path: str) -> str:
    """Where checkpoints are if a command found none at ``path``, for its message; maybe empty."""
    itself = look_at(place_of(path))
    if itself is not None and itself.state is State.UNFINISHED:
        return "; it has files of a save that is under way or was interrupted"
    try:
        below = list_checkpoints(path)
    except (NotThere, NostallError):
        return ""
    if not below:
        return ""
    last = f"the last {below[-1].path} ({below[-1].state.value})"
    return f"; below it: {counted(len(below), 'checkpoint')}, {last}"


def linked_from(root: str) -> set[str]:
    """The real paths that symbolic links in ``root`` lead to."""
    if is_address(root):
        return set()
    with os.scandir(root) as entries:
        return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}


def look_at(path: str) -> Listed | None:
    """The state of one directory; ``None`` if it is not a checkpoint's, or gone."""
    storage = storage_at(path)
    try:
        entries = storage.list()
        shards = list(filter(is_ours_to_remove, entries))
        committed = METADATA_NAME in entries
        if not committed and not shards:
            return None
        stats = _stats_of(storage, entries)
        if METADATA_NAME in stats:
            at_s = stats[METADATA_NAME].modified_s
        elif is_address(path):
            at_s = max((each.modified_s for each in stats.values()), default=0.0)
        else:
            at_s = os.stat(path).st_mtime
    except OSError:
        return None
    nbytes = sum(each.nbytes for each in stats.values())
    manifest = None
    if committed:
        state, manifest = _state_of_committed(path)
    elif any(map(is_metadata_of_one_rank, entries)):
        state = State.PER_RANK
    else:
        state = State.UNFINISHED
    return Listed(
        path=path,
        name=os.path.basename(path),
        state=state,
        nbytes=nbytes,
        files=len(shards if manifest is None else manifest.files),
        at_s=at_s if manifest is None else manifest.committed_at_s,
        manifest=manifest is not None,
    )


def _stats_of(files: Files, names: Iterable[str]) -> dict[str, Stat]:
    """What storage knows of the files among these names."""
    found = {}
    for name in names:
        with suppress(FileNotFoundError, ReadError):  # a directory, or removed meanwhile
            found[name] = files.stat(name)
    return found


def _state_of_committed(path: str) -> tuple[State, Manifest | None]:
    files = storage_at(path)
    manifest = None
    try:
        with open_to_read(files, METADATA_NAME) as stream:
            manifest = manifest_of(stream, path=path)
        if manifest is None:
            from nostall.integrity import is_complete

            whole = is_complete(path)
        else:
            whole = _have_sizes(files, manifest)
    except DamagedCheckpointError:
        return State.DAMAGED, None
    except UnknownMetadataError:
        return State.NOT_UNDERSTOOD, None
    except OSError:
        return State.UNREADABLE, manifest
    return State.COMPLETE if whole else State.DAMAGED, manifest


def is_complete_by_manifest(path: str) -> bool:
    """Whether a checkpoint has a manifest and is complete; torch is imported if it has none."""
    state, manifest = _state_of_committed(path)
    return manifest is not None and state is State.COMPLETE


def _have_sizes(files: Files, manifest: Manifest) -> bool:
    try:
        return all(files.stat(file.name).nbytes == file.nbytes for file in manifest.files)
    except FileNotFoundError:
        return False


def newest_complete(checkpoints: Iterable[Listed]) -> Listed | None:
    """The last committed complete checkpoint directly in the directory, as ``latest`` prints it."""
    complete = (each for each in checkpoints if each.state is State.COMPLETE)
    return max(
        (each for each in complete if not each.is_inside), key=lambda each: each.order, default=None
    )
