"""Reports of ranks: an exception in making one is a failure that waiters get."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from nostall._model.jobs import (
    RankFailed,
    RankReport,
    RankWritten,
)
from nostall._ranks.failures import when_done


@pytest.mark.parametrize("comes", ["before", "later"])
def test_a_report_that_cannot_be_finished_is_a_failed_one(comes: str) -> None:
    """A waiter for a rank's report gets the exception from making it, not a deadline."""

    def finish(_: list[RankReport]) -> RankReport:
        raise MemoryError("no luck")

    part: Future[RankReport] = Future()
    if comes == "before":
        part.set_result(RankWritten(rank=3, receipts=()))
    whole = when_done([part], finish)
    if comes == "later":
        part.set_result(RankWritten(rank=3, receipts=()))
    report = whole.result(timeout=0)
    assert isinstance(report, RankFailed)
    assert (report.rank, report.failure.message) == (3, "MemoryError: no luck")
