"""Saves are committed when all ranks have written, though nobody polls."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import nostall
from nostall._model.values import SaveId
from nostall._save.decide import Ending
from nostall._save.early_commit import EarlyCommit
from nostall._save.split_plan import CheckpointMetadataCache, Counted
from programs.early import WARM, Job, early_of
from support.ranks import on_ranks, run_ranks
from support.waiting import wait_until


@on_ranks(
    *(f"early:{how}" for how in ("steady", "own_planner", "vouched_planner")),
    ranks=(2, 4),
)
def test_a_save_is_committed_though_nobody_polls(found: list[Any]) -> None:
    """One poll asks, the next one has the answer; training communicates in no other way."""
    for rank, each in enumerate(found):
        assert each["whole"] == [True] * (WARM + 4)
        assert each["collectives before"] == {}
        assert each["polls"] == 2
        assert each["collectives"] == {"all_reduce": 1}  # of the first poll
        announced, mine = 1, 1
        expected = {"set": announced + mine}
        if rank == 0:
            expected |= {"compare_set": 1, "multi_get": 1}
        assert each["store"] == expected
        assert each["removed later"] == 3


@on_ranks("early:one_rank_is_slow", ranks=4)
def test_a_slow_rank_costs_the_others_no_more(found: list[Any]) -> None:
    """They poll meanwhile, at a reduction each, and use the store as often as for any save."""
    for rank, each in enumerate(found):
        assert each["finalised"] == [[]] * 5
        assert each["early"] is False
        assert each["whole"] is True
        assert set(each["collectives"]) == {"all_reduce"}
        assert each["collectives"]["all_reduce"] <= each["polls"]
        expected = {"set": 2}
        if rank == 0:
            expected |= {"compare_set": 1, "multi_get": 1}
        assert each["store"] == expected


def test_a_dead_rank_costs_the_others_one_reduction(tmp_path: Path) -> None:
    """Which fails with a named error; nothing is committed, and earlier checkpoints stay."""
    *found, dead = run_ranks(4, "early:one_rank_is_dead", tmp_path, check=False)
    assert dead is None
    for rank, each in enumerate(found):
        assert each["error"].startswith("RankLostError: ranks can no longer communicate")
        assert f"[rank={rank}]" in each["error"]
        assert each["collectives"] == {"all_reduce": 1}
        assert set(each["store"]) == {"set"}
        assert each["store"]["set"] <= 2
        assert each["whole"] == [True] * WARM + [False]


@on_ranks("early:planned_first")
def test_saves_of_other_structures_are_committed_together(found: list[Any]) -> None:
    """Also if one rank's structure has changed without the others' knowledge."""
    for each in found:
        assert each["whole"] == [True] * (WARM + 2)
        assert each["changed"]["collectives"]["broadcast"] == 1
        assert set(each["changed"]["store"]) <= {"set"}


@on_ranks("early:with_a_function_before")
def test_finalize_functions_before_the_commit_run_before_it(found: list[Any]) -> None:
    """They may write what belongs to the checkpoint."""
    assert found == [{"complete before": [False], "whole": True}] * 2


@on_ranks("early:given_up_before other", "early:given_up_before empty")
def test_a_rank_that_gives_up_before_the_commit_prevents_it(found: list[Any]) -> None:
    """Nothing of the save is left on any rank, and the next one is whole."""
    assert found == [{"complete": False, "files": [], "whole": True}] * 2


@on_ranks("early:given_up_too_late one", "early:given_up_too_late all")
def test_a_rank_that_gives_up_too_late_leaves_its_files(found: list[Any]) -> None:
    """They belong to a checkpoint. Nobody waits for storage, which may publish it later."""
    assert found == [{"whole": True, "files": 3}] * 2


@on_ranks(*(f"early:failed {p} {how}" for p in ("chunk", "publish") for how in ("polling", "wait")))
def test_a_failure_is_raised_on_all_ranks(found: list[Any]) -> None:
    """With its cause; nothing of it is left, and the next saves are whole and planned alone."""
    for each in found:
        assert os.strerror(errno.ENOSPC) in each["error"]
        assert each["files"] == []
        assert each["planned with"] == {}
        assert each["whole"] == [*[True] * WARM, False, True, True]


@on_ranks(*(f"early:given_up_alone {how}" for how in ("scheduled", "planned", "interrupted")))
def test_values_of_two_saves_do_not_become_one_checkpoint(found: list[Any]) -> None:
    """One rank has given one up alone. The next save of all ranks is whole."""
    for each in found:
        assert "ranks finalise 2 different saves to this directory" in each["error"]
        assert "abort a save on all ranks" in each["error"]
        assert not each["is there"]
        assert each["values"] == [WARM + 2] * 2


def test_ranks_count_anew_before_they_count_too_many_directories() -> None:
    """They agree on it, so it is not a question of one rank's time; numbers stay different."""
    cache = CheckpointMetadataCache()
    cache.last_save = SaveId(5, 0)
    with patch("nostall._save.split_plan._MOST_DIRECTORIES", 3):
        counted = [cache.count(name) for name in ("a", "b", "a", "c", "a")]
    assert [save for save, _ in counted] == [*(SaveId(5, n) for n in (1, 2, 3)), None, None]
    assert [here and here.number for _, here in counted] == [1, 1, 2, 1, 3]
    cache.begin_series(6)
    assert cache.count("a") == Counted(SaveId(6, 1), SaveId(6, 1))


