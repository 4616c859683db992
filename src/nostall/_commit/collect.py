"""Collect: from all ranks' reports to one verdict. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from nostall._model.values import Abort, Commit, Verdict
from nostall.errors import IncompleteSaveError, RankMismatchError


def collect(outcomes: Sequence[Any]) -> Verdict:
    """Commit if every rank wrote all its items; otherwise abort and name every failed rank.

    Args:
        outcomes: In rank order, each rank's write results, or its failure, a tuple of DCP's form.
    """
    failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, tuple)}
    return Abort(failures=failures) if failures else Commit(results=list(outcomes))


def require_one_result_each(
    planned: Iterable[Hashable], results: Iterable[Hashable], *, rank: int | None = None
) -> None:
    """Check that one rank reports exactly one result per planned item.

    Raises:
        IncompleteSaveError: An item has no result, several, or was never planned.
    """
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
    """Check that the ranks have written exactly the items that the metadata names.

    Raises:
        IncompleteSaveError: An item was not written, or a written item is not in the metadata.
    """
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
    """Check that all ranks finalise the same save to a directory.

    Args:
        saves: What identifies each rank's save; ``None`` where it is not known.
        rank: The coordinator.
        path: The directory.

    Raises:
        RankMismatchError: Two ranks finalise different saves.
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
    """Check that all ranks have written to the directory of the metadata.

    Args:
        directories: Each rank's directory; ``None`` where it is not known.
        mine: The coordinator's directory.
        rank: The coordinator.
        is_same: Whether two paths lead to one directory, as seen by the coordinator.

    Raises:
        RankMismatchError: A rank has written to another directory.
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
