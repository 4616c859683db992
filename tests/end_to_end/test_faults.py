"""Whatever fails, every rank raises soon, the old checkpoint stays, and the next save works."""

from __future__ import annotations

import errno
import os
import select
import signal
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from nostall.core import AsyncCallsQueue
from programs.entry_points import holds
from programs.faults import (
    ALL_FAULTS,
    DEATHS,
    ERRNO_FAULTS,
    RAISING,
    kill_and_wait,
    outcome_of,
)
from programs.faults import WAYS as FAULTY_WAYS
from support import trainers
from support.faults import Fault, Hold, inject, writer_pids
from support.ranks import TESTS, on_ranks
from support.states import WAYS, schedule, small_state

Report = dict[str, Any]
Faults = list[dict[str, Report]]
"""Reports of each rank, by title."""
SOON_S = 20.0
"""A bound for what takes milliseconds, on a machine that is busy with other things."""
DEADLINE_S = 60.0


# --- two ranks ------------------------------------------------------------------------------------


of_writers = on_ranks("faults:writer_scenes")
of_others = on_ranks("faults:other_scenes")
of_all = on_ranks("faults:writer_scenes", "faults:other_scenes")


class Told(NamedTuple):
    """Facts that a failure has to have."""

    attributes: Report
    words: str
    """Part of the text of the error that is raised."""


EFBIG = os.strerror(errno.EFBIG)
BY_FAULT = {
    **{
        name: Told({"kind": "WriteError", "errno": code}, os.strerror(code))
        for name, (_, code) in ERRNO_FAULTS.items()
    },
    "SIGKILL": Told({"kind": "WriterDiedError", "exit_code": -9}, "killed by SIGKILL"),
    "exit 17": Told({"kind": "WriterDiedError", "exit_code": 17}, "exit code 17"),
    "exit just before the report": Told({"kind": "WriterDiedError", "exit_code": 3}, "exit code 3"),
    "an exception that nobody expects": Told({"kind": "WriteError"}, "nobody expects this"),
}
REFUSED = {"kind": "WriteError", "phase": "commit", "errno": errno.EISDIR}
ELSEWHERE = {"kind": "RankMismatchError"}
BY_SCENE = {
    # No rank waits for one that could not take its snapshot, or plans with its next save. Where a
    # planner does not notice that values are missing, nothing is committed either.
    "no memory, blocking, DefaultSavePlanner": Told({"kind": "ReservationError"}, EFBIG),
    "no memory, overlapped, DefaultSavePlanner": Told({"kind": "ReservationError"}, EFBIG),
    "no memory, blocking, OnlyTensors": Told({"kind": "StagingError"}, EFBIG),
    "no memory, overlapped, OnlyTensors": Told({"kind": "StagingError"}, EFBIG),
    # A path with each rank's own time of day in it makes no checkpoint of half the files.
    **{f"directories, {way}": Told(ELSEWHERE, f"/{way} 1") for way in FAULTY_WAYS},
    "commit": Told(REFUSED, "/commit/.metadata"),
    "commit over another": Told(REFUSED, "/commit over another/.metadata"),
    # Before or after ranks have planned together, and where they no longer talk while planning.
    **{
        f"{what}, {cached=}": Told({}, f"LookupError: {what} today")
        for what, cached in product(("no plan", "no data"), (False, True))
    },
    "save_now": BY_FAULT["ENOSPC at chunk"],
    "save_async": BY_FAULT["SIGKILL"],
    "stopped": Told({"kind": "SaveTimeoutError"}, " 2 s"),
}
OF_RANK_0 = ("directories", "commit")


def failure_told(report: Report, told: Told, *, rank: int) -> Report:
    """The only failure there is, of this rank, which is told soon and has these facts."""
    assert report["failures"].keys() == {str(rank)}
    failure: Report = report["failures"][str(rank)]
    expected = {**told.attributes, "rank": rank}
    assert {name: failure[name] for name in expected} == expected
    for words in (told.words, f"rank={rank}", failure["path"] or ""):
        assert words in report["text"]
    assert report["seconds"] < SOON_S
    return failure