def committed_in(path: Path) -> float | None:
    """The value of all elements of both ranks; ``None`` if nothing is committed there."""
    if not nostall.is_complete(path):
        return None
    assert nostall.verify(path).ok
    target = {f"rank{rank}": torch.zeros(1000) for rank in range(2)}
    nostall.load(target, path)
    (value,) = {float(value) for each in target.values() for value in each}
    return value


def test_kills_between_durable_and_published_leave_the_old_checkpoint_or_the_new_one(
    tmp_path: Path,
) -> None:
    """The coordinator's processes are killed. The next job saves there as usual."""
    old, new = float(WARM), float(WARM + 1)
    expected: dict[tuple[str, ...], float | None] = {
        ("over", "publish", "trainer"): old,
        ("over", "commit", "trainer", "writer"): old,
        ("new", "commit", "trainer"): None,
        ("new", "publish", "writer"): new,
    }
    found: dict[tuple[str, ...], float | None] = {}
    places = []
    for number, case in enumerate(expected):
        run_ranks(2, "early:killed_between", tmp_path / f"{number}", *case, check=False)
        found[case] = committed_in(tmp_path / f"{number}" / case[0])
        places.append(f"../{number}/{case[0]}")
    assert found == expected
    again = run_ranks(2, "early:starts_again", tmp_path / "next", *places)
    assert again == [[[old, old]] * len(expected)] * 2


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


def test_saves_of_a_queue_are_committed_in_their_order(tmp_path: Path) -> None:
    """The latest checkpoint is that of the last save, also if the save before waits for a poll."""
    job = Job(tmp_path)
    job.save(lambda: None)  # is called before the commit, so in a poll
    save = job.save()
    assert save is not None
    wait_until(save._report.done)
    assert save.early is not None
    assert not save.early.is_allowed
    job.queue.wait()
    assert nostall.latest_complete(tmp_path) == str(tmp_path / f"{WARM + 1}")


def test_a_save_that_is_written_first_is_not_committed_first(tmp_path: Path) -> None:
    """Rank 0 may learn earlier of a small save than of a large one before it."""
    job = Job(tmp_path)
    order: list[str] = []
    looks = {"first": 0, "second": 0}
    known = EarlyCommit._run

    def run(early: EarlyCommit, over: Future[None]) -> None:
        name = "second" if "first" in names.values() else "first"
        names[id(early)] = name
        are_complete, commit = early._records.are_complete, early._commit
        assert commit is not None

        def look() -> bool:
            looks[name] += 1
            return are_complete() and (name == "second" or looks["second"] > 3 or bool(order))

        def note(messages: Sequence[bytes]) -> Ending:
            order.append(name)
            return commit(messages)

        early._commit = note
        with patch.object(early._records, "are_complete", look):
            known(early, over)

    names: dict[int, str] = {}
    with patch.object(EarlyCommit, "_run", run):
        early_of(job.save())
        wait_until(lambda: looks["first"] > 0)
        second = early_of(job.save())
        wait_until(lambda: second.committed > 0)
    assert order == ["first", "second"]
    assert job.queue.poll() == [WARM, WARM + 1]
    assert second.after is None  # a chain of saves would stay


# --- ranks that differ, several saves, and ends of other kinds ------------------------------------


@on_ranks("early:with_functions_on_one_rank")
def test_ranks_may_have_different_finalize_functions(found: list[Any]) -> None:
    """They make the same collectives nevertheless."""
    first, second = found
    assert first == {"ran": 2, "whole": True}
    assert second == {"ran": 0, "whole": True}


@on_ranks("early:in_groups_of_one")
def test_another_groups_commit_is_not_taken_for_the_own(found: list[Any]) -> None:
    """Several groups of ranks save through one queue; a failure of one fails the request of all."""
    assert found == [{"whole": True, "raised": True, "complete": False}] * 2


