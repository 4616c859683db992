"""Saves through a local tier: committed there at once, and at their destination in the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._engine import default_engine
from nostall._model.values import WrittenFile
from nostall._save import finalize
from nostall._storage.deadlines import begin
from nostall._storage.posix_storage import PosixStorage
from nostall._tier import parts, promoting
from nostall._tier.copied_files import CopiedFiles
from nostall._tier.local import (
    committed_in,
    held,
    old_parts,
    record_destination,
    remove_done_parts,
    write_part,
)
from nostall._tier.parts import obsolete, parts_at
from nostall._tier.promoting import PromotionJob, promote
from nostall.core import AsyncCallsQueue
from nostall.errors import (
    CheckpointExistsError,
    DamagedCheckpointError,
    NostallError,
    OptionError,
    SaveTimeoutError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.local_tier import LocalCheckpoint, Promotion
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.through_tier import destination_of, save, state_of
from support import loaded
from support.object_store import S3Server
from support.processes import command_of
from support.ranks import TESTS, RanksFailed, run_ranks
from support.states import schedule
from support.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def tier(tmp_path: Path) -> str:
    """A local tier that does not exist yet."""
    return str(tmp_path / "tier")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Where checkpoints belong."""
    return str(tmp_path / "far")


def promotion_of(writer: FileSystemWriterAsync) -> Promotion:
    """The promotion of a writer that has committed."""
    assert writer.promotion is not None
    return writer.promotion


def job_to(promotion: Promotion, destination: str, record: str = ".metadata") -> PromotionJob:
    """The promotion of what is in a directory to a destination that has not got it."""
    (Path(promotion.local_path) / ".promoted").unlink(missing_ok=True)
    return PromotionJob(
        directory=promotion.local_path,
        destination=destination,
        record=record,
        io_threads=1,
        chunk_nbytes=1 << 20,
        retries=0,
    )


def step_at(place: str) -> int | None:
    """The step whose state a directory holds, whole and unmixed; ``None`` if it is uncommitted."""
    if not (Path(place) / ".metadata").exists():
        return None
    assert nostall.verify(place).ok
    found = state_of(0)
    dcp.load(found, checkpoint_id=place, no_dist=True)
    step = int(found["model"]["n"])
    assert torch.equal(found["model"]["w"], state_of(step)["model"]["w"])
    return step


def promoting_processes() -> list[psutil.Process]:
    """Those of this process."""
    children = psutil.Process().children()
    return [each for each in children if "nostall._tier" in command_of(each.pid)]


@contextmanager
def hanging_destination() -> Iterator[psutil.Process]:
    """The process that writes to destinations stands still, as if storage did not answer."""
    (process,) = promoting_processes()
    process.suspend()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # the test has killed it
            process.resume()


# --- a save ---------------------------------------------------------------------------------------


def test_a_save_is_committed_in_the_tier_and_then_at_its_destination(tier: str, root: str) -> None:
    """Both hold the same bytes, and both are ordinary checkpoints."""
    promotion = promotion_of(save(tier, root, 7))
    assert step_at(promotion.local_path) == 7
    promotion.result(PATIENCE_S)
    assert (promotion.path, promotion.done) == (destination_of(root, 7), True)
    assert step_at(promotion.path) == 7
    shown = [name for name in os.listdir(promotion.local_path) if "__" in name]
    assert sorted([*shown, ".metadata"]) == sorted(os.listdir(promotion.path))
    for name in (*shown, ".metadata"):
        here = Path(promotion.local_path, name).read_bytes()
        assert here == Path(promotion.path, name).read_bytes()


def test_async_saves_and_split_saves_go_through_the_tier(
    tier: str, root: str, queue: AsyncCallsQueue
) -> None:
    """As ``dcp.save`` does."""
    writer = FileSystemWriterAsync(f"{root}/async", local_staging_dir=tier)
    begun: Any = dcp.async_save(state_of(1), storage_writer=writer, no_dist=True)
    begun.result()
    promotion_of(writer).result(PATIENCE_S)
    assert step_at(f"{root}/async") == 1
    cache = CheckpointMetadataCache()
    for step in (2, 3, 4):  # the structure is unknown at first, and then known
        path = f"{root}/split-{step}"
        schedule(queue, path, state_of(step), cache=cache, local_staging_dir=tier)
        queue.wait(PATIENCE_S)
        for promotion in default_engine().promotions.unfinished():
            promotion.result(PATIENCE_S)
        assert step_at(path) == step


