"""What ranks say to each other arrives, and costs no more collectives than it has to."""

from __future__ import annotations

from pathlib import Path

from nostall._ranks.messages import ROOM_NBYTES
from support.ranks import run_ranks


def test_messages_of_all_lengths_arrive_and_short_ones_in_one_collective(tmp_path: Path) -> None:
    """Messages of all lengths arrive, from all ranks or from any one.

    On three ranks with the second one in charge, and on two of them; empty, just short enough, one
    byte too long, and a megabyte.
    """
    found = run_ranks(
        3, "rank_messages:messages_of_all_lengths_arrive_and_short_ones_in_one_collective", tmp_path
    )
    for said in found:
        assert said["wrong"] == []
        assert said["rounds"][f"{ROOM_NBYTES} None"] == {"all_gather": 1, "broadcast": 1}
        assert said["rounds"][f"{ROOM_NBYTES + 1} None"] == {
            "all_gather": 1,
            "gather": 1,
            "broadcast": 2,
        }
        assert said["rounds"][f"{ROOM_NBYTES + 1} 0"] == {
            "all_gather": 1,
            "gather": 1,
            "broadcast": 1,
        }


def test_ranks_whose_store_has_gone_still_save(tmp_path: Path) -> None:
    """They cannot leave each other their numbers of requests, which costs no save."""
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
