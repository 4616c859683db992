"""Saves are committed when all ranks have written, though nobody polls."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._model.values import SaveId
from nostall._save.metadata_cache import CheckpointMetadataCache, Counted
from programs.early import WARM, Job, early_of
from support.ranks import run_ranks
from support.waiting import wait_until


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (2, "early:steady"),
        (4, "early:steady"),
        *((2, f"early:{how}") for how in ("own_planner", "vouched_planner", "closure")),
    ],
)
def test_a_save_is_committed_though_nobody_polls(tmp_path: Path, ranks: int, program: str) -> None:
    """One poll asks, the next one has the answer; training communicates in no other way."""
    for rank, found in enumerate(run_ranks(ranks, program, tmp_path)):
        assert found["whole"] == [True] * (WARM + 4)
        assert found["collectives before"] == {}
        assert found["polls"] == 2
        assert found["collectives"] == {"all_reduce": 1}  # of the first poll
        announced, mine = 1, 1
        expected = {"set": announced + mine}
        if rank == 0:
            expected |= {"compare_set": 1, "multi_get": 1}
        assert found["store"] == expected
        assert found["removed later"] == 3


def test_a_slow_rank_costs_the_others_no_more(tmp_path: Path) -> None:
    """They poll meanwhile, at a reduction each, and use the store as often as for any save."""
    for rank, found in enumerate(run_ranks(4, "early:one_rank_is_slow", tmp_path)):
        assert found["finalised"] == [[]] * 5
        assert found["early"] is False
        assert found["whole"] is True
        assert set(found["collectives"]) == {"all_reduce"}
        assert found["collectives"]["all_reduce"] <= found["polls"]
        expected = {"set": 2}
        if rank == 0:
            expected |= {"compare_set": 1, "multi_get": 1}
        assert found["store"] == expected


def test_a_dead_rank_costs_the_others_one_reduction(tmp_path: Path) -> None:
    """Which fails with a named error; nothing is committed, and earlier checkpoints stay."""
    *found, dead = run_ranks(4, "early:one_rank_is_dead", tmp_path, check=False)
    assert dead is None
    for rank, each in enumerate(found):
        assert each["error"].startswith("RankLostError: ranks can no longer communicate")
        assert f"[rank={rank}]" in each["error"]
        assert each["collectives"] == {"all_reduce": 1}
        assert set(each["store"]) <= {"set", "check"}  # looks; their number depends on the time
        assert each["store"]["set"] <= 2
        assert each["whole"] == [True] * WARM + [False]


def test_saves_of_other_structures_are_committed_together(tmp_path: Path) -> None:
    """Also if one rank's structure has changed without the others' knowledge."""
    for found in run_ranks(2, "early:planned_first", tmp_path):
        assert found["whole"] == [True] * (WARM + 2)
        assert found["changed"]["collectives"]["broadcast"] == 1
        assert set(found["changed"]["store"]) <= {"set", "check"}


@pytest.mark.parametrize("how", ["apart", "in one"])
def test_finalize_functions_before_the_commit_run_before_it(tmp_path: Path, how: str) -> None:
    """They may write what belongs to the checkpoint."""
    for found in run_ranks(2, "early:with_a_function_before", tmp_path, how):
        assert found == {"complete before": [False], "whole": True}


def test_a_rank_that_gives_up_before_the_commit_prevents_it(tmp_path: Path) -> None:
    """Nothing of the save is left on any rank, and the next one is whole."""
    for found in run_ranks(2, "early:given_up_before", tmp_path):
        assert found["complete"] is False
        assert found["files"] == []
        assert found["whole"] is True


def test_a_rank_that_gives_up_too_late_leaves_its_files(tmp_path: Path) -> None:
    """They belong to a checkpoint."""
    for found in run_ranks(2, "early:given_up_too_late", tmp_path):
        assert found == {"whole": True, "files": 3}


@pytest.mark.parametrize("how", ["polling", "waiting"])
@pytest.mark.parametrize("program", ["refused", "failed_on_one_rank"])
def test_a_failure_is_raised_on_all_ranks(tmp_path: Path, program: str, how: str) -> None:
    """With its cause; nothing of the save is left, and the next one is whole."""
    for found in run_ranks(2, f"early:{program}", tmp_path, how):
        assert os.strerror(errno.ENOSPC) in found["error"]
        assert found["files"] == []
        assert found["whole"] is True


def test_ranks_that_count_differently_commit_together(tmp_path: Path) -> None:
    """And plan together, so that the saves after that are committed early again."""
    for found in run_ranks(2, "early:without_a_common_count", tmp_path):
        assert found["whole"] == [True] * (WARM + 6)
        assert found["again"] == {}


@pytest.mark.parametrize("how", ["scheduled", "planned", "interrupted"])
def test_values_of_two_saves_do_not_become_one_checkpoint(tmp_path: Path, how: str) -> None:
    """One rank has given one up alone. The next save of all ranks is whole."""
    for found in run_ranks(2, "early:given_up_alone", tmp_path, how):
        assert "ranks finalise 2 different saves to this directory" in found["error"]
        assert "give a save up on all ranks" in found["error"]
        assert not found["is there"]
        assert found["values"] == [WARM + 2] * 2


def test_saves_that_all_ranks_give_up_cost_no_other(tmp_path: Path) -> None:
    """Though each does at a time of its own."""
    for found in run_ranks(2, "early:given_up_by_all", tmp_path):
        assert found == {"values": [WARM + 2] * 2}


def test_ranks_count_anew_before_they_count_too_many_directories() -> None:
    """They agree on it, so it is not a question of one rank's time; numbers stay different."""
    cache = CheckpointMetadataCache()
    cache.last_save = SaveId(5, 0)
    with patch("nostall._save.metadata_cache._MOST_DIRECTORIES", 3):
        counted = [cache.count(name) for name in ("a", "b", "a", "c", "a")]
    assert [save for save, _ in counted] == [*(SaveId(5, n) for n in (1, 2, 3)), None, None]
    assert [here and here.number for _, here in counted] == [1, 1, 2, 1, 3]
    cache.begin_series(6)
    assert cache.count("a") == Counted(SaveId(6, 1), SaveId(6, 1))