def test_a_tier_can_be_named_by_an_address_of_a_directory(tier: str, root: str) -> None:
    """As every other path; an object store is none."""
    address = f"file://{tier}"
    writer = FileSystemWriterAsync(root, local_staging_dir=address)
    dcp.save(state_of(1), storage_writer=writer, no_dist=True)
    promotion_of(writer).result(PATIENCE_S)
    (found,) = nostall.local_checkpoints(address)
    assert found.path == promotion_of(writer).local_path
    with pytest.raises(OptionError, match="does not support object stores"):
        FileSystemWriterAsync(root, local_staging_dir="s3://bucket/tier")


def test_two_ranks_share_a_tier(tmp_path: Path) -> None:
    """The coordinator promotes the files of both."""
    run_ranks(2, "tiers:save_and_wait", tmp_path / "out")


def test_files_that_the_coordinator_does_not_see_are_not_committed(tmp_path: Path) -> None:
    """Ranks with tiers of their own, under the same path, get a typed error."""
    messages = run_ranks(2, "tiers:save_out_of_sight", tmp_path / "out")
    assert all("local_staging_shared=False" in each for each in messages)


@pytest.mark.parametrize("program", ["save_by_rank", "split_saves_by_rank"])
def test_each_host_has_its_own_tier(tmp_path: Path, program: str) -> None:
    """Every rank brings its own files, and the metadata come when all of them are there."""
    run_ranks(2, f"tiers:{program}", tmp_path / "out")


def test_a_damaged_file_on_another_host_is_never_published(tmp_path: Path) -> None:
    """The coordinator learns it, and does not wait for ever."""
    coordinator, other = run_ranks(2, "tiers:save_with_a_damaged_part", tmp_path / "out")
    assert "rank 1: a local file has another checksum" in coordinator
    assert "a local file has another checksum" in other


def test_a_destination_in_an_object_store(tier: str, started_s3: S3Server) -> None:
    """In parts, from the files of the tier."""
    address = f"s3://{started_s3.new_bucket()}/run/step-5"
    writer = FileSystemWriterAsync(address, local_staging_dir=tier)
    large = {"w": torch.randn(3 << 20), "n": torch.tensor(5)}
    dcp.save(large, storage_writer=writer, no_dist=True)
    promotion_of(writer).result(PATIENCE_S)
    assert nostall.verify(address).ok
    # One that is done late, after its answer was lost, would hit a file of this checkpoint.
    bucket = address.split("/")[2]
    assert not [each for each in started_s3.requests() if bucket in each and "delete" in each]
    found = {key: torch.zeros_like(each) for key, each in large.items()}
    dcp.load(found, storage_reader=nostall.FileSystemReader(address), no_dist=True)
    assert torch.equal(found["w"], large["w"])


# --- a slow destination ---------------------------------------------------------------------------


def test_a_destination_that_hangs_stops_saves_only_at_the_limit(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the save says what it waits for, and gives up after the time that users set."""
    nostall.configure(EngineOptions(save_timeout_s=2.0))
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination():
        writers = [save(tier, root, step, local_staging_limit=2) for step in (1, 2)]
        statuses = [each for each in nostall.status() if each.state == "promoting"]
        assert [each.path for each in statuses] == [destination_of(root, step) for step in (1, 2)]
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(tier, root, 3, local_staging_limit=2)
        error = caught.value.failures[0][0]
        assert isinstance(error, SaveTimeoutError)
        assert (error.phase, error.path) == ("plan", destination_of(root, 1))
        assert "local_staging_limit" in str(error)
        assert "2 checkpoints are not at their destination" in caplog.text
        assert [step_at(destination_of(root, step)) for step in (0, 1, 2)] == [0, None, None]
    for step, writer in enumerate(writers, 1):
        promotion_of(writer).result(PATIENCE_S)
        assert step_at(destination_of(root, step)) == step


def test_a_save_at_the_limit_goes_on_when_there_is_room(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the destination, and not for the time-out."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination() as process:
        first = save(tier, root, 1, local_staging_limit=1)
        waiting = begin("test", lambda: save(tier, root, 2, local_staging_limit=1))
        wait_until(lambda: "the save waits" in caplog.text)
        assert not waiting.done()
        process.resume()
        waiting.result(PATIENCE_S)
    assert promotion_of(first).done


def test_a_destination_that_refuses_is_asked_again(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What refuses is named; when it is mended, the checkpoint gets there."""
    Path(root).write_text("in the way")
    promotion = promotion_of(save(tier, root, 1))
    wait_until(lambda: bool(promotion.status.trouble))
    with pytest.raises(SaveTimeoutError, match=r"it is committed in .*tier"):
        promotion.result(0)
    assert "not promoted yet, trying again" in caplog.text
    Path(root).unlink()
    promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 1)) == 1