@of_writers
@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_a_fault_of_one_ranks_writer_is_raised_on_every_rank_with_rank_file_and_cause(
    found: Faults, fault: str
) -> None:
    """Within seconds, whichever rank it is, and whether the ranks wait or poll."""
    for reports, title in product(found, (fault, f"{fault} over another")):
        victim = reports[title]["victim"]
        failure = failure_told(reports[title], BY_FAULT[fault], rank=victim)
        name = Path(failure["path"]).name
        assert (name[:5], name[-7:]) == (f"__{victim}_0", ".distcp")


@of_others
@pytest.mark.parametrize("title", BY_SCENE)
def test_a_failure_of_one_rank_is_raised_on_every_rank(found: Faults, title: str) -> None:
    """Whatever fails there; nothing is committed, and an earlier checkpoint still loads."""
    rank = 0 if title.startswith(OF_RANK_0) else 1
    for reports in found:
        report = reports[title]
        failure_told(report, BY_SCENE[title], rank=rank)
        assert report.get("previous loads", True) is True
        assert report.get("committed", False) is ("over another" in title)
        assert "over another" in title or report.get("files", []) == []
        assert title != "stopped" or report["seconds"] > 1.5


@of_others
def test_the_cause_of_a_refused_publication_is_the_systems_error(found: Faults) -> None:
    """On the rank itself, whose directory has something else of that name."""
    assert "IsADirectoryError" in found[0]["commit"]["failures"]["0"]["causes"]


@of_writers
def test_frameworks_find_their_words_on_the_coordinator(found: Faults) -> None:
    """Text that says ``Worker failure`` is raised on the coordinator, whichever rank failed."""
    assert all("Worker failure" in found[0][title]["text"] for title in ALL_FAULTS)


@of_writers
@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_a_failed_save_leaves_no_file_in_a_fresh_directory(found: Faults, fault: str) -> None:
    """No metadata and no shard file of either rank is left."""
    for reports in found:
        assert (reports[fault]["committed"], reports[fault]["files"]) == (False, [])


@of_writers
@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_a_failed_save_over_a_checkpoint_leaves_that_checkpoint(found: Faults, fault: str) -> None:
    """The previous checkpoint loads bit for bit, and nothing but its files is there."""
    for reports in found:
        report = reports[f"{fault} over another"]
        assert report["previous loads"] is True
        assert report["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@of_all
def test_the_save_after_a_failed_one_works(found: Faults) -> None:
    """After any failure, a save of that structure to that directory loads bit for bit."""
    for reports in found:
        assert [title for title, report in reports.items() if not report["next loads"]] == []


@of_all
def test_finalize_functions_never_run_after_a_failure(found: Faults) -> None:
    """A function that would have announced the failed checkpoint is not called on any rank."""
    for reports in found:
        assert [title for title, report in reports.items() if report.get("finalized")] == []


@on_ranks("faults:saves_begun_without_their_group")
def test_an_async_save_whose_process_group_is_destroyed_fails(found: list[Report]) -> None:
    """Ranks that were to save together do not save alone; who was alone is not concerned."""
    for rank, reports in enumerate(found):
        for title in ("blocking", "overlapped", "a group"):
            report = reports[title]
            (failure,) = report["failures"].values()
            assert (failure["kind"], failure["rank"]) == ("RankLostError", rank)
            assert "the process group of this save (2 ranks)" in failure["message"]
            assert "before destroy_process_group()" in report["text"]
            assert report["committed"] is (title == "blocking")
        assert reports["previous loads"] is True
        for title in ("alone", "in a group of one"):
            assert reports[f"{title} {rank}"]["failures"] == {}
            assert reports[f"{title} {rank}"]["committed"] is True


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        *product(["split", "dcp.async_save"], [*DEATHS, "ENOSPC at chunk"]),
        # A synchronous save writes in the trainer, so there is no writer process that could die.
        *product(["dcp.save"], [*RAISING, "ENOSPC at chunk"]),
    ],
)
def test_a_fault_in_a_single_process_is_raised_and_harms_nothing(
    tmp_path: Path, way: str, fault: str
) -> None:
    """The failure names file and cause, the directory stays empty, and the next save works."""
    path = tmp_path / "saved"
    with inject(ALL_FAULTS[fault]):
        report = outcome_of(lambda: WAYS[way](path, small_state(2)))
    failure = failure_told(report, BY_FAULT[fault], rank=0)
    assert failure["path"].startswith(f"{path}/__0_")
    assert os.listdir(path) == []
    path.rmdir()
    WAYS[way](path, small_state(3))
    assert holds(path, 3)


