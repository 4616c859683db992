"""A writer process that has ended: whoever sends it a job learns how it ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from nostall._engine import Engine
from nostall._model.jobs import RankFailed, WriteJob
from nostall.core import AsyncCallsQueue
from nostall.testing import Hold, inject, writer_pids
from support.states import read_metadata, schedule, small_state

DEADLINE_S = 30


def test_signals_to_all_processes_of_a_job_end_no_save(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    """As a batch system sends them before it ends a job; the trainer has handlers."""
    with Hold("chunk") as hold, inject(hold.fault):
        schedule(queue, tmp_path, small_state(1))
        hold.wait_reached()
        for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "PROF", "XCPU", "CONT"):
            for pid in writer_pids():
                os.kill(pid, getattr(signal, f"SIG{name}"))
        hold.release()
    queue.wait()
    assert read_metadata(tmp_path).state_dict_metadata


@pytest.mark.parametrize("turn", range(10))
def test_a_job_for_a_process_that_was_killed_says_so(tmp_path: Path, turn: int) -> None:
    """Also if it is sent before anybody has noticed the death; which comes first varies."""
    engine = Engine()
    try:
        writer = engine.writers(1)[0]
        assert writer.wait_ready(DEADLINE_S)
        lease = engine.lease(4096)
        os.kill(writer.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # its parent has noticed already
            os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        job = WriteJob(
            job=f"save/0/{turn}",
            rank=0,
            directory=str(tmp_path),
            files=(),
            sync_files=True,
            io_threads=1,
            chunk_nbytes=4096,
            direct=True,
        )
        report = writer.submit(job, lease).result(DEADLINE_S)
        assert isinstance(report, RankFailed)
        assert report.failure.kind == "WriterDiedError"
        assert "killed by SIGKILL" in report.failure.message
    finally:
        engine.close()
