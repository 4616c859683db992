"""How a save ends on the coordinator: a verdict on all ranks' reports, then the commit.

A commit publishes the metadata of a save whose files are all durable. Only when the publication is
durable, the files of the replaced checkpoint can be removed.

Imports no torch.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from nostall._model.values import Abort, Commit, Verdict
from nostall._storage.port import Conflict, Storage, reason, version_of
from nostall.errors import IncompleteSaveError, NotDurableError, RankMismatchError, WriteError

_log = logging.getLogger("nostall")


def collect(outcomes: Sequence[Any]) -> Verdict:
    """Commit if no rank failed; otherwise abort and name every failed rank.

    ``outcomes`` are, in rank order, write results or failures, the latter tuples of DCP's form.
    """
    failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, tuple)}
    return Abort(failures=failures) if failures else Commit(results=list(outcomes))


def require_one_result_each(
    planned: Iterable[Hashable], results: Iterable[Hashable], *, rank: int | None = None
) -> None:
    """Raise ``IncompleteSaveError`` unless a rank reports exactly one result per planned item."""
    wanted, got = Counter(planned), Counter(results)
    if wanted == got:
        return
    missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
    raise IncompleteSaveError(
        f"{len(missing)} planned items have no result, {len(extra)} results were not planned:"
        f" {[str(index) for index in (*missing, *extra)[:3]]}",
        rank=rank,
        phase="collect",
        hint="nothing was committed; a planner of your own may use an index twice",
    )


def require_all_present(planned: Iterable[Hashable], results: Iterable[Hashable]) -> None:
    """Raise ``IncompleteSaveError`` unless ranks have written exactly the metadata's items."""
    named, written = set(planned), set(results)
    for strangers, what in (
        (named - written, "items of the checkpoint were not written by any rank"),
        (written - named, "written items are not in the checkpoint's metadata"),
    ):
        if strangers:
            raise IncompleteSaveError(
                f"{len(strangers)} {what}: {sorted(map(str, strangers))[:3]}",
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
            hint="give a save up on all ranks; nothing was committed, the next save plans again",
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
        raise WriteError(
            f"the metadata could not be published: {reason(error)}",
            errno=error.errno if isinstance(error, OSError) else None,
            phase="commit",
            path=storage.where(metadata_name),
            hint="the other save's checkpoint stays; let one job save to a directory"
            if isinstance(error, Conflict)
            else "the previous checkpoint, if there was one, is untouched",
        ) from error
    try:
        return tuple(replaced_files)
    except Exception:  # the checkpoint exists, so the save has succeeded
        where = storage.where()
        _log.exception("files of the replaced checkpoint cannot be determined: path=%s", where)
        return ()
