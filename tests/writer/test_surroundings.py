"""The writer process where the interpreter, the locale, the user or the system are unusual."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from nostall._engine import Engine
from nostall._model.jobs import RankFailed, WriteJob
from nostall._model.progress import Progress
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from programs.surroundings import state
from support import loaded
from support.faults import writer_pids
from support.states import blobs
from support.trainers import PROGRAM, running, told
from support.waiting import wait_until

DEADLINE_S = 60.0

needs_known_calls = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="other numbers of system calls"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def expected(tmp_path: Path) -> Any:
    writer = FileSystemWriterAsync(tmp_path / "expected")
    dcp.save(state(), storage_writer=writer, no_dist=True)
    return blobs(tmp_path / "expected")


def test_background_processes_have_names(tmp_path: Path) -> None:
    """``top`` and ``ps`` tell them apart, and from the trainer."""
    path = tmp_path / "step"
    writer = FileSystemWriterAsync(path, local_staging_dir=tmp_path / "local")
    dcp.save(state(), storage_writer=writer, no_dist=True)
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(AsyncRequest(torch.save, (state(), tmp_path / "file"), []))
        queue.wait()
        assert writer_pids()

        def names() -> set[str]:
            children = [child.pid for child in psutil.Process().children()]
            return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}

        wait_until(lambda: names() >= {"nostall-writer", "nostall-worker", "nostall-tier"})


# --- names of files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latin1(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process in a locale whose encoding is Latin-1."""
    locales = tmp_path_factory.mktemp("locales")
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(locales / "latin1")],
        capture_output=True,
        check=False,
    )
    if not (locales / "latin1").exists():
        pytest.skip(f"no Latin-1 locale can be made: {made.stderr.decode()}")
    return {"LOCPATH": str(locales), "LC_ALL": "latin1"}


@pytest.mark.parametrize(("utf8", "encoding"), [("1", "utf-8"), ("0", "latin-1")])
def test_a_name_means_the_same_bytes_to_trainer_and_writer(
    tmp_path: Path, latin1: dict[str, str], utf8: str, encoding: str
) -> None:
    """With and without UTF-8 mode, in a locale with another encoding."""
    path = os.fsencode(tmp_path) + "/é".encode(encoding)
    assert told("saves", path, python=(sys.executable, "-X", f"utf8={utf8}"), **latin1) == {}
    assert blobs(Path(os.fsdecode(path))) == expected(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


# --- programs that are no interpreter -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "content", "remedy", "starts"),
    [
        ("frozen", "", "multiprocessing.set_executable()", 1),
        ("embedded", "", "multiprocessing.set_executable()", 2),
        ("embedded", "true", "`exec`", 1),
        ("embedded", f'{sys.executable} "$@"; true', "`exec`", 1),
    ],
    ids=["frozen", "embedding Python", "another program", "a script that does not exec"],
)
def test_a_program_that_is_no_interpreter_is_named_with_the_remedy(
    tmp_path: Path, kind: str, content: str, remedy: str, starts: int
) -> None:
    """It would train again, without end: a frozen one is not started, an embedding one says so."""
    program, log = tmp_path / "program", tmp_path / "starts"
    itself = f"exec {' '.join(loaded.python())} -W ignore {PROGRAM} saves_as $0.saved $0 {kind}"
    program.write_text(f"#!/bin/sh\n{content or itself} >$0.nested\n")
    program.chmod(0o700)
    failed = told("saves_as", str(tmp_path / "saved"), str(program), kind, STARTS=str(log))
    assert failed["kind"] == "WriterDiedError"
    assert str(program) in failed["text"]
    assert remedy in failed["text"]
    assert log.read_text() == "started\n" * starts


def test_a_frozen_application_may_name_an_interpreter(tmp_path: Path) -> None:
    """With ``multiprocessing.set_executable``, as for multiprocessing."""
    path, log = tmp_path / "saved", str(tmp_path / "starts")
    assert told("saves_as", str(path), "/bin/false", "frozen", sys.executable, STARTS=log) == {}
    assert blobs(path) == expected(tmp_path)


