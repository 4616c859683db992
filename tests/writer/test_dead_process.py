"""A writer process that has ended: whoever sends it a job learns how it ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from nostall._engine import Engine
from nostall._model.jobs import RankFailed, WriteJob

DEADLINE_S = 30


@pytest.mark.parametrize("turn", range(10))
def test_a_job_for_a_process_that_was_killed_says_so(tmp_path: Path, turn: int) -> None:
    """Also if it is sent before anybody has noticed the death; which comes first varies."""
    engine = Engine()
    try:
        writer = engine.writer()
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
