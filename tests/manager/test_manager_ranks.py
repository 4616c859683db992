"""The manager on real ranks: one decides, all learn of errors, each has its own state back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nostall import CheckpointManager, PerRank
from support.ranks import on_ranks, run_ranks, run_script
from support.training import Job

Found = list[dict[str, Any]]


@on_ranks("managing:resumed")
def test_each_rank_continues_with_its_own_state(found: Found) -> None:
    """Extra, data and generators are those of the rank."""
    for rank, facts in enumerate(found):
        assert facts["extra"] == f"of rank {rank}"
        assert facts["drawn"] == 2
    for name in ("random", "torch", "loader"):
        assert found[0][name] != found[1][name]


@on_ranks("managing:sharded")
@pytest.mark.parametrize("way", ["objects", "names"])
def test_sharded_jobs_continue_equally(found: Found, way: str) -> None:
    """FSDP2, into new objects whose optimizer has not begun: losses are equal bit by bit."""
    for each in found:
        losses, expected = each[way]
        assert losses == expected


WHYS = {"write": "No space", "metrics": "metrics={'loss': 'n/a'}"}


@on_ranks("managing:failing raise", "managing:failing warn")
@pytest.mark.parametrize("when", ["first", "later", "metrics", "write", "restore"])
def test_a_failure_on_one_rank_is_an_error_on_all(found: Found, when: str) -> None:
    """In objects, arguments, writing or restoring; a warning of saves if that was asked; once."""
    for each in found:
        assert len(each[when]) == (each["how"] == "raise" or when == "restore")
        assert all(WHYS.get(when, "broken") in error for error in each[when])


@on_ranks("managing:failing raise", "managing:failing warn")
def test_a_failure_on_one_rank_costs_no_other_step(found: Found) -> None:
    """The loop saves on, and the handle of the failed save has its error."""
    for facts in found:
        assert facts["steps"] == [2, 3, 4, 5]
        assert "No space" in facts["handle"][0]
        assert facts["discarded"] == [2, 3, 4]


@on_ranks("managing:failing raise", "managing:failing warn")
def test_rank_0_is_told_of_each_commit_once_it_is_durable(found: Found) -> None:
    """An error of the function that is told costs no save; all ranks know when none is pending."""
    first, second = found
    assert first["commits"] == [[step, True] for step in (2, 3, 4, 4, 5)]
    assert second["commits"] == []
    assert first["pending"]
    assert second["pending"]


@on_ranks("managing:unreadable")
def test_rank_0_chooses_the_step(found: Found) -> None:
    """Others do not look, and its errors are theirs."""
    for each in found:
        assert each["none"]
        assert each["named"].startswith("ReadError: step 7 is not committed")
        assert each["step"] == 1


@on_ranks("managing:unfit")
def test_a_state_that_does_not_fit_on_one_rank_is_an_error_on_all(found: Found) -> None:
    """Before any rank has changed a tensor."""
    errors = [each["error"] for each in found]
    assert errors[0].startswith("CheckpointException")
    assert errors[1].startswith("OptionError: the state does not fit step 1: Size mismatch")
    assert all("weight" in error for error in errors)
    assert all(each["unchanged"] for each in found)


@on_ranks("managing:other_shapes")
@pytest.mark.parametrize(("when", "name"), [("first", "x.tensor"), ("later", "x")])
def test_tensors_of_one_name_and_different_shapes_are_refused(
    found: Found, when: str, name: str
) -> None:
    """Also when ranks plan alone; the error says what to do, and the next save is committed."""
    why = f"the shape of {name} differs between ranks: (4,) on rank 0 and (5,) on rank 1"
    for error in (each[when] for each in found):
        assert error.startswith("CheckpointException")
        assert why in error
        assert "PerRank" in error


@on_ranks("managing:other_shapes")
def test_per_rank_tensors_may_have_any_shape(found: Found) -> None:
    """Each rank gets its own."""
    assert [each["per rank"] for each in found] == [str([0.0] * 4), str([1.0] * 5)]


@on_ranks("managing:factored")
@pytest.mark.parametrize("name", ["factored", "LBFGS"])
def test_state_of_other_shapes_than_parameters_is_distributed_as_it_was(
    found: Found, name: str
) -> None:
    """Factored moments and flattened gradients: under FSDP2, and for one process without it."""
    for facts in (each[name] for each in found):
        restored, saved = facts["placements"]
        assert any("Replicate" in of_tensor for of_tensor in saved)
        assert restored == saved
        losses, expected = facts["losses"]
        assert losses == expected
        assert {line.split(" ", 1)[1] for line in facts["plain"]} == {"None"}
        assert facts["plain loss"] == pytest.approx(losses[:1])


@on_ranks("managing:factored")
def test_state_of_unknown_placement_is_refused(found: Found) -> None:
    """From a job whose parameters were plain: the next step under FSDP2 would fail in torch."""
    for each in found:
        assert each["unknown"].startswith("OptionError: the object 'optimizer'")
        assert "how optimizer.state.0.rows is to be distributed" in each["unknown"]
        assert each["after one step"] == "none"


@on_ranks("managing:without_numpy")
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
def test_a_job_without_numpy_is_told_at_once(found: Found, where: str) -> None:
    """Ranks could save without it, but torch loads with it; one without it is an error on all."""
    for rank, (restore, save) in enumerate(facts[where] for facts in found):
        of_another = where == "on rank 1" and rank == 0
        assert restore.startswith("CheckpointException" if of_another else "OptionError")
        assert save.startswith("CheckpointException")
        assert "pip install numpy" in restore
        assert "pip install numpy" in save
    assert found[0]["steps"] == [1]


@on_ranks("managing:stuck")
@pytest.mark.parametrize("call", ["restore", "save"])
def test_storage_that_hangs_on_rank_0_is_an_error_on_all(found: Found, call: str) -> None:
    """In time, and of one type; the same manager goes on when storage answers."""
    for each in found:
        assert each[call].startswith("SaveTimeoutError: ")
        assert each["steps"] == [1, 2]


@on_ranks("managing:saved_again")
def test_a_step_that_is_being_removed_can_be_saved_again(found: Found) -> None:
    """Files of the new save are not removed with the old ones."""
    for each in found:
        assert each["restored"] == 6
        assert each["steps"][-1] == 6


@on_ranks("managing:closed")
def test_all_ranks_close_when_removals_are_done(found: Found) -> None:
    """So that they see the same steps afterwards."""
    assert [each["steps"] for each in found] == [[2], [2]]


@on_ranks("managing:own_keys")
def test_an_optimizer_of_one_rank_is_restored_exactly(found: Found) -> None:
    """Under a name that rank 0 does not have, into a new optimizer."""
    for rank, each in enumerate(found):
        assert each["momenta"] == [[rank + 1.0] * 3] * 2


@on_ranks("managing:on_more_ranks")
def test_on_more_ranks_than_have_saved(found: Found) -> None:
    """Everything but what differs between ranks; the lack of that is an error on all."""
    for rank, each in enumerate(found):
        assert each["extra"] == "of rank 0"
        assert each["keeps its generators"] == (rank == 1)
        assert each["loader"] != "none"
    assert "'loader' differs between ranks" in found[1]["loader"]


def test_on_fewer_ranks_than_have_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One process restores what two ranks have saved, and learns that one's own state is lost."""
    run_ranks(2, "managing:resumed", tmp_path)
    job = Job(0, wraps=PerRank)
    restored = CheckpointManager(tmp_path).restore(job.state)
    assert restored is not None
    assert (restored.extra, job.loader.drawn, job.state["epoch"]) == ("of rank 0", 2, 2)
    assert "'loader' was saved by more ranks; the others' state is not restored" in caplog.text


def test_a_save_on_rank_0_alone_says_where_to_call_it(tmp_path: Path) -> None:
    """Not only what gloo says."""
    error, _ = run_ranks(2, "managing:alone", tmp_path, check=False)
    assert error.startswith("RankLostError")
    assert "save, are made on every rank, not on rank 0 alone" in error


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """Some kills of trainers and writers; ``nox -s soak_manager`` makes a thousand."""
    done = run_script("stress/manager_soak.py", "--kills", "3", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"violations": 0' in done.stdout