def test_without_the_store_saves_are_committed_together(tmp_path: Path) -> None:
    """It is gone for one of the ranks."""
    for found in run_ranks(2, "early:without_a_store", tmp_path):
        assert found["whole"] == [True] * (WARM + 2)


@pytest.mark.parametrize("point", ["commit", "publish"])
def test_a_coordinator_that_is_killed_leaves_what_was_committed(tmp_path: Path, point: str) -> None:
    """The save before is whole; the one that it was about to commit is not there."""
    run_ranks(2, "early:killed", tmp_path, point, check=False)
    assert nostall.verify(tmp_path / f"{WARM - 1}").ok
    assert not nostall.is_complete(tmp_path / f"{WARM}")


@pytest.mark.parametrize(
    ("place", "point", "victims"),
    [
        ("over", "publish", ["trainer"]),
        ("over", "commit", ["writer"]),
        ("over", "commit", ["trainer", "writer"]),
        ("new", "commit", ["trainer"]),
        ("new", "publish", ["writer"]),
        ("new", "publish", ["trainer", "writer"]),
    ],
)
def test_kills_between_durable_and_published_leave_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, place: str, point: str, victims: list[str]
) -> None:
    """The coordinator's processes are killed. The next job saves there as usual."""
    old, new = float(WARM), float(WARM + 1)
    run_ranks(2, "early:killed_between", tmp_path, place, point, *victims, check=False)
    target = {f"rank{rank}": torch.zeros(1000) for rank in range(2)}
    committed = new if "trainer" not in victims else old if place == "over" else None
    assert nostall.is_complete(tmp_path / place) == (committed is not None)
    if committed is not None:
        assert nostall.verify(tmp_path / place).ok
        nostall.load(target, tmp_path / place)
        assert {float(value) for each in target.values() for value in each} == {committed}
    again = run_ranks(2, "early:starts_again", tmp_path, place)
    assert again == [[old, old]] * 2