def test_a_killed_process_is_started_again(tier: str, root: str) -> None:
    """The next one copies what is not copied yet."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination() as process:
        promotion = promotion_of(save(tier, root, 1))
        process.kill()
    promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 1)) == 1


# --- overwriting ----------------------------------------------------------------------------------


def test_what_a_killed_promotion_has_left_goes_with_the_next(tier: str, root: str) -> None:
    """Temporary metadata, which have a name of their own."""
    far = Path(destination_of(root, 7))
    far.mkdir(parents=True)
    (far / ".89abcdef.metadata.tmp").write_bytes(b"unfinished")
    promotion_of(save(tier, root, 7)).result(PATIENCE_S)
    assert step_at(str(far)) == 7
    assert [name for name in os.listdir(far) if name.endswith(".tmp")] == []


def test_the_newest_checkpoint_of_a_destination_wins(tier: str, root: str) -> None:
    """One that was not promoted in time is left out; its files are nowhere."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination():
        writers = [save(tier, root, step, local_staging_limit=9) for step in (3, 6, 9)]
    for writer in writers:
        promotion_of(writer).result(PATIENCE_S)
    assert step_at(destination_of(root, 9)) == 9
    assert len(os.listdir(destination_of(root, 9))) == 3


def test_a_file_that_a_later_save_removes_while_it_is_copied(tier: str, root: str) -> None:
    """The later save is promoted; of the earlier one, nothing is left at the destination."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    job = job_to(promotion, f"{root}/other")
    is_replaced = False

    def replace_once(nbytes: int, of_nbytes: int) -> None:
        nonlocal is_replaced
        if nbytes and not is_replaced:
            is_replaced = True
            save(tier, root, 3)

    promote(job, replace_once)
    assert is_replaced
    assert step_at(f"{root}/other") == 3
    assert len(os.listdir(f"{root}/other")) == 3


def test_overwrite_false_asks_both(tier: str, root: str) -> None:
    """The destination, and the tier for what is on its way there."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tier, root, 0, overwrite=False)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    nostall.remove_checkpoint(promotion.path)
    with hanging_destination():
        save(tier, root, 0, overwrite=False)
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(tier, root, 0, overwrite=False)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)


def test_what_is_newer_at_the_destination_stays(tier: str, root: str) -> None:
    """A job that was killed has left an older one; another job has saved without the tier since."""
    Path(root).write_text("nothing gets there")
    _run_killed(tier, root, steps=1)
    Path(root).unlink()
    place = destination_of(root, 0)
    in_an_hour = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    with patch.object(finalize, "time", in_an_hour):  # clocks of virtual machines are set back
        dcp.save(state_of(3), storage_writer=FileSystemWriterAsync(place), no_dist=True)
    (promotion,) = nostall.promote(tier)
    with pytest.raises(CheckpointExistsError, match="newer"):
        promotion.result(PATIENCE_S)
    assert step_at(place) == 3
    assert nostall.promote(tier) == ()
    promotion_of(save(tier, root, 6)).result(PATIENCE_S)
    assert step_at(place) == 6  # whatever the clock says: this job has seen what was there


def test_overwrite_false_holds_until_the_end(tier: str, root: str) -> None:
    """Somebody else saves to the destination between the check and the promotion."""
    promotion_of(save(tier, root, 1)).result(PATIENCE_S)
    place = destination_of(root, 0)
    with hanging_destination():
        promotion = promotion_of(save(tier, root, 0, overwrite=False))
        dcp.save(state_of(3), storage_writer=FileSystemWriterAsync(place), no_dist=True)
    with pytest.raises(CheckpointExistsError):
        promotion.result(PATIENCE_S)
    assert step_at(place) == 3


