"""Messages between ranks arrive intact, in two collectives each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.ranks import on_ranks, run_ranks


@on_ranks("rank_messages:messages_of_all_lengths_arrive", ranks=3)
def test_messages_of_all_lengths_arrive_in_two_collectives(found: list[Any]) -> None:
    """From all ranks or one, with the second in charge, on two of them; empty to a megabyte."""
    once = dict.fromkeys(("gather", "broadcast", "scatter"), 1)
    for said in found:
        assert said["wrong"] == []
        assert all(each == {"all_reduce": 3, **once} for each in said["rounds"])


@on_ranks("rank_messages:ranks_whose_store_has_gone_still_save")
def test_ranks_whose_store_has_gone_still_save(found: list[Any]) -> None:
    """They cannot leave each other their numbers of requests, which costs no save."""
    assert found == [{"gone": True, "wrong": []}] * 2


def test_ranks_without_numpy_save(tmp_path: Path) -> None:
    """Neither a split save nor its failure needs it; one warning says that loading does."""
    for said in run_ranks(2, "rank_messages:ranks_without_numpy_save", tmp_path):
        assert said["wrong"] == []
        assert said["failed ranks"] == [1]
        assert "install numpy" in said["warning"]
