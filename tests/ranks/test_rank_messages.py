"""Messages between ranks arrive intact, in two collectives each."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import loaded
from support.ranks import run_ranks


def test_messages_of_all_lengths_arrive_in_two_collectives(tmp_path: Path) -> None:
    """Messages of all lengths arrive, from all ranks or from any one.

    On three ranks with the second one in charge, and on two of them; empty, short, and a megabyte.
    """
    for said in run_ranks(3, "rank_messages:messages_of_all_lengths_arrive", tmp_path):
        assert said["wrong"] == []
        for rounds in said["rounds"]:
            assert rounds == {
                "all_reduce": 4,
                "gather": 1,
                "broadcast": 1,
                "scatter": 1,
                "all_gather": 1,
            }


def test_ranks_whose_store_has_gone_still_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot leave each other their numbers of requests, which costs no save."""
    monkeypatch.setenv(loaded.EXECUTABLE, loaded.executable())  # for the store's process
    assert (
        run_ranks(2, "rank_messages:ranks_whose_store_has_gone_still_save", tmp_path)
        == [{"gone": True, "wrong": []}] * 2
    )


def test_ranks_without_numpy_save(tmp_path: Path) -> None:
    """torch's collectives of objects require NumPy; a split save, or its failure, does not.

    One warning says that loading on several ranks does.
    """
    for said in run_ranks(2, "rank_messages:ranks_without_numpy_save", tmp_path):
        assert said["wrong"] == []
        assert said["failed ranks"] == [1]
        assert "install numpy" in said["warning"]