@on_ranks(
    "early:without_a_store",
    "early:given_up_by_all",
    "early:given_up_in_another_queue",
    "early:beside_a_leftover",
    "early:one_waits_and_the_other_polls",
    "early:late_on_one_rank",
)
def test_a_save_is_whole_whatever_one_rank_does(found: list[Any]) -> None:
    """No store, giving up before others or what they finalised, waiting, late, or a taken name."""
    assert found == [{"whole": True}] * 2


@on_ranks("early:two_to_one_directory")
def test_of_two_saves_to_a_directory_the_later_one_wins(found: list[Any]) -> None:
    """Whoever is faster."""
    assert found == [[[0.0, 0.0]] * 6] * 2


@on_ranks("early:counted_differently_in_flight")
def test_records_of_different_saves_are_not_mixed(found: list[Any]) -> None:
    """Ranks that count differently plan together, so later saves are committed early again."""
    for each in found:
        assert each["values"] == [[WARM] * 2, [WARM + 1] * 2]
        assert each["whole"] == [True] * (WARM + 6)
        assert each["again"] == {}


@on_ranks("early:after_a_refused_commit")
def test_a_refused_commit_costs_no_other_save(found: list[Any]) -> None:
    """Among several saves in flight only the one whose commit is refused fails."""
    assert found == [{"failures": 1, "whole": [False, True, True]}] * 2


@on_ranks("early:keys_of_failed_saves")
def test_failed_saves_leave_no_keys(found: list[Any]) -> None:
    """The store does not grow."""
    for each in found:
        assert each["failures"] == 4
        assert max(each["keys"]) <= each["keys"][0] + 8  # decisions


@on_ranks(
    *(
        f"early:without_its_process_group {then}"
        for then in ("wait", "give-up", "wait-there", "swap")
    )
)
def test_a_checkpoint_outlives_its_process_group(found: list[Any]) -> None:
    """Destroyed before the save is finalised: no rank removes files, nothing keeps its store."""
    for each in found:
        assert each["whole"] in ([True], [True] * 3)
        assert each["store is gone"]


@on_ranks("early:too_late_for_its_process_group")
def test_a_save_that_comes_too_late_for_its_process_group_says_so(found: list[Any]) -> None:
    """It is not committed. Files of a rank that may have told the coordinator stay."""
    for rank, each in enumerate(found):
        assert "the process group of this save (2 ranks) no longer exists" in each["error"]
        assert f"rank={rank}" in each["error"]
        assert each["is there"] is False
        assert set(each["files"]) <= {"__0_0.distcp", "__1_0.distcp"}


def test_a_program_may_end_without_finalising_what_is_committed(tmp_path: Path) -> None:
    """Having destroyed its process group: the checkpoint is whole, and no rank reports a loss."""
    run_ranks(2, "early:ends_after_the_commit", tmp_path, whole_end=True)
    assert nostall.verify(tmp_path / f"{WARM}").ok


# --- signals, ranks without files, and ends that cross --------------------------------------------


@pytest.mark.parametrize("how", ["close", "one polls"])
def test_a_signal_before_the_last_poll_costs_no_save(tmp_path: Path, how: str) -> None:
    """The answer to that poll says that a process is to end, and not that the save is done."""
    for found in run_ranks(2, "early:signalled_before_the_end", tmp_path, how, whole_end=True):
        assert found == {"pending": 0, "whole": True}


@on_ranks("early:forked")
def test_a_forked_child_waits_for_no_answer(found: list[Any]) -> None:
    """Its parent has asked."""
    assert found == [0, 0]


def test_a_process_ends_though_a_thread_is_in_the_store(tmp_path: Path) -> None:
    """With its own exit status: torch aborts a process whose thread returns too late."""
    assert run_ranks(2, "early:ended", tmp_path, whole_end=True) == [True, True]


# --- what one poll does ---------------------------------------------------------------------------


@on_ranks("early:several_in_one_poll")
def test_the_poll_that_finalises_one_finalises_all_that_are_done(found: list[Any]) -> None:
    """The first one only asks."""
    assert found == [[[], [WARM, WARM + 1, WARM + 2]]] * 2


@on_ranks("early:an_adapters_poll")
def test_an_adapters_poll_commits_at_once_but_waits_for_no_commit(found: list[Any]) -> None:
    """A poll leaves a commit in progress alone, and the first one after it ends the save."""
    assert found == [{"at once": [True] * 3, "left alone": True, "over then": True}] * 2


def test_what_a_later_save_has_removed_is_not_published(tmp_path: Path) -> None:
    """The commit of an earlier save may have stood still meanwhile."""
    job = Job(tmp_path)
    save = job.save(lambda: None)  # not early
    assert save is not None
    save.visit.is_removed = True
    with pytest.raises(CheckpointException, match="a later save to the directory has removed"):
        job.queue.wait()
    assert not nostall.is_complete(tmp_path / f"{WARM}")
