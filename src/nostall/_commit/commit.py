"""How a save ends on the coordinator: a verdict on all ranks' reports, then the commit.

A commit publishes the metadata of a save whose files are all complete and, unless files are not
synced, durable. Only after it the files of the replaced checkpoint can be removed. What has been
committed is found by its metadata: :func:`committed_latest_first`.

Imports no torch.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import Any, TypeAlias

from nostall._commit.manifest import manifest_alone
from nostall._model.names import (
    METADATA_NAME,
    OF_FILE_SYSTEM,
    counted,
    is_metadata_of_one_rank,
    is_ours_to_remove,
    order_of_commit,
    some,
)
from nostall._storage.locations import is_address, storage_at, why_no_directory
from nostall._storage.port import (
    Conflict,
    Storage,
    leaves_open,
    may_have,
    open_to_read,
    reason,
    version_of,
)
from nostall.errors import (
    IncompleteSaveError,
    NotDurableError,
    RankMismatchError,
    ReadError,
    WriteError,
)

_log = logging.getLogger("nostall")


def failures_in(outcomes: Sequence[Any]) -> dict[int, Any]:
    """The failures of ranks, by rank; a save is committed only if there are none.

    ``outcomes`` are, in rank order, write results or failures, the latter tuples of DCP's form.
    """
    return {rank: each for rank, each in enumerate(outcomes) if isinstance(each, tuple)}


def require_one_result_each(
    planned: Iterable[Hashable], results: Iterable[Hashable], *, rank: int | None = None
) -> None:
    """Raise ``IncompleteSaveError`` unless a rank reports exactly one result per planned item."""
    wanted, got = Counter(planned), Counter(results)
    if wanted == got:
        return
    missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
    raise IncompleteSaveError(
        f"planned items without a result: {len(missing)}; unplanned results: {len(extra)}:"
        f" {[str(index) for index in (*missing, *extra)[:3]]}",
        rank=rank,
        phase="collect",
        hint="nothing was committed; a planner of your own may use an index twice",
    )


def require_all_present(planned: Iterable[Hashable], results: Iterable[Hashable]) -> None:
    """Raise ``IncompleteSaveError`` unless ranks have written exactly the metadata's items."""
    named, written = set(planned), set(results)
    for strangers, what in (
        (named - written, "of the checkpoint not written by any rank"),
        (written - named, "written, but not in the checkpoint's metadata"),
    ):
        if strangers:
            raise IncompleteSaveError(
                f"{counted(len(strangers), 'item')} {what}: {sorted(map(str, strangers))[:3]}",
                phase="collect",
                hint="nothing was committed; the next save plans again",
            )


def require_one_save(saves: Sequence[Hashable], *, rank: int | None = None, path: str) -> None:
    """Raise ``RankMismatchError`` if two ranks finalise different saves to the directory ``path``.

    ``saves`` identify each rank's save, ``None`` where it is not known; ``rank`` is the
    coordinator.
    """
    if len(set(saves) - {None}) > 1:  # found in a fraction of the time of the lists below
        ranks: dict[Hashable, list[int]] = defaultdict(list)
        for number, save in enumerate(saves):
            if save is not None:
                ranks[save].append(number)
        first, second, *_ = ranks.values()
        raise RankMismatchError(
            f"ranks finalise {len(ranks)} different saves to this directory, for example ranks"
            f" {first[:8]} one and ranks {second[:8]} another",
            rank=rank,
            phase="collect",
            path=path,
            hint="abort a save on all ranks; nothing was committed, and the next save plans again",
        )


def require_one_directory(
    directories: Sequence[str | None],
    mine: str,
    *,
    rank: int | None = None,
    is_same: Callable[[str, str], bool],
) -> None:
    """Raise ``RankMismatchError`` if a rank has written to another directory than the coordinator.

    ``directories`` are by rank, ``None`` where not known; ``mine`` is the coordinator's.
    ``is_same`` says whether two paths lead to one directory, as seen by the coordinator, which is
    ``rank``.
    """
    elsewhere: dict[str, list[int]] = defaultdict(list)
    for number, directory in enumerate(directories):
        if directory is not None and directory != mine:
            elsewhere[directory].append(number)
    strangers = {path: ranks for path, ranks in elsewhere.items() if not is_same(path, mine)}
    if strangers:
        path, ranks = next(iter(strangers.items()))
        raise RankMismatchError(
            f"ranks save to {len(strangers) + 1} different directories:"
            f" ranks {ranks[:8]} to {path}",
            rank=rank,
            phase="collect",
            path=mine,
            hint="choose the path on one rank and broadcast it; nothing was committed",
        )