def test_a_process_alone_commits_without_a_poll(tmp_path: Path) -> None:
    """A poll only runs the finalize functions."""
    job = Job(tmp_path)
    early = early_of(job.save())
    wait_until(lambda: early.committed > 0)
    assert nostall.is_complete(tmp_path / f"{WARM}")
    assert job.queue.pending == 1
    assert job.queue.poll() == [WARM]
    loaded = {"rank0": torch.zeros(1000)}
    nostall.load(loaded, tmp_path / f"{WARM}")
    assert bool((loaded["rank0"] == WARM).all())


# --- ranks that differ, several saves, and ends of other kinds ------------------------------------


def test_ranks_may_have_different_finalize_functions(tmp_path: Path) -> None:
    """They make the same collectives nevertheless."""
    first, second = run_ranks(2, "early:with_functions_on_one_rank", tmp_path)
    assert first == {"ran": 2, "whole": True}
    assert second == {"ran": 0, "whole": True}


def test_another_groups_commit_is_not_taken_for_the_own(tmp_path: Path) -> None:
    """Several groups of ranks save through one queue of all ranks."""
    for found in run_ranks(2, "early:in_groups_of_one", tmp_path):
        assert found["whole"] is True
    for found in run_ranks(2, "early:one_of_the_groups_fails", tmp_path / "fails"):
        assert found == {"raised": True, "complete": False}


def test_what_others_have_finalised_is_not_torn(tmp_path: Path) -> None:
    """By a rank that gives it up when the decision about it is removed from the store."""
    for found in run_ranks(2, "early:given_up_in_another_queue", tmp_path):
        assert found == {"whole": True}


def test_of_two_saves_to_a_directory_the_later_one_wins(tmp_path: Path) -> None:
    """Whoever is faster."""
    for found in run_ranks(2, "early:two_to_one_directory", tmp_path):
        assert found == [[0.0, 0.0]] * 6


def test_records_of_different_saves_are_not_mixed(tmp_path: Path) -> None:
    """Where ranks count differently, and more than one save is in flight."""
    for found in run_ranks(2, "early:counted_differently_in_flight", tmp_path):
        assert found["values"] == [[WARM] * 2, [WARM + 1] * 2]
        assert found["whole"] is True


def test_files_of_other_names_are_committed_early(tmp_path: Path) -> None:
    """Polls do not wait for a rank whose name was taken."""
    for found in run_ranks(2, "early:beside_a_leftover", tmp_path):
        assert found == {"whole": True}


def test_a_refused_commit_costs_no_other_save(tmp_path: Path) -> None:
    """Of several in flight."""
    for found in run_ranks(2, "early:after_a_refused_commit", tmp_path):
        assert found == {"failures": 1, "whole": [False, True, True]}


def test_one_rank_may_wait_while_another_one_polls(tmp_path: Path) -> None:
    """In the middle of the commit."""
    for found in run_ranks(2, "early:one_waits_and_the_other_polls", tmp_path):
        assert found == {"whole": True}


def test_giving_up_does_not_wait_for_storage(tmp_path: Path) -> None:
    """What cannot be prevented may be published later, and is whole then."""
    for found in run_ranks(2, "early:given_up_while_storage_hangs", tmp_path):
        assert found == {"whole": True}


def test_failed_saves_leave_no_keys(tmp_path: Path) -> None:
    """The store does not grow."""
    for found in run_ranks(2, "early:keys_of_failed_saves", tmp_path):
        assert found["failures"] == 4
        assert max(found["keys"]) <= found["keys"][0] + 8  # decisions


def test_process_groups_come_and_go(tmp_path: Path) -> None:
    """Nothing keeps the store of one that is destroyed; the job goes on with another one."""
    for found in run_ranks(2, "early:in_a_new_process_group", tmp_path):
        assert found == [True] * 4