def test_files_that_vanish_at_the_destination_are_copied_again(tier: str, root: str) -> None:
    """Somebody clears up there, between the copies and the publication."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    job = job_to(promotion, f"{root}/other")

    def clear(nbytes: int, of_nbytes: int) -> None:
        if nbytes == of_nbytes:  # the second file, too, is copied
            for each in sorted(Path(job.destination).glob("__*"))[:1]:
                each.unlink()

    with pytest.raises(FileNotFoundError, match="gone again"):
        promote(job, clear)
    assert step_at(job.destination) is None
    promote(job, lambda _nbytes, _of: None)
    assert step_at(job.destination) == 0


@pytest.mark.parametrize("name", [".removed-1", ".hidden", "n" * 250, "名" * 80, "a b\nc"])
def test_any_name_of_a_destination(tier: str, root: str, name: str) -> None:
    """It does not disturb those of the tier."""
    for step in range(3):
        path = f"{root}/{step}/{name}"
        writer = FileSystemWriterAsync(path, local_staging_dir=tier)
        dcp.save(state_of(step), storage_writer=writer, no_dist=True)
        promotion_of(writer).result(PATIENCE_S)
        assert step_at(path) == step
    assert len(nostall.local_checkpoints(tier)) == 2


def test_a_promotion_is_given_up_by_removing_its_local_directory(tier: str, root: str) -> None:
    """The destination was misspelt; others get theirs meanwhile."""
    Path(root).write_text("in the way")
    misspelt = promotion_of(save(tier, root, 1))
    wait_until(lambda: bool(misspelt.status.trouble))
    promotion_of(save(tier, f"{root}-2", 2)).result(PATIENCE_S)
    shutil.rmtree(misspelt.local_path)
    with pytest.raises(DamagedCheckpointError, match="gone"):
        misspelt.result(PATIENCE_S)


def test_of_promoted_checkpoints_the_newest_stays(tier: str, root: str) -> None:
    """The local disk does not fill."""
    for step in range(6):
        promotion_of(save(tier, f"{root}/{step}", step)).result(PATIENCE_S)
    wait_until(lambda: not [name for name in os.listdir(tier) if "removed" in name])
    found = nostall.local_checkpoints(tier)
    assert [each.destination for each in found] == [
        destination_of(f"{root}/{step}", step) for step in (5, 4)
    ]
    assert all(each.is_promoted for each in found)


def test_what_was_never_committed_is_removed_when_it_is_old(tier: str, root: str) -> None:
    """A crash in the middle of a save leaves files that nobody else would remove."""
    for name, age_s in (("old", 3700), ("young", 3500)):
        left = Path(tier) / name
        left.mkdir(parents=True)
        (left / ".destination").write_text(f"{root}/{name}")
        os.utime(left, (time.time() - age_s,) * 2)
    (Path(tier) / "of somebody else").mkdir()
    os.utime(Path(tier) / "of somebody else", (0, 0))
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    wait_until(lambda: not [name for name in os.listdir(tier) if "removed" in name])
    assert {"young", "of somebody else"} <= set(os.listdir(tier))
    assert "old" not in os.listdir(tier)


# --- crashes --------------------------------------------------------------------------------------


def test_what_a_killed_job_has_left_is_promoted_by_the_next(tier: str, root: str) -> None:
    """The trainer and all its processes were killed behind the local commit."""
    Path(root).write_text("nothing gets there")
    _run_killed(tier, root, steps=2)
    assert [each.is_promoted for each in nostall.local_checkpoints(tier)] == [False, False]
    Path(root).unlink()
    promotion_of(save(tier, root, 2)).result(PATIENCE_S)
    assert [step_at(destination_of(root, step)) for step in range(3)] == [0, 1, 2]


def _run_killed(tier: str, root: str, *, steps: int) -> None:
    program = str(TESTS / "programs" / "through_tier.py")
    command = [*loaded.python(), "-W", "ignore", program, tier, root, "0", str(steps), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for step in range(steps):
            assert int(process.stdout.readline()) == step
        trainer = psutil.Process(process.pid)
        trainer.suspend()  # or it could start the process that promotes, which would be left
        wait_until(lambda: trainer.status() == psutil.STATUS_STOPPED)
        for each in [*trainer.children(), trainer]:
            each.kill()


def test_what_killed_hosts_have_left_is_promoted_by_each(tmp_path: Path) -> None:
    """Each brings what is on its own disk; the metadata come last."""
    out = tmp_path / "out"
    with pytest.raises(RanksFailed):
        run_ranks(2, "tiers:save_by_rank_and_die", out)
    (out / "far").unlink()
    coordinator = nostall.promote(out / "disk-0")
    wait_until(lambda: any("1 of 2 files" in each.status.trouble for each in coordinator))
    assert not (out / "far" / "step" / ".metadata").exists()
    for promotion in (*nostall.promote(out / "disk-1"), *coordinator):
        promotion.result(PATIENCE_S)
    assert nostall.verify(out / "far" / "step").ok
    assert len(os.listdir(out / "far" / "step")) == 3


def test_promote_goes_on_without_a_save(tier: str, root: str) -> None:
    """As when the job does not start again."""
    Path(root).write_text("nothing gets there")
    _run_killed(tier, root, steps=1)
    Path(root).unlink()
    (promotion,) = nostall.promote(tier)
    promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 0)) == 0
    assert nostall.promote(tier) == ()


def test_a_promotion_is_given_up_by_removing_the_local_checkpoint(tier: str, root: str) -> None:
    """It ends, and nothing of it stays in the tier."""
    Path(root).write_text("in the way")
    promotion = promotion_of(save(tier, root, 0))
    wait_until(lambda: bool(promotion.status.trouble))
    nostall.remove_checkpoint(promotion.local_path)
    with pytest.raises(DamagedCheckpointError, match="the local checkpoint is gone"):
        promotion.result(PATIENCE_S)
    assert os.listdir(tier) == []
    assert nostall.promote(tier) == ()


def test_a_promotion_that_ends_at_once_is_returned(
    tier: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have failed: no process can be started for it, say."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    (Path(promotion.local_path) / ".promoted").unlink()
    nostall._engine.reset()
    monkeypatch.setattr(sys, "executable", "")
    (again,) = nostall.promote(tier)
    with pytest.raises(NostallError, match=r"sys\.executable is empty"):
        again.result(0.0)


def test_a_half_copied_file_of_full_length_is_copied_again(tier: str, root: str) -> None:
    """A crash may leave such a file; lengths prove nothing."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    job = job_to(promotion, f"{root}/other")
    Path(job.destination).mkdir()
    for each in Path(job.directory).glob("__*"):
        Path(job.destination, each.name).write_bytes(bytes(each.stat().st_size))
    promote(job, lambda _nbytes, _of: None)
    assert step_at(job.destination) == 0


