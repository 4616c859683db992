"""At most so many writers of a host write at a time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from nostall._engine import Engine
from nostall._model.jobs import (
    FileImage,
    FileReceipt,
    RankFailed,
    RankReport,
    RankWritten,
    SealTable,
    WriteJob,
)
from nostall._writer.files import perform
from nostall._writer.position import Cancelled, Position
from nostall._writer.turns import turn
from nostall.testing import Hold
from support.ranks import run_ranks
from support.waiting import wait_until

DEADLINE_S = 60
NBYTES = 1 << 20


def job_of(out: Path, files: tuple[FileImage, ...], limit: int) -> WriteJob:
    """A job with a limit."""
    return WriteJob(
        job="job",
        rank=0,
        directory=str(out),
        files=files,
        sync_files=True,
        io_threads=2,
        chunk_nbytes=1 << 16,
        direct=True,
        writers_per_host=limit,
        turn_timeout_s=DEADLINE_S,
    )


class Writer:
    """A writer process of its own, and memory for it to write."""

    def __init__(self) -> None:
        self._engine = Engine()
        (self._process,) = self._engine.writers(1)
        self.pid = self._process.pid
        self._lease = self._engine.lease(NBYTES)

    def begin(
        self, out: Path, name: str, limit: int, hold: Hold | None = None
    ) -> Future[RankReport]:
        """Write three files; stop in the first one if told so."""
        images = tuple(
            FileImage(
                name=f"{name}-{each}",
                nbytes=NBYTES,
                block=self._lease.block.id,
                block_offset=0,
                seals=SealTable(templates=(), blob_offsets=(), template_of_slot=()),
            )
            for each in range(3)
        )
        faults = () if hold is None else (hold.fault.plain,)
        job = job_of(out, images, limit)._replace(job=f"{name}/0", faults=faults)
        return self._process.submit(job, self._lease)

    def cancel(self, name: str) -> None:
        """Give a job up."""
        self._process.cancel(name)

    def close(self) -> None:
        """End the process."""
        self._engine.close()


@contextmanager
def writers(count: int) -> Iterator[list[Writer]]:
    """So many, until the end of the block."""
    started = [Writer() for _ in range(count)]
    try:
        yield started
    finally:
        for each in started:
            each.close()


def receipts_of(report: RankReport) -> tuple[FileReceipt, ...]:
    """Those of a rank that has written."""
    assert isinstance(report, RankWritten), report
    return report.receipts


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """How many of the intervals have an instant in common."""
    return max(sum(begin <= at < end for begin, end in intervals) for at, _ in intervals)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_writers_write_than_the_limit(tmp_path: Path, limit: int) -> None:
    """Each from its first file to its last, of four that begin at the same time, thrice."""
    intervals = []
    with writers(4) as all_of_them:
        for number in range(3):
            reports = [
                each.begin(tmp_path, f"{number}-{rank}", limit)
                for rank, each in enumerate(all_of_them)
            ]
            for report in reports:
                receipts = receipts_of(report.result(DEADLINE_S))
                began_s = min(each.started_s for each in receipts)
                intervals.append((began_s, max(each.finished_s for each in receipts)))
    assert most_at_once(intervals) <= limit
    assert len(os.listdir(tmp_path)) == 4 * 3 * 3


def test_a_writer_that_is_killed_gives_its_turn_back(tmp_path: Path) -> None:
    """The next one writes."""
    with writers(2) as (first, second), Hold("chunk") as hold:
        first.begin(tmp_path, "killed", 1, hold)
        hold.wait_reached()
        waiting = second.begin(tmp_path / "waits", "next", 1)
        wait_until((tmp_path / "waits").exists)
        killed_s = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        receipts = receipts_of(waiting.result(DEADLINE_S))
    assert len(receipts) == 3
    assert min(each.started_s for each in receipts) > killed_s


def test_a_save_that_waits_can_be_given_up(tmp_path: Path) -> None:
    """While another one has the turn; no file of it is left."""
    with writers(2) as (first, second), Hold("chunk") as hold:
        writing = first.begin(tmp_path, "writing", 1, hold)
        hold.wait_reached()
        waiting = second.begin(tmp_path / "waits", "waiting", 1)
        wait_until((tmp_path / "waits").exists)
        second.cancel("waiting")
        report = waiting.result(DEADLINE_S)
        assert isinstance(report, RankFailed)
        assert (report.failure.kind, report.failure.phase) == ("SaveAbortedError", "wait")
        assert os.listdir(tmp_path / "waits") == []
        hold.release()
        assert len(receipts_of(writing.result(DEADLINE_S))) == 3


def test_a_failed_write_gives_its_turn_back() -> None:
    """And one that waits says so."""
    at = Position("/d", cancelled=threading.Event(), on_progress=print, on_created=print)
    with suppress(OSError), turn(1, DEADLINE_S, at):
        assert (at.phase, at.path) == ("open", "/d")
        raise OSError
    with turn(1, DEADLINE_S, at):
        other = Position("/d", cancelled=threading.Event(), on_progress=print, on_created=print)
        with pytest.raises(TimeoutError, match="have not finished in 0 s"), turn(1, 0, other):
            pass
        assert other.phase == "wait"
        other.cancelled.set()
        with pytest.raises(Cancelled), turn(1, DEADLINE_S, other):
            pass


@pytest.mark.parametrize("whose", ["link", "of another user"])
def test_locks_that_others_can_reach_are_refused(tmp_path: Path, whose: str) -> None:
    """Whoever has them could let nobody write; the error names the option."""
    me = os.geteuid() + (whose != "link")
    if whose == "link":
        (tmp_path / f"nostall-writers-{me}").symlink_to(tmp_path)
    with patch("nostall._writer.turns._SHARED", str(tmp_path)), patch("os.geteuid", lambda: me):
        report = perform(job_of(tmp_path / "out", (), limit=1), {})
    assert isinstance(report, RankFailed)
    assert "not a directory of this user" in report.failure.message
    assert report.failure.phase == "wait"
    assert "EngineOptions.writers_per_host" in (report.failure.hint or "")


@pytest.mark.parametrize("way", ["split", "save"])
def test_ranks_take_turns_as_configured(tmp_path: Path, way: str) -> None:
    """``EngineOptions.writers_per_host``, in the background and with ``dcp.save``."""
    ranks = run_ranks(4, "turns:some_saves", tmp_path, way)
    intervals = [(begin, end) for found in ranks for begin, end in found]
    assert len(intervals) == 12
    assert most_at_once(intervals) == 1
