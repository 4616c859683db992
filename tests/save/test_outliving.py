"""A save whose trainer dies: its writer process finishes it, and the next job commits it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import nostall
from nostall._cli import recover
from nostall._model.completion import is_completion, record_name_in
from nostall._save import leftovers
from nostall.cli import main
from nostall.core import AsyncCallsQueue
from nostall.errors import DamagedCheckpointError, OptionError, ReadError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.recovery import RecoveryState
from nostall.testing import Hold, inject
from programs.outliving import LINGER_S
from support import loaded
from support.object_store import S3Server
from support.ranks import TESTS, RanksFailed, run_ranks
from support.states import read_metadata, schedule, shard_files, small_state
from support.waiting import wait_until

PATIENCE_S = 60.0


def state_at(path: Path) -> dict[str, Any]:
    """What stock loads from a checkpoint of ``small_state``, whole."""
    assert nostall.verify(path).ok
    found = small_state(0)
    dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, other[name])
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
    )


def records_in(path: Path) -> list[Path]:
    return [each for each in path.iterdir() if is_completion(each.name)]


@dataclass
class Trainer:
    """A process that has scheduled a save, and its writer process."""

    process: subprocess.Popen[str]
    writer: psutil.Process

    def kill(self) -> None:
        """Kill the trainer; return when it has ended."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def writer_has_ended(self) -> bool:
        """Whether the writer process has; nobody may have asked how."""
        try:
            return self.writer.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@contextmanager
def trainer(path: Path | str, *holds: Hold, **options: Any) -> Iterator[Trainer]:
    """A trainer that has scheduled a save; both processes are gone after the block."""
    faults = json.dumps([hold.fault.plain for hold in holds])
    command = [*loaded.python(ranks=True), "-W", "ignore", str(TESTS / "programs" / "outliving.py")]
    process = subprocess.Popen(
        [*command, str(path), faults, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *_import_path()])},
    )
    writers: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        writers = list(map(psutil.Process, json.loads(line)))
        (writer,) = writers
        yield Trainer(process, writer)
    finally:
        process.kill()
        process.communicate()
        for each in writers:
            with suppress(psutil.NoSuchProcess):
                each.kill()
                each.wait(PATIENCE_S)


def _import_path() -> list[str]:
    return [each for each in [os.environ.get("PYTHONPATH")] if each]