def test_whole_files_are_not_copied_again(tier: str, root: str) -> None:
    """A promotion that goes on begins behind the last whole file."""
    Path(root).write_text("in the way")
    promotion = promotion_of(save(tier, root, 0))
    nostall._engine.reset()
    Path(root).unlink()
    Path(promotion.path).mkdir(parents=True)
    first, second = sorted(Path(promotion.local_path).glob("__*"))
    there = Path(promotion.path, first.name)
    there.write_bytes(first.read_bytes())
    inode = there.stat().st_ino
    copied = CopiedFiles(promotion.local_path)
    for file in _files_of(promotion.local_path):
        if file.name == first.name:
            copied.add_whole(file)
    (again,) = nostall.promote(tier)
    again.result(PATIENCE_S)
    assert step_at(promotion.path) == 0
    assert there.stat().st_ino == inode
    assert (Path(promotion.path) / second.name).stat().st_nlink == 1


def _files_of(directory: str) -> Any:
    from nostall._commit.manifest import manifest_alone

    with (Path(directory) / ".metadata").open("rb") as stream:
        manifest = manifest_alone(stream)
    assert manifest is not None
    return manifest.files


def test_a_crash_between_the_publication_and_its_record_changes_nothing(
    tier: str, root: str
) -> None:
    """The next promotion sees that the destination has the same metadata."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    before = {each.name: each.stat().st_ino for each in Path(promotion.path).iterdir()}
    (Path(promotion.local_path) / ".promoted").unlink()
    (again,) = nostall.promote(tier)
    again.result(PATIENCE_S)
    assert before == {each.name: each.stat().st_ino for each in Path(promotion.path).iterdir()}
    assert [each.is_promoted for each in committed_in(tier)] == [True]


def test_a_crash_before_replaced_files_are_removed(tier: str, root: str) -> None:
    """The next promotion still knows them."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    replaced = [each.name for each in Path(destination_of(root, 0)).glob("__*")]
    promotion = promotion_of(save(tier, root, 3))
    promotion.result(PATIENCE_S)
    for name in replaced:  # back to the moment of the crash
        Path(promotion.path, name).touch()
    CopiedFiles(promotion.local_path).add_names(replaced)
    (Path(promotion.local_path) / ".promoted").unlink()
    (again,) = nostall.promote(tier)
    again.result(PATIENCE_S)
    assert step_at(promotion.path) == 3
    assert len(os.listdir(promotion.path)) == 3


