"""Collect: from what every rank reports to one verdict. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from nostall._model.values import Abort, Commit, Verdict
from nostall.errors import IncompleteSaveError, RankMismatchError


def collect(outcomes: Sequence[Any]) -> Verdict:
    """Commit only if every rank wrote everything; otherwise name every rank that did not.

    Args:
        outcomes: For each rank in order, the list of its write results, or its failure.
    """
    failures = {rank: each for rank, each in enumerate(outcomes) if not isinstance(each, list)}
    return Abort(failures=failures) if failures else Commit(results=list(outcomes))


def require_one_result_each(
    planned: Iterable[Hashable], results: Iterable[Hashable], *, rank: int | None = None
) -> None:
    """Check that one rank reports exactly one result per item that it had planned.

    Raises:
        IncompleteSaveError: An item has no result, several, or was never planned.
    """
    wanted, got = Counter(planned), Counter(results)
    if wanted == got:
        return
    missing, extra = list((wanted - got).elements()), list((got - wanted).elements())
    raise IncompleteSaveError(
        f"{len(missing)} planned items have no result and {len(extra)} results were not planned:"
        f" {[str(index) for index in (*missing, *extra)[:3]]}",
        rank=rank,
        phase="collect",
    )


def require_all_present(planned: Iterable[Hashable], results: Iterable[Hashable]) -> None:
    """Check that every item that the metadata is going to name was written by some rank, and no other.

    Raises:
        IncompleteSaveError: An item was not, or nobody would find one that was.
    """
    named, written = set(planned), set(results)
    for strangers, what in (
        (named - written, "items of the checkpoint were written by no rank"),
        (written - named, "items were written that the checkpoint's metadata does not name"),
    ):
        if strangers:
            raise IncompleteSaveError(
                f"{len(strangers)} {what}: {sorted(map(str, strangers))[:3]}",
                phase="collect",
                hint="nothing was committed; the next save plans anew",
            )


def require_one_directory(
    directories: Sequence[str | None],
    mine: str,
    *,
    rank: int | None = None,
    is_same: Callable[[str, str], bool],
) -> None:
    """Check that all ranks have written to the directory that the metadata is going to be in.

    Args:
        directories: Where each rank has written, as far as that is known.
        mine: The coordinator's.
        rank: The coordinator.
        is_same: Whether two paths lead to one directory, as the coordinator sees it.

    Raises:
        RankMismatchError: One rank has written elsewhere.
    """
    elsewhere: dict[str, list[int]] = defaultdict(list)
    for number, directory in enumerate(directories):
        if directory is not None and directory != mine:
            elsewhere[directory].append(number)
    strangers = {path: ranks for path, ranks in elsewhere.items() if not is_same(path, mine)}
    if strangers:
        path, ranks = next(iter(strangers.items()))
        raise RankMismatchError(
            f"ranks save to {len(strangers) + 1} different directories: ranks {ranks[:8]} to {path}",
            rank=rank,
            phase="collect",
            path=mine,
            hint="choose the path on one rank and broadcast it; nothing was committed",
        )