# --- deadlines ------------------------------------------------------------------------------------


def job_in(path: Path, **changes: Any) -> WriteJob:
    return WriteJob(
        job="save/0/0",
        rank=0,
        directory=str(path),
        files=(),
        sync_files=True,
        io_threads=1,
        chunk_nbytes=4096,
        direct=True,
    )._replace(**changes)


def of_a_save() -> Progress:
    return Progress(path="/checkpoints/1", rank=0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One whose saves are given up after a second."""
    made = Engine(EngineOptions(save_timeout_s=1.0))
    yield made
    made.close()


@pytest.mark.parametrize("turn", range(10))
def test_a_job_for_a_process_that_was_killed_says_so(
    engine: Engine, tmp_path: Path, turn: int
) -> None:
    """Also if it is sent before anybody has noticed the death; which comes first varies."""
    writer = engine.writer()
    assert writer.wait_ready(DEADLINE_S)
    os.kill(writer.pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # its parent has noticed already
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
    report = writer.submit(job_in(tmp_path), engine.lease(4096), of_a_save()).result(DEADLINE_S)
    assert isinstance(report, RankFailed)
    assert report.failure.kind == "WriterDiedError"
    assert "killed by SIGKILL" in report.failure.message


def test_a_process_that_does_not_read_holds_a_call_no_longer_than_its_deadline(
    engine: Engine, tmp_path: Path
) -> None:
    """It is killed then, and the save fails."""
    writer = engine.writer()
    assert writer.wait_ready(DEADLINE_S)
    os.kill(writer.pid, signal.SIGSTOP)
    began = time.monotonic()
    long = job_in(tmp_path, stream=bytes(1 << 24))
    report = writer.submit(long, engine.lease(4096), of_a_save()).result(DEADLINE_S)
    assert time.monotonic() - began < 20
    assert isinstance(report, RankFailed)
    assert report.failure.kind == "WriterDiedError"
    assert "no longer receives messages" in report.failure.message


def test_a_save_survives_a_suspension_that_is_longer_than_its_deadline(tmp_path: Path) -> None:
    """Its files are written, and their answer has come, when the trainer looks again."""
    with running("is_suspended", str(tmp_path / "saved")) as program:
        held = program.hear()
        os.kill(held["trainer"], signal.SIGSTOP)
        with open(held["go"], "wb") as go:
            go.write(bytes(4096))
        time.sleep(1.5)  # longer than its deadline
        os.kill(held["trainer"], signal.SIGCONT)
        assert program.hear() == {"failed": None}
    assert blobs(tmp_path / "saved") == expected(tmp_path)


# --- users and what the system refuses ------------------------------------------------------------


def test_a_trainer_that_has_become_another_user_gets_a_new_writer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one ends, but only when it has written what it has."""
    old = engine.writer()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    new = engine.writer()
    assert new is not old
    assert not old.alive
    assert engine.writer() is new


@pytest.mark.parametrize(
    "lack",
    [
        "os.memfd_create",
        pytest.param("pidfd_open", marks=needs_known_calls),
        pytest.param("/proc", marks=needs_root),
    ],
)
def test_a_save_works_without(tmp_path: Path, lack: str) -> None:
    """Pythons built with an old glibc, old container profiles, and jails lack one of these."""
    assert told("saves", str(tmp_path / "saved"), lack) == {}
    assert blobs(tmp_path / "saved") == expected(tmp_path)


@needs_known_calls
@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        ("memfd_create", "ReservationError", "memfd_create"),
        ("fallocate", "ReservationError", "fallocate"),
        ("socketpair", "WriterDiedError", "pair of sockets"),
    ],
)
def test_a_refused_call_is_a_typed_error_with_the_next_step(
    tmp_path: Path, call: str, kind: str, said: str
) -> None:
    """And no bare ``PermissionError``."""
    failed = told("saves", str(tmp_path / "saved"), call)
    assert failed["kind"] == kind
    assert os.strerror(1) in failed["text"]
    assert said in failed["text"]