def promote_too_late(job: PromotionJob, then: Callable[[], object] = lambda: None) -> None:
    """Another process promotes it to its end between the look at the record and its lock."""

    @contextmanager
    def held_too_late(directory: str, *name: str) -> Iterator[None]:
        with patch.object(promoting, "held", held):
            promote(job, lambda _nbytes, _of: None)
        then()
        yield

    with patch.object(promoting, "held", held_too_late):
        promote(job, lambda _nbytes, _of: pytest.fail("it copies"))


def test_what_another_process_has_promoted_is_left_alone(tier: str, root: str) -> None:
    """It was removed at the destination since, by retention: it does not come back."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    job = job_to(promotion, f"{root}/other")
    promote_too_late(job, lambda: nostall.remove_checkpoint(job.destination))
    assert not Path(job.destination).exists()


def test_a_part_that_another_process_has_brought_is_left_alone(tier: str, root: str) -> None:
    """Its files may be part of a checkpoint by now."""
    promotion = promotion_of(save(tier, root, 0))
    promotion.result(PATIENCE_S)
    record = write_part(promotion.local_path, 0, _files_of(promotion.local_path))
    job = job_to(promotion, f"{root}/other", record)
    promote_too_late(job)
    assert [part.name for part in parts_at(PosixStorage(job.destination))] == [record]
    assert len(list(Path(job.destination).glob("__*"))) == 2


def test_a_part_that_reaches_its_destination_meanwhile_is_not_removed(tier: str) -> None:
    """Old parts are looked for while the newest one is being copied, as its save is not committed.

    Its files must be there when the coordinator publishes the metadata.
    """
    directories = [f"{tier}/step-{step}" for step in range(5)]
    records = [new_part(directory) for directory in directories]
    for directory, record in zip(directories[:-1], records[:-1], strict=True):
        parts.end(directory, record)
    old = old_parts(tier, directories[-1])
    parts.end(directories[-1], records[-1])
    for directory, found in old.items():
        parts.remove_old(directory, found)
    remove_done_parts(tier, directories[-1])
    assert have_files(directories) == [False, False, False, True, True]


def test_parts_of_the_present_save_stay_though_the_clock_was_set_back(tier: str) -> None:
    """They are the oldest by their times."""
    directories = [f"{tier}/step-{step}" for step in range(4)]
    for directory in directories:
        parts.end(directory, new_part(directory))
    remove_done_parts(tier, directories[0])
    assert have_files(directories) == [True, False, True, True]


def new_part(directory: str) -> str:
    """Leave a file of rank 0, and the record that it is to be copied; the record's name."""
    record_destination(directory, f"{directory}-far", by_rank=True)
    Path(directory, "__0_0.distcp").write_bytes(b"shard")
    return write_part(directory, 0, [WrittenFile(name="__0_0.distcp", nbytes=5, crc32=None)])


def have_files(directories: list[str]) -> list[bool]:
    """Whether each directory has the file of rank 0."""
    return [Path(directory, "__0_0.distcp").exists() for directory in directories]


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", 7, None, "README"])
def test_records_at_the_destination_name_no_other_files(root: str, name: object) -> None:
    """Anybody may have written them there, and what they name is removed."""
    Path(root).mkdir()
    files = [{"name": name, "nbytes": 1, "crc32": None}]
    record = {"at": 1.0, "files": files, "damage": ""}
    (Path(root) / ".part-0-00000000").write_text(json.dumps(record))
    (Path(root) / ".part-0-00000001").write_text('{"at": 2.0, "files": [], "damage": ""}')
    storage = PosixStorage(root)
    assert [part.name for part in parts_at(storage)] == [".part-0-00000001"]
    assert obsolete(storage, set()) == ([".part-0-00000001"], [])


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_damaged_local_file_is_never_published(tier: str, root: str, harm: str) -> None:
    """The handle says so, and later saves go on."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination():
        promotion = promotion_of(save(tier, root, 1))
        file = min(Path(promotion.local_path).glob("__*"))
        content = bytearray(file.read_bytes())
        content[1000] ^= 1
        file.unlink()
        if harm != "gone":
            file.write_bytes(content if harm == "flipped" else content[:-1])
    with pytest.raises(DamagedCheckpointError, match="local"):
        promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 1)) is None
    promotion_of(save(tier, root, 2, local_staging_limit=1)).result(PATIENCE_S)
    assert step_at(destination_of(root, 2)) == 2


def test_a_destination_is_not_removed_while_it_is_promoted_to(tier: str, root: str) -> None:
    """The removal is refused, as it would take files from under the new metadata."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination():
        promotion = promotion_of(save(tier, root, 3))
        with pytest.raises(OptionError, match="on its way there"):
            nostall.remove_checkpoint(promotion.path)
        assert step_at(promotion.path) == 0
    promotion.result(PATIENCE_S)
    nostall.remove_checkpoint(promotion.path)
    assert not Path(promotion.path).exists()