def test_a_fault_in_one_of_several_files_names_that_file(tmp_path: Path) -> None:
    """Where only one file's storage fails, the error has its path, and the other files go, too."""
    with AsyncCallsQueue() as queue:
        with inject(Fault.errno("chunk", errno.ENOSPC, file="__0_2")):
            schedule(queue, tmp_path / "saved", small_state(1), thread_count=4)
        report = outcome_of(queue.wait)
    failure = failure_told(report, BY_FAULT["ENOSPC at chunk"], rank=0)
    assert failure["path"] == str(tmp_path / "saved" / "__0_2.distcp")
    assert os.listdir(tmp_path / "saved") == []


def test_a_save_right_after_the_writers_death_gets_a_new_writer(tmp_path: Path) -> None:
    """A writer that ended a moment ago gets no save, whether or not its end was noticed yet."""
    seen = set()
    with AsyncCallsQueue() as queue:
        for number in range(10):
            (pid,) = writer_pids()
            seen.add(pid)
            kill_and_wait(pid)
            schedule(queue, tmp_path / f"{number}", small_state(number))
            queue.wait()
            assert holds(tmp_path / f"{number}", number)
    assert len(seen) == 10


def test_signals_to_the_writer_do_not_disturb_a_save(tmp_path: Path) -> None:
    """The writer ignores signals that schedulers send to all processes before a job ends."""
    with Hold("chunk") as hold, AsyncCallsQueue() as queue:
        hold.stop(schedule, queue, tmp_path / "saved", small_state(1))
        before = writer_pids()
        fatal = ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "XCPU"]
        for name in (*fatal, "INT", "CONT", "WINCH"):
            os.kill(before[0], signal.Signals[f"SIG{name}"])
        hold.release()
        queue.wait()
        assert writer_pids() == before
    assert holds(tmp_path / "saved", 1)


# --- trainers that are interrupted, killed or limited ---------------------------------------------


def trainer(function: str, out: Path) -> AbstractContextManager[trainers.Program]:
    """A function of ``programs.faults`` in a process of its own."""
    faults = TESTS / "programs" / "faults.py"
    return trainers.running(function, str(out), program=faults, TMPDIR=str(out))


def in_dev_shm(pid: int) -> list[str]:
    """Files in ``/dev/shm`` that a process has open or mapped."""
    process = psutil.Process(pid)
    paths = [file.path for file in process.open_files()]
    paths += [str(mapping[0]) for mapping in process.memory_maps(grouped=True)]
    return [path for path in paths if path.startswith("/dev/shm")]


def test_a_killed_trainer_leaves_nothing_behind(tmp_path: Path) -> None:
    """The writer is gone in five seconds, though forked children hold descriptors of it."""
    with trainer("stands_in_the_middle_of_a_save", tmp_path) as trained:
        told = trained.hear()
        children = [psutil.Process(pid) for pid in told["children"]]
        writer = os.pidfd_open(told["writer"])
        try:
            assert psutil.Process(told["writer"]).ppid() == told["pid"]
            assert in_dev_shm(told["writer"]) == in_dev_shm(told["pid"]) == []
            trained.process.kill()
            assert select.select([writer], [], [], 5)[0]
            assert len(children) == 2
            assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)
        finally:
            os.close(writer)
            for child in children:
                child.kill()
    assert not (tmp_path / "checkpoint" / ".metadata").exists()


def test_ctrl_c_does_not_kill_the_save_in_flight(tmp_path: Path) -> None:
    """SIGINT for its process group is the trainer's; the writer goes on, and the save commits."""
    with trainer("is_interrupted", tmp_path) as trained:
        os.killpg(trained.hear()["pid"], signal.SIGINT)
        assert trained.hear() == {"interrupted": True, "same_writer": True}
        assert trained.process.wait(DEADLINE_S) == 0
    assert holds(tmp_path / "checkpoint", 1)


def test_a_forked_child_that_exits_does_not_disturb_a_save(tmp_path: Path) -> None:
    """Forked children own nothing of nostall and leave as they like; the same writer goes on."""
    with trainer("forks", tmp_path) as trained:
        assert trained.hear() == {"codes": [0, 0, 0], "same_writer": True}
        assert trained.process.wait(DEADLINE_S) == 0
    assert holds(tmp_path / "held", 1)
    assert holds(tmp_path / "next", 2)