@pytest.mark.parametrize("then", ["wait", "give up", "wait there", "swap"])
def test_a_checkpoint_outlives_its_process_group(tmp_path: Path, then: str) -> None:
    """Which is destroyed before the save is finalised: no rank takes its files away."""
    for found in run_ranks(2, "early:without_its_process_group", tmp_path, then, whole_end=True):
        assert found is True


def test_a_save_that_comes_too_late_for_its_process_group_says_so(tmp_path: Path) -> None:
    """It is not committed. Files of a rank that may have told the coordinator stay."""
    for rank, found in enumerate(run_ranks(2, "early:too_late_for_its_process_group", tmp_path)):
        assert "the process group of 2 ranks that saved together is gone" in found["error"]
        assert f"rank={rank}" in found["error"]
        assert found["is there"] is False
        assert set(found["files"]) <= {"__0_0.distcp", "__1_0.distcp"}


def test_a_program_may_end_without_finalising_what_is_committed(tmp_path: Path) -> None:
    """Having destroyed its process group: the checkpoint is whole, and no rank reports a loss."""
    run_ranks(2, "early:ends_after_the_commit", tmp_path, whole_end=True)
    assert nostall.verify(tmp_path / f"{WARM}").ok


# --- signals, ranks without files, and ends that cross --------------------------------------------


@pytest.mark.parametrize("how", ["wait", "close", "one polls"])
def test_a_signal_before_the_last_poll_costs_no_save(tmp_path: Path, how: str) -> None:
    """The answer to that poll says that a process is to end, and not that the save is done."""
    for found in run_ranks(2, "early:signalled_before_the_end", tmp_path, how, whole_end=True):
        assert found == {"pending": 0, "whole": True}


def test_a_coordinator_with_nothing_to_write(tmp_path: Path) -> None:
    """It commits, and what it gives up is not committed by its thread."""
    for found in run_ranks(2, "early:nothing_to_write", tmp_path):
        assert found == {"over": True, "complete": False}


def test_a_report_that_crosses_its_deadline_counts(tmp_path: Path) -> None:
    """No save is reported as failed that is there."""
    for found in run_ranks(2, "early:late_on_one_rank", tmp_path):
        assert found == {"whole": True}


def test_a_plan_that_is_dropped_holds_no_tensors(tmp_path: Path) -> None:
    """Until the garbage collector runs, they would be beside those of the next save."""
    for found in run_ranks(2, "early:dropped_plans", tmp_path):
        assert found == {"gone": True}


def test_a_forked_child_waits_for_no_answer(tmp_path: Path) -> None:
    """Its parent has asked."""
    assert run_ranks(2, "early:forked", tmp_path) == [0, 0]


def test_a_process_ends_though_a_thread_is_in_the_store(tmp_path: Path) -> None:
    """With its own exit status: torch aborts a process whose thread returns too late."""
    assert run_ranks(2, "early:ended", tmp_path, whole_end=True) == [True, True]


# --- what one poll does ---------------------------------------------------------------------------


def test_the_poll_that_finalises_one_finalises_all_that_are_done(tmp_path: Path) -> None:
    """The first one only asks."""
    for found in run_ranks(2, "early:several_in_one_poll", tmp_path):
        assert found == [[], [WARM, WARM + 1, WARM + 2]]


def test_an_adapters_poll_commits_at_once(tmp_path: Path) -> None:
    """Saves of every kind, those before the steady state too."""
    for found in run_ranks(2, "early:an_adapters_poll", tmp_path):
        assert found == [True] * 6


def test_what_a_later_save_has_removed_is_not_published(tmp_path: Path) -> None:
    """The commit of an earlier save may have stood still meanwhile."""
    job = Job(tmp_path)
    save = job.save(lambda: None)  # not early
    assert save is not None
    save.visit.is_removed = True
    with pytest.raises(CheckpointException, match="a later save to the directory has removed"):
        job.queue.wait()
    assert not nostall.is_complete(tmp_path / f"{WARM}")