def test_a_promotion_waits_for_the_removal_of_its_destination(tier: str, root: str) -> None:
    """It begins when nothing is removed there any more."""
    place = destination_of(root, 0)
    with default_engine().promotions.removing(place) as is_free:
        assert is_free
        promotion = promotion_of(save(tier, root, 0))
        with default_engine().promotions.removing(place) as is_free_again:
            assert not is_free_again
        assert promotion.starts == 0
    promotion.result(PATIENCE_S)
    assert step_at(place) == 0


# --- a manager ------------------------------------------------------------------------------------


def test_a_manager_keeps_and_restores_what_is_at_the_destination(tier: str, root: str) -> None:
    """A step that waits in the tier is not counted yet, and nothing is removed for it."""
    model = torch.nn.Linear(3, 3)
    writer = partial(FileSystemWriterAsync, local_staging_dir=tier, local_staging_limit=9)
    with nostall.CheckpointManager(root, keep=nostall.KeepLatest(2), writer=writer) as manager:
        for step in range(3):
            handle = manager.save(step, {"model": model})
            handle.result(PATIENCE_S)
            for promotion in handle.promotions:
                promotion.result(PATIENCE_S)
        with hanging_destination():
            with torch.no_grad():
                model.weight.fill_(7)
            handles = [manager.save(step, {"model": model}) for step in (3, 4)]
            handles[-1].result(PATIENCE_S)
            assert manager.latest_step() == 2
            assert len(manager.all_steps()) >= 2
        for promotion in handles[-1].promotions:
            promotion.result(PATIENCE_S)
        assert manager.latest_step() == 4
        model.reset_parameters()
        restored = manager.restore({"model": model})
        assert restored is not None
        assert restored.step == 4
        assert torch.equal(model.weight, torch.full((3, 3), 7.0))


def test_a_manager_removes_what_was_half_copied_and_the_next_save_copies_it(
    tier: str, root: str
) -> None:
    """Its own clearing up and the promotion do not disturb each other."""
    model, writer = torch.nn.Linear(3, 3), partial(FileSystemWriterAsync, local_staging_dir=tier)
    with nostall.CheckpointManager(root, writer=writer) as manager:
        manager.save(0, {"model": model}).result(PATIENCE_S)
    for promotion in nostall.promote(tier):
        promotion.result(PATIENCE_S)
    here, there = nostall.local_checkpoints(tier)[0].path, Path(root) / "step-000000000"
    (Path(here) / ".promoted").unlink()  # back to a crash when the files were copied
    copied = CopiedFiles(here)
    for file in _files_of(here):
        copied.add_whole(file)
    (there / ".metadata").unlink()
    with nostall.CheckpointManager(root, writer=writer) as manager:
        assert manager.latest_step() is None
        handle = manager.save(1, {"model": model})
        handle.result(PATIENCE_S)
        for promotion in handle.promotions:
            promotion.result(PATIENCE_S)
        assert manager.all_steps() == [0, 1]
        assert nostall.verify(there).ok


# --- the end of the process -----------------------------------------------------------------------


def test_a_program_that_ends_waits_for_its_promotions(tier: str, root: str) -> None:
    """Its last checkpoint is at its destination."""
    ended = _run_to_its_end(tier, root)
    assert (ended.returncode, step_at(destination_of(root, 0))) == (0, 0)


def test_a_program_whose_promotion_is_late_fails(tier: str, root: str) -> None:
    """A job scheduler must not take the run for a success."""
    Path(root).write_text("nothing gets there")
    ended = _run_to_its_end(tier, root)
    assert ended.returncode == 1
    assert f"not at its destination: path={destination_of(root, 0)}" in ended.stderr
    assert "a job that starts with the same local_staging_dir goes on" in ended.stderr


