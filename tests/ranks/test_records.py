"""Records of ranks in a store: what is decided about a save stays decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist

from nostall import _torch
from nostall._model.values import SaveId
from nostall._ranks.group import Records

SERIES = 7


@pytest.fixture(name="records")
def _records() -> Iterator[Callable[..., Records]]:
    """A function that makes the records of one of three ranks about a save."""
    store = dist.HashStore()

    def of(number: int, rank: int = 0) -> Records:
        return Records(SaveId(SERIES, number), rank, 3)

    with patch.object(_torch, "default_store", lambda: store):
        yield of


def test_the_first_claim_decides(records: Callable[..., Records]) -> None:
    """On all ranks, however often it is asked."""
    assert records(5, 0).claim("commit")
    assert not records(5, 1).claim("give up")
    assert records(5, 2).claim("commit")
    assert records(6, 1).claim("give up")
    assert not records(6, 0).claim("commit")


def test_a_claim_that_comes_many_saves_later_is_refused(
    records: Callable[..., Records],
) -> None:
    """The key of a decision serves a later save by then."""
    for number in range(40):
        assert records(number).claim("commit")
        assert not records(number, 1).claim("give up")
    for number in range(40):
        assert not records(number, 1).claim("give up")


def test_records_are_complete_when_all_ranks_have_left_theirs(
    records: Callable[..., Records],
) -> None:
    """In any order; those of other saves do not count."""
    mine = records(1)
    for rank in (2, 0):
        records(1, rank).put(bytes([rank]))
        records(2, 1).put(b"another save's")
        assert not mine.are_complete()
    records(1, 1).put(b"\x01")
    assert mine.are_complete()
    assert mine.all() == [b"\x00", b"\x01", b"\x02"]


def test_without_a_process_group_it_says_so() -> None:
    """And does not wait."""
    with (
        patch.object(_torch, "default_store", lambda: None),
        pytest.raises(RuntimeError, match="no process group"),
    ):
        Records(SaveId(SERIES, 1), 0, 3).put(b"")