def commit(
    storage: Storage,
    metadata: Sequence[bytes],
    *,
    metadata_name: str,
    replaced_files: Iterable[str],
    at: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Publish a checkpoint, all of whose files are complete.

    ``metadata`` is the content of the metadata file, in pieces. Its name is ``.metadata``, or a
    rank's own for saves without coordination. ``at`` is called before the metadata is written
    (``"commit"``) and before it is published (``"publish"``); it may raise an error of storage.
    Returns ``replaced_files``, for the caller to remove: the names that are unreferenced after
    publishing, iterated only then; none if they cannot be determined.

    ``NotDurableError``: the checkpoint exists, or may exist, but may not survive a power failure.
    ``WriteError``: any other failure; the previous checkpoint is unchanged.
    """
    try:
        at("commit")
        storage.publish(
            metadata_name,
            metadata,
            # Of two saves at once, the second one must see the first.
            expected=version_of(storage.stat, metadata_name)
            if storage.publishes_conditionally
            else None,
            before=lambda: at("publish"),
        )
    except NotDurableError:
        raise
    except Exception as error:
        hint = "the previous checkpoint, if there was one, is untouched"
        if isinstance(error, Conflict):
            hint = "the other save's checkpoint stays; let one job save to a directory"
        elif isinstance(error, FileNotFoundError):
            hint = "another process has removed files of this save; let one job save to a directory"
        raise WriteError(
            f"the metadata could not be published: {reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=storage.where(metadata_name),
            hint=hint,
        ) from error
    try:
        return tuple(replaced_files)
    except Exception:  # the checkpoint exists, so the save has succeeded
        where = storage.where()
        _log.exception("files of the replaced checkpoint cannot be determined: path=%s", where)
        return ()


# --- the committed checkpoints in a directory or below an address ---------------------------------

_THREADS = 8
_SHOWN, _MOST_SEARCHED = 3, 1000
Order: TypeAlias = tuple[float, bool, int, str]


def committed_latest_first(root: str) -> list[str]:
    """The directories in ``root`` with a metadata file, last committed first; also behind links.
    ``ReadError`` if ``root`` is not a directory, or cannot be read.
    """
    return _committed_of(directories_in(root))


def directories_in(root: str) -> list[str]:
    """The directories and links in ``root``; all that is below an address; none if it is absent.
    ``ReadError`` if it is not a directory, or cannot be read.
    """
    try:
        if is_address(root):
            return [f"{root}/{name}" for name in storage_at(root).list() if name != METADATA_NAME]
        with os.scandir(root) as entries:
            found = [each for each in entries if each.is_symlink() or each.is_dir()]
        return [each.path for each in found if each.name != OF_FILE_SYSTEM]
    except OSError as error:
        is_file = isinstance(error, NotADirectoryError)
        # If the path does not exist, the file is in place of a directory above it.
        is_absent = isinstance(error, FileNotFoundError) or (is_file and not os.path.lexists(root))
        if is_absent and not is_address(root):
            return []
        raise ReadError(
            f"cannot list checkpoints: {reason(error)}",
            errno=error.errno,
            phase="read",
            path=root,
            hint="pass the parent directory of the checkpoint directories"
            if is_file
            else "check that it exists and may be listed",
        ) from (None if is_file else error)


def _committed_of(paths: Iterable[str]) -> list[str]:
    """The directories with a metadata file, last committed first."""
    below = list(paths)
    if any(map(is_address, below)):  # each takes requests
        with ThreadPoolExecutor(_THREADS, "nostall-latest") as pool:
            candidates = list(pool.map(_candidate, below))
    else:  # starting a thread takes longer
        candidates = list(map(_candidate, below))
    found = [each for each in candidates if each is not None]
    return [path for _, path in sorted(found, reverse=True)]


def _candidate(path: str) -> tuple[Order, str] | None:
    """A directory with its place in the order; ``None`` if it has no metadata file."""
    if is_address(path):
        has_metadata = may_have(storage_at(path), METADATA_NAME)
    else:
        has_metadata = _may_be_file(f"{path}/{METADATA_NAME}")
    if not has_metadata:
        return None
    at_s = _committed_at_s(path) or inf  # unknown: looked at first, so that it is named
    return order_of_commit(path, at_s, is_link=os.path.islink(path)), path


def why_no_checkpoint(path: str) -> str:
    """The reason that a place has no checkpoint to read, with :func:`found_instead`."""
    if is_address(path) or os.path.isdir(path):
        return f"no checkpoint was committed here{found_instead(path)}"
    if os.path.exists(path):
        return "a file, not the directory of a checkpoint"
    in_the_way, _, _ = (why_no_directory(os.path.abspath(path)) or "").partition(";")
    return "there is no such directory" + (f"; {in_the_way}" if in_the_way else "")


def found_instead(path: str) -> str:
    """The end of a message about a directory that is not a checkpoint: what it holds, or nothing.

    Names the checkpoints in it, or else those one level deeper, the last committed one first.
    """
    with suppress(OSError):
        names = storage_at(path).list()
        if any(map(is_metadata_of_one_rank, names)):
            return "; each rank has saved alone here, with use_collectives=False"
        if any(map(is_ours_to_remove, names)):
            return "; it has files of a save that is in progress or was interrupted"
        if len(names) > _MOST_SEARCHED:  # a directory of data, as a rule
            return ""
        below = committed_latest_first(path)
        if not below and not is_address(path):
            inner = filter(os.path.isdir, directories_in(path))
            below = _committed_of(each for outer in inner for each in directories_in(outer))
        if below:
            shown = [os.path.relpath(each, path) for each in below]
            return f"; checkpoints below it, newest first: {some(shown, _SHOWN)}"
    return ""


def _may_be_file(path: str) -> bool:
    """Whether a regular file has this name; also true if storage does not say."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return leaves_open(error)


def committed_at_s(directory: str) -> float:
    """When a checkpoint was committed: by its manifest, or else by the clock of storage.

    ``OSError`` if there is none.
    """
    files = storage_at(directory)
    with open_to_read(files, METADATA_NAME) as stream:
        manifest = manifest_alone(stream)
    return files.stat(METADATA_NAME).modified_s if manifest is None else manifest.committed_at_s


def _committed_at_s(directory: str) -> float:
    """When a checkpoint was committed; the next best time if its metadata cannot be read."""
    with suppress(OSError):
        return committed_at_s(directory)
    with suppress(OSError):
        return storage_at(directory).stat(METADATA_NAME).modified_s
    with suppress(OSError):
        return os.stat(directory).st_mtime
    return 0.0
