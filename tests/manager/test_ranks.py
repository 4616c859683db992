"""The manager on real ranks: one decides, all learn of errors, each has its own state back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.ranks import RanksFailed, run_ranks, run_script

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have left."""
    return tmp_path_factory.mktemp("managing")


@pytest.fixture(scope="module")
def found(out: Path) -> Found:
    """What each of two ranks reports; one start for all scenarios."""
    return run_ranks(2, "managing:everything", out)


def test_each_rank_continues_with_its_own_state(found: Found) -> None:
    """Extra, data and generators are those of the rank."""
    for rank, facts in enumerate(each["resumed"] for each in found):
        assert facts["extra"] == f"of rank {rank}"
        assert facts["drawn"] == 2
    assert found[0]["resumed"]["random"] != found[1]["resumed"]["random"]
    assert found[0]["resumed"]["torch"] != found[1]["resumed"]["torch"]
    assert found[0]["resumed"]["loader"] != found[1]["resumed"]["loader"]


@pytest.mark.parametrize("way", ["objects", "names"])
def test_sharded_jobs_continue_equally(found: Found, way: str) -> None:
    """FSDP2, into new objects whose optimizer has not begun: losses are equal bit by bit."""
    for each in found:
        losses, expected = each["sharded"][way]
        assert losses == expected


@pytest.mark.parametrize("when", ["first", "later", "write", "handle", "restore"])
def test_a_failure_on_one_rank_is_an_error_on_all(found: Found, when: str) -> None:
    """Of an object when saving, of storage, of an object when restoring."""
    for each in found:
        error = each["failing"][when]
        assert error != "none"
        assert ("No space" if when in ("write", "handle") else "broken") in error


def test_a_failure_costs_one_step(found: Found) -> None:
    """Later saves are committed, and policies count these."""
    assert {each["failing"]["steps"] for each in found} == {"[6]"}


def test_rank_0_chooses_the_step(found: Found) -> None:
    """Others do not look, and its errors are theirs."""
    for each in found:
        assert each["unreadable"]["none"]
        assert each["unreadable"]["named"].startswith("ReadError: step 7 has no complete")
        assert each["unreadable"]["step"] == 1


def test_a_step_that_is_being_removed_can_be_saved_again(found: Found) -> None:
    """Files of the new save are not removed with the old ones."""
    for each in found:
        assert each["saved_again"]["restored"] == 6
        assert each["saved_again"]["steps"][-1] == 6


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_numbers_of_ranks(found: Found, out: Path, ranks: int) -> None:
    """Everything but what differs between ranks; its lack is an error on all."""
    where = out / f"on {ranks}"
    elsewhere = run_ranks(ranks, "managing:elsewhere", where, str(out / "resumed"))
    for rank, each in enumerate(elsewhere):
        assert each["extra"] == f"of rank {rank if rank < 2 else 0}"
        assert each["epoch"] == 2
        assert ("'loader' differs between ranks" in each["loader"]) == (ranks == 3)


def test_a_killed_job_resumes_from_the_last_commit(tmp_path: Path) -> None:
    """SIGKILL of all ranks in the middle of a save; the next job tidies up."""
    with pytest.raises(RanksFailed):
        run_ranks(2, "managing:killed", tmp_path)
    for rank, each in enumerate(run_ranks(2, "managing:resumed_after_kill", tmp_path)):
        assert each["before"] == ["step-000000001", "step-000000002"]
        assert each["step"] == 1
        assert each["weight"] == [float(rank)] * 9
        assert each["after"] == ["step-000000003"]


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    """Some kills of trainers and writers; ``nox -s soak_manager`` makes a thousand."""
    done = run_script("stress/manager_soak.py", "--kills", "6", cwd=tmp_path, timeout_s=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"violations": 0' in done.stdout