# --- a death ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "finalise"])
def test_a_trainer_that_was_only_thought_dead_leaves_what_was_recovered(
    tmp_path: Path, how: str
) -> None:
    """Its node was away, and the next job has recovered the save meanwhile."""
    path = tmp_path / "saved"
    queue = AsyncCallsQueue()
    schedule(queue, path, small_state(7), linger_s=LINGER_S)
    wait_until(lambda: any(map(record_name_in, os.listdir(path))))
    code = f"import nostall; print(nostall.recover({str(path)!r}).state.name)"
    command = [*loaded.python(), "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["COMMITTED"]
    if how == "finalise":
        queue.wait()
    queue.close(abort=True)
    assert is_same(state_at(path), small_state(7))


class Crowded:
    """A process that has as many files open as it may."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def memfd_create(self, *_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_save_that_cannot_be_sent_ends_no_other(tmp_path: Path, queue: AsyncCallsQueue) -> None:
    """They share a writer process, which knows nothing of it."""
    other = AsyncCallsQueue()
    with Hold("report") as hold:
        with inject(hold.fault):
            schedule(queue, tmp_path / "saved", small_state(1))
            hold.wait_reached()
        with patch("nostall._writer.handle.os", Crowded()):
            schedule(other, tmp_path / "lost", small_state(2), linger_s=LINGER_S)
        hold.release()
    with pytest.raises(CheckpointException, match="Too many open files"):
        other.wait()
    other.close()
    queue.wait()
    assert is_same(state_at(tmp_path / "saved"), small_state(1))


@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("point", ["start", "report"])
def test_a_killed_trainers_save_is_finished_and_committed(
    tmp_path: Path, point: str, staging: str
) -> None:
    """Before its files are written, and after; byte for byte as it would have been."""
    path = tmp_path / "step-7"
    with Hold(point) as hold, trainer(path, hold, staging=staging) as process:
        hold.wait_reached()
        process.kill()
        found = nostall.recover(path)
        if point == "start":
            assert found.state is RecoveryState.NOTHING
            assert not (path / ".metadata").exists()
            hold.release()
            found = nostall.recover(path, wait_s=PATIENCE_S)
    assert (found.state, found.missing_ranks) == (RecoveryState.COMMITTED, ())
    assert is_same(state_at(path), small_state(7))
    assert len(os.listdir(path)) == 2
    assert nostall.recover(path).state is RecoveryState.NOTHING
    dcp.save(small_state(7), storage_writer=FileSystemWriterAsync(tmp_path / "other"), no_dist=True)
    assert [*shard_files(path).values()] == [*shard_files(tmp_path / "other").values()]
    assert _judged(read_metadata(path)) == _judged(read_metadata(tmp_path / "other"))


def _judged(metadata: Metadata) -> tuple[Any, ...]:
    places = {  # the names of files are unique
        index: replace(info, relative_path="") for index, info in metadata.storage_data.items()
    }
    return metadata.state_dict_metadata, places, metadata.version


def test_a_save_to_an_object_store_is_finished_and_committed(s3: S3Server) -> None:
    """Nothing else is left there, and no upload."""
    bucket = s3.new_bucket()
    url = f"s3://{bucket}/run/step-7"
    with Hold("start") as hold, trainer(url, hold) as process:
        hold.wait_reached()
        process.kill()
        hold.release()
        assert nostall.recover(url, wait_s=PATIENCE_S).state is RecoveryState.COMMITTED
    found = small_state(0)
    nostall.load(found, url)
    assert is_same(found, small_state(7))
    assert nostall.verify(url).ok
    assert (len(s3.keys(bucket)), s3.unfinished(bucket)) == (2, [])


@pytest.mark.parametrize("point", ["start", "report"])
def test_the_end_of_the_time_after_sigterm_leaves_the_save(tmp_path: Path, point: str) -> None:
    """To the writer process, whether it has finished or not."""
    path = tmp_path / "step-7"
    with Hold(point) as hold, trainer(path, hold, drains=True) as process:
        hold.wait_reached()
        process.process.terminate()
        assert process.process.wait(PATIENCE_S) == 143
        hold.release()
        assert nostall.recover(path, wait_s=PATIENCE_S).state is RecoveryState.COMMITTED
    assert is_same(state_at(path), small_state(7))


def test_whoever_reads_the_trainers_output_does_not_wait_for_the_writer(tmp_path: Path) -> None:
    """A launcher waits until all processes have closed its pipe."""
    with Hold("start") as hold, trainer(tmp_path / "step-7", hold) as process:
        hold.wait_reached()
        process.kill()
        process.process.communicate(timeout=PATIENCE_S)
        assert not process.writer_has_ended()


def test_a_trainer_killed_before_its_writer_process_has_started(tmp_path: Path) -> None:
    """What it has sent is enough."""
    path = tmp_path / "step-7"
    with trainer(path) as process:
        process.kill()
        assert nostall.recover(path, wait_s=PATIENCE_S).state is RecoveryState.COMMITTED
    assert is_same(state_at(path), small_state(7))


@pytest.mark.parametrize("linger_s", [0, 0.1])
def test_a_writer_process_lingers_no_longer_than_it_may(tmp_path: Path, linger_s: float) -> None:
    """Without ``linger_s``, not at all."""
    path = tmp_path / "step-7"
    with Hold("start") as hold, trainer(path, hold, linger_s=linger_s) as process:
        hold.wait_reached()
        process.kill()
        wait_until(process.writer_has_ended)
        assert nostall.recover(path).state is RecoveryState.NOTHING
    assert not records_in(path)


# --- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [1, 2, 4, 5])
@pytest.mark.parametrize("ranks_with_items", [1, 2])
def test_what_all_ranks_have_finished_is_committed(
    tmp_path: Path, ranks_with_items: int, saves: int
) -> None:
    """Planned together, or of a known structure; to a new directory, or over a checkpoint."""
    out, last = tmp_path / "out", saves - 1
    with pytest.raises(RanksFailed):
        run_ranks(2, "outliving:killed", out, str(ranks_with_items), str(saves))
    path = out / ("last" if last % 2 else f"step-{last}")
    assert nostall.recover(path, wait_s=PATIENCE_S).state is RecoveryState.COMMITTED
    assert nostall.verify(path).ok
    found = {f"w{rank}": torch.zeros(1000) for rank in range(ranks_with_items)}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(each, torch.full((1000,), float(last))) for each in found.values())
    assert len(os.listdir(path)) == 1 + ranks_with_items  # replaced files are gone


def test_a_rank_without_its_files_prevents_the_commit(tmp_path: Path) -> None:
    """And is named."""
    path = tmp_path / "out" / "step-0"
    with pytest.raises(RanksFailed):
        run_ranks(2, "outliving:killed_with_a_writer", tmp_path / "out")
    wait_until(lambda: any("-0-2" in each.name for each in records_in(path)))
    for record in records_in(path):  # the process of rank 1 may have died after its record
        if "-1-2" in record.name:
            record.unlink()
    found = nostall.recover(path)
    assert (found.state, found.missing_ranks) == (RecoveryState.INCOMPLETE, (1,))
    assert not (path / ".metadata").exists()
    nostall.remove_checkpoint(path)
    assert not path.exists()


def test_a_change_that_other_ranks_do_not_know_is_not_recovered(tmp_path: Path) -> None:
    """The metadata that they have planned lack it."""
    path = tmp_path / "out" / "step-3"
    with pytest.raises(RanksFailed):
        run_ranks(2, "outliving:killed_after_a_change", tmp_path / "out")
    wait_until(lambda: any("-0-2" in each.name for each in records_in(path)))
    found = nostall.recover(path)
    assert (found.state, found.missing_ranks) == (RecoveryState.INCOMPLETE, (1,))


def test_an_exception_on_one_rank_leaves_its_save_to_the_writer_process(tmp_path: Path) -> None:
    """The other ranks do not take part in committing it any more."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("reached", "go"):
        os.mkfifo(out / name)
    go = os.open(out / "go", os.O_RDWR)
    reached = os.open(out / "reached", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(RanksFailed, match="left to its writer process"):
            run_ranks(2, "outliving:raised_on_one_rank", out)
        assert nostall.recover(out / "step-0").state is RecoveryState.INCOMPLETE
        os.write(go, b"1" * 4096)
        found = nostall.recover(out / "step-0", wait_s=PATIENCE_S)
    finally:
        os.close(go)
        os.close(reached)
    assert found.state is RecoveryState.COMMITTED


def test_a_save_that_one_rank_has_given_up_alone_mixes_no_saves(tmp_path: Path) -> None:
    """Ranks count their saves; after that they count differently, until they plan together."""
    out = tmp_path / "out"
    with pytest.raises(RanksFailed):
        run_ranks(2, "outliving:killed_after_a_save_of_one_rank", out)
    found = nostall.recover(out / "last")
    assert found.state is not RecoveryState.COMMITTED
    assert not (out / "last" / ".metadata").exists()


@pytest.mark.parametrize("how", ["queue", "manager"])
def test_the_usual_end_of_a_job_that_has_lost_a_rank_keeps_the_save(
    tmp_path: Path, how: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(RanksFailed, match="left to its writer process"):
        run_ranks(2, "outliving:closed_without_a_rank", out, how)
    path = out / "steps" / "step-000000000"
    assert nostall.recover(path, wait_s=PATIENCE_S).state is RecoveryState.COMMITTED
    assert nostall.verify(path).ok


def test_saves_that_are_given_up_leave_nothing(tmp_path: Path) -> None:
    """On a rank without items, neither."""
    assert run_ranks(2, "outliving:given_up", tmp_path / "out") == [[[], []], [[], []]]


def test_a_save_that_failed_on_one_rank_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, "outliving:failed_on_one_rank", tmp_path / "out") == [[], []]


def test_a_manager_resumes_from_the_step_that_outlived_its_job(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RanksFailed):
        run_ranks(2, "outliving:managed", out)
    assert run_ranks(2, "outliving:resumed", out) == [[3.0, 3.0], [3.0, 3.0]]
    assert sorted(os.listdir(out / "steps")) == [f"step-{step:09d}" for step in range(5)]


# --- what is left ---------------------------------------------------------------------------------


@pytest.fixture
def left(tmp_path: Path, queue: AsyncCallsQueue) -> Path:
    """A directory as a death of all leaves it just before the commit."""
    path = tmp_path / "left"
    with Hold("report") as hold, inject(hold.fault):
        schedule(queue, tmp_path / "done", small_state(1), linger_s=LINGER_S)
        hold.wait_reached()
        shutil.copytree(tmp_path / "done", path)
        hold.release()
    queue.wait()
    assert records_in(path)
    assert not records_in(tmp_path / "done")
    return path


def test_a_later_checkpoint_stays(left: Path) -> None:
    """And the files of the save that it supersedes are removed."""
    dcp.save(small_state(2), storage_writer=FileSystemWriterAsync(left), no_dist=True)
    before = (left / ".metadata").read_bytes()
    assert nostall.recover(left).state is RecoveryState.NOTHING
    assert (left / ".metadata").read_bytes() == before
    assert is_same(state_at(left), small_state(2))
    assert len(os.listdir(left)) == 2


def test_a_later_checkpoint_that_has_replaced_the_files_stays(left: Path) -> None:
    """As where the save was committed early, and its trainer has died before it knew."""
    files = list(left.glob("*.distcp"))
    dcp.save({"x": torch.ones(3)}, storage_writer=FileSystemWriterAsync(left), no_dist=True)
    for path in files:
        path.unlink()
    assert nostall.recover(left).state is RecoveryState.NOTHING
    assert nostall.verify(left).ok


def test_an_older_checkpoint_is_replaced(left: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    with Hold("report") as hold, trainer(older) as first:
        first.kill()
        nostall.recover(older, wait_s=PATIENCE_S)
        assert is_same(state_at(older), small_state(7))
        with trainer(older, hold) as second:
            hold.wait_reached()
            second.kill()
            assert nostall.recover(older).state is RecoveryState.COMMITTED
    assert is_same(state_at(older), small_state(7))
    assert len(os.listdir(older)) == 2


def test_a_death_right_after_the_commit_is_no_second_commit(left: Path, tmp_path: Path) -> None:
    """The records of a committed checkpoint are removed."""
    shutil.copy(tmp_path / "done" / ".metadata", left)
    before = (left / ".metadata").read_bytes()
    assert nostall.recover(left).state is RecoveryState.COMMITTED
    assert (left / ".metadata").read_bytes() == before
    assert not records_in(left)


def test_damage_is_found_and_nothing_is_committed(left: Path) -> None:
    """Of the record at any place, or of a file."""
    (record,) = records_in(left)
    content = record.read_bytes()
    places = [*range(0, len(content), len(content) // 40), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 0x04
        record.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError):
            nostall.recover(left)
    for shorter in (0, 1, len(content) // 2, len(content) - 1):
        record.write_bytes(content[:shorter])
        with pytest.raises(DamagedCheckpointError):
            nostall.recover(left)
    record.write_bytes(content)
    (shard,) = left.glob("*.distcp")
    shard.unlink()
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        nostall.recover(left)
    assert not (left / ".metadata").exists()


def test_records_cannot_lead_out_of_the_directory(left: Path, tmp_path: Path) -> None:
    (record,) = records_in(left)
    (shard,) = left.glob("*.distcp")
    outside = "outside.distcp".rjust(len(shard.name) - len("../"), "o")
    (tmp_path / outside).write_bytes(shard.read_bytes())
    hostile = record.read_bytes()[:-8].replace(shard.name.encode(), f"../{outside}".encode())
    record.write_bytes(hostile + b"%08x" % zlib.crc32(hostile))
    with pytest.raises(DamagedCheckpointError):
        nostall.recover(left)
    assert (tmp_path / outside).exists()
    assert not (left / ".metadata").exists()


@pytest.mark.parametrize(
    "name",
    [
        ".complete-1-0-0-1",
        ".complete-000000000000000g-0-0-1",
        ".complete-0000000000000001-00-0-1",
        ".complete-0000000000000001-0-1-1",
        ".complete",
        "__0_0.distcp",
    ],
)
def test_other_names_are_no_records(name: str) -> None:
    assert record_name_in(name) is None


def test_other_records_beside_those_of_a_complete_save_are_no_obstacle(left: Path) -> None:
    """Whatever they are: a directory, a link to nowhere, empty, or of a million ranks."""
    (left / ".complete-00000000000000ff-0-0-1").mkdir()
    (left / ".complete-00000000000000ff-1-0-1").symlink_to("/nowhere")
    (left / ".complete-00000000000000ff-2-0-2").touch()
    (left / ".complete-00000000000000ff-3-0-999999999").touch()
    assert nostall.recover(left).state is RecoveryState.COMMITTED
    assert is_same(state_at(left), small_state(1))


def test_the_ranks_that_a_record_claims_take_no_memory(left: Path) -> None:
    (record,) = records_in(left)
    record.rename(record.with_name(f"{record.name[:-1]}999999999"))
    found = nostall.recover(left)
    assert found.state is RecoveryState.INCOMPLETE
    assert found.missing_ranks == tuple(range(1, 101))


def test_storage_that_does_not_answer_loses_nothing(left: Path, tmp_path: Path) -> None:
    """A record is left beside a committed checkpoint that cannot be read at present."""
    (record,) = records_in(left)
    record.rename(record.with_name(f"{record.name[:-1]}2"))
    shutil.copy(tmp_path / "done" / ".metadata", left)
    away = OSError(errno.EIO, os.strerror(errno.EIO), str(left / ".metadata"))
    with patch.object(leftovers, "open_to_read", side_effect=away), suppress(ReadError):
        nostall.recover(left)
    assert is_same(state_at(left), small_state(1))
    os.utime(left / ".metadata")
    assert nostall.recover(left).state is RecoveryState.NOTHING
    assert len(os.listdir(left)) == 2


def test_of_two_saves_under_way_to_one_directory_the_first_can_be_recovered(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    """Nobody could tell later which was the last."""
    with Hold("report") as hold, inject(hold.fault):
        for seed in (1, 2):
            schedule(queue, tmp_path / "last", small_state(seed), linger_s=LINGER_S)
        hold.wait_reached()
        shutil.copytree(tmp_path / "last", tmp_path / "left")
        hold.release()
        queue._calls[1].outcome.result(PATIENCE_S)
        assert len(records_in(tmp_path / "last")) == 1
    assert nostall.recover(tmp_path / "left").state is RecoveryState.COMMITTED
    assert is_same(state_at(tmp_path / "left"), small_state(1))


# --- use ------------------------------------------------------------------------------------------


def test_the_command_recovers_one_checkpoint_or_all_below_a_directory(
    left: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(left, tmp_path / "root" / "step-1")
    shutil.copytree(tmp_path / "done", tmp_path / "root" / "step-0")
    assert main(["recover", str(left)]) == 0
    assert f"{left}: committed" in capsys.readouterr().out
    assert main(["recover", str(left)]) == 3
    assert main(["recover", str(tmp_path / "root")]) == 0
    assert "step-1: committed" in capsys.readouterr().out
    assert is_same(state_at(tmp_path / "root" / "step-1"), small_state(1))


@pytest.mark.parametrize("meanwhile", ["committed", "removed"])
def test_the_command_waits_for_nothing_that_is_over(
    left: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """While it waits for a rank, another save commits there, or the directory is removed."""
    (record,) = records_in(left)
    record.rename(record.with_name(f"{record.name[:-1]}2"))

    def sleep(_: float) -> None:
        if meanwhile == "removed":
            shutil.rmtree(left)
        else:
            dcp.save(small_state(2), storage_writer=FileSystemWriterAsync(left), no_dist=True)

    monkeypatch.setattr(recover, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert recover._recover_all(str(left), PATIENCE_S) == ([], [])


def test_the_command_names_missing_ranks(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = records_in(left)
    record.rename(record.with_name(f"{record.name[:-1]}2"))
    assert main(["recover", str(left)]) == 1
    assert "incomplete: not finished by rank 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"linger_s": -1}, "linger_s=-1"),
        ({"linger_s": "x"}, "linger_s='x'"),
        ({"is_multiproc_io": True}, "is_multiproc_io"),
        ({"local_staging_dir": "tier"}, "local_staging_dir"),
        ({"open_file": lambda *_: None}, "open_file"),
    ],
)
def test_options_that_exclude_it(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        FileSystemWriterAsync(tmp_path, **{"linger_s": 60, **options})


def test_saves_that_end_with_the_trainer_refuse_it(tmp_path: Path) -> None:
    """They would promise what they cannot hold."""
    for call in (dcp.save, dcp.async_save):
        writer = FileSystemWriterAsync(tmp_path / "ck", linger_s=60)
        with pytest.raises((OptionError, CheckpointException), match="split saves"):
            call({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)


def test_parts_of_a_step_exclude_it(tmp_path: Path) -> None:
    writer = partial(FileSystemWriterAsync, linger_s=60)
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    manager = nostall.CheckpointManager(tmp_path, parts=("a", "b"), writer=writer)
    with manager, pytest.raises(OptionError, match="linger_s does not support parts"):
        manager.save(1, state)


def test_restoring_recovers_only_when_asked_to(tmp_path: Path, left: Path) -> None:
    """Others may read below the root while a job saves there."""
    root, state = tmp_path / "steps", {"a": torch.ones(2)}
    made: list[str] = []

    def writer(path: str) -> FileSystemWriterAsync:
        made.append(path)
        return FileSystemWriterAsync(path)

    with nostall.CheckpointManager(root, writer=writer) as manager:
        manager.save(1, state)
        manager.wait()
        shutil.copytree(left, manager.path(2))
        assert manager.restore(state) is not None
        assert manager.latest_step() == 1
        with pytest.raises(DamagedCheckpointError, match="was not saved by a CheckpointManager"):
            manager.restore(state, recover_s=PATIENCE_S)
        assert manager.latest_step() == 2
        with pytest.raises(OptionError, match="recover_s"):
            manager.restore(state, recover_s=-1)
    assert made == [str(root / "step-000000001")]  # users' factories are for saves


def test_a_job_that_begins_anew_says_what_it_removes(
    tmp_path: Path, left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "steps"
    shutil.copytree(left, root / "step-000000002")
    with nostall.CheckpointManager(root) as manager:
        manager.save(1, {"a": torch.ones(2)})
    assert "step-000000002 is removed: all ranks had finished it" in caplog.text
    assert not (root / "step-000000002").exists()


def test_a_restore_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    """For a step that nobody finishes."""
    with nostall.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(2)})
        manager.wait()
        (tmp_path / "step-000000002").mkdir()
        restored = manager.restore({"a": torch.zeros(2)}, recover_s=0.1)
    assert restored is not None
    assert restored.step == 1


def test_waves_exclude_it(tmp_path: Path) -> None:
    nostall.configure(EngineOptions(max_staging_bytes=1 << 20))
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path, small_state(), linger_s=60)
    with pytest.raises(CheckpointException, match="max_staging_bytes exclude each other"):
        queue.wait()


def test_recover_says_what_it_was_given_wrong(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="wait_s"):
        nostall.recover(tmp_path, wait_s=float("nan"))
    assert nostall.recover(tmp_path / "nowhere", wait_s=60).state is RecoveryState.NOTHING