def test_a_program_that_gave_its_promotion_up_is_not_told_to_wait(tier: str, root: str) -> None:
    """The removal of the local checkpoint ends the promotion, and no later job goes on."""
    Path(root).write_text("nothing gets there")
    give_up = f"os.rename(saved.promotion.local_path, {tier + '-gone'!r});"
    wait = f"\ntry: saved.promotion.result({PATIENCE_S})\nexcept nostall.NostallError: pass"
    with _saving_once(tier, root, PATIENCE_S, f"import os; {give_up}{wait}") as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    last = said.splitlines()[-1]
    assert f"not at its destination: path={destination_of(root, 0)}: the local checkpoint" in last
    assert "goes on" not in last
    assert "waiting up to" not in said


def test_ctrl_c_ends_the_wait_for_promotions(tier: str, root: str) -> None:
    """The exit status says that something is missing, all the same."""
    Path(root).write_text("nothing gets there")
    with _saving_once(tier, root, PATIENCE_S) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waiting up to" in line)
        assert "1 checkpoint on the way to the destination" in line
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE_S / 2)
    assert process.returncode == 1
    assert f"not at its destination: path={destination_of(root, 0)}" in rest


def _run_to_its_end(tier: str, root: str) -> subprocess.CompletedProcess[str]:
    with _saving_once(tier, root, 5.0) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stderr=said)


def _saving_once(
    tier: str, root: str, exit_timeout_s: float, then: str = ""
) -> subprocess.Popen[str]:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import nostall; from programs.through_tier import save;"
        f"nostall.configure(nostall.EngineOptions(exit_timeout_s={exit_timeout_s}));"
        f"saved = save({tier!r}, {root!r}, 0);{then}"
    )
    return subprocess.Popen(
        [*loaded.python(), "-W", "ignore", "-c", code],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"},
        stderr=subprocess.PIPE,
        text=True,
    )


# --- what is refused ------------------------------------------------------------------------------


def test_options_that_are_not_possible(tier: str, root: str) -> None:
    """Each is refused when the writer is made."""
    make = partial(FileSystemWriterAsync, f"{root}/step", local_staging_dir=tier)
    with pytest.raises(OptionError, match="local_staging_limit=0"):
        make(local_staging_limit=0)
    with pytest.raises(OptionError, match="open_file"):
        make(open_file=print)
    with pytest.raises(OptionError, match="object stores"):
        FileSystemWriterAsync(f"{root}/step", local_staging_dir="s3://bucket/tier")
    with pytest.raises(OptionError, match="in local_staging_dir"):
        FileSystemWriterAsync(f"{tier}/step", local_staging_dir=tier)
    with pytest.raises(OptionError, match="is in the checkpoint path"):
        FileSystemWriterAsync(f"{root}/step", local_staging_dir=f"{root}/step/tier")
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    with hanging_destination():
        save(tier, root, 1)
        with pytest.raises(OptionError, match="being promoted"):
            nostall.configure(EngineOptions())


def test_a_tier_that_cannot_be_made(root: str, tmp_path: Path) -> None:
    """A typed error that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(dcp.api.CheckpointException, match="local tier cannot be used") as caught:
        save(str(tmp_path / "file"), root, 0)
    error = caught.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(tmp_path / "file")


def test_what_is_in_a_tier_is_listed(tier: str, root: str) -> None:
    """The newest first; what is not whole is left out, and other things are overlooked."""
    assert nostall.local_checkpoints(tier) == ()
    promotions = [promotion_of(save(tier, root, step)) for step in range(2)]
    for promotion in promotions:
        promotion.result(PATIENCE_S)
    (Path(tier) / "other").mkdir()
    newest, oldest = nostall.local_checkpoints(tier)
    assert isinstance(newest, LocalCheckpoint)
    assert (newest.path, newest.destination) == (promotions[1].local_path, promotions[1].path)
    assert (step_at(newest.path), step_at(oldest.path)) == (1, 0)
    min(Path(newest.path).glob("__*")).unlink()
    assert nostall.local_checkpoints(tier) == (oldest,)


def test_a_signal_for_the_whole_group_does_not_end_the_process(tier: str, root: str) -> None:
    """Ctrl-C at the terminal, or a scheduler's SIGTERM."""
    promotion_of(save(tier, root, 0)).result(PATIENCE_S)
    (process,) = promoting_processes()
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    promotion_of(save(tier, root, 1)).result(PATIENCE_S)
    assert promoting_processes() == [process]
