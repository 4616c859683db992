"""Collect: from what every rank reports to one verdict. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from nostall._values import Abort, Commit, Verdict
from nostall.errors import IncompleteSaveError


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
    """Check that every item that the metadata is going to name was written by some rank.

    Raises:
        IncompleteSaveError: An item was not.
    """
    missing = set(planned).difference(results)
    if missing:
        raise IncompleteSaveError(
            f"{len(missing)} items of the checkpoint were written by no rank: {sorted(map(str, missing))[:3]}",
            phase="collect",
            hint="nothing was committed; the next save plans anew",
        )
