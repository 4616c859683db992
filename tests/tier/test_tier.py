"""Saves through a local disk: committed there at once, and at their destination in the end."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._commit.manifest import with_manifest
from nostall._model import checksum
from nostall._model.values import WrittenFile
from nostall._storage.deadlines import begin
from nostall._tier import copying, promotions
from nostall._tier.copying import Copier, files_of
from nostall._tier.local import LOCK, RECORD, Directory, Record, committed_at, is_locked
from nostall.errors import (
    CheckpointExistsError,
    DamagedCheckpointError,
    NostallError,
    OptionError,
    SaveTimeoutError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.tier import Promotion, promote
from programs.through_tier import destination_of, save, state_of
from support import loaded
from support.object_store import S3Server
from support.processes import command_of
from support.ranks import TESTS, RanksFailed, on_ranks, run_ranks
from support.states import save_async
from support.waiting import wait_until

PATIENCE_S = 60.0
EMPTY = '{"destination": "%s", "promoted": []}'


@pytest.fixture
def tier(tmp_path: Path) -> str:
    """A local root that does not exist yet."""
    return str(tmp_path / "tier")


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Where checkpoints belong."""
    return str(tmp_path / "far")


def promotion_of(writer: FileSystemWriterAsync) -> Promotion:
    """The promotion of a writer that has committed."""
    assert writer.promotion is not None
    return writer.promotion


def save_there(tier: str, root: str, step: int, **options: Any) -> Promotion:
    """Save, and wait until the destination has it."""
    promotion = promotion_of(save(tier, root, step, **options))
    promotion.result(PATIENCE_S)
    return promotion


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


def copying_processes() -> list[psutil.Process]:
    """Processes that copy to destinations for this process."""
    children = psutil.Process().children()
    return [each for each in children if "nostall._tier" in command_of(each.pid)]


@contextmanager
def hanging_destination() -> Iterator[psutil.Process]:
    """The process that writes to destinations stands still, as if storage did not answer."""
    (process,) = copying_processes()
    process.suspend()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # the test has killed it
            process.resume()


def copy(
    promotion: Promotion,
    destination: str,
    on_progress: Callable[[int, int], None] = lambda _nbytes, _of: None,
    committed: str | None = None,
) -> None:
    """Promote what is in a local directory elsewhere, in this process."""
    path = Path(promotion.local_path)
    record = Record(str(path.parent.parent), destination)
    committed = committed or committed_at(str(path.parent), path.name)
    assert committed is not None
    options = {"shared": True, "overwrite": False}
    with closing(Directory(str(path.parent), path.name)) as source:
        copier = Copier(destination, set(), on_progress)
        copying.promote(source, copier, record, committed, **options)


# --- a save ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_is_committed_locally_and_then_at_its_destination(
    tier: str, root: str, *, is_async: bool
) -> None:
    """Both have the same name and bytes, and both are ordinary checkpoints."""
    path = destination_of(root, 7)
    writer = FileSystemWriterAsync(path, local_staging_dir=tier)
    if is_async:
        save_async(writer, state_of(7))
    else:
        dcp.save(state_of(7), storage_writer=writer, no_dist=True)
    promotion = promotion_of(writer)
    assert promotion.local_path == f"{tier}/{Path(path).name}"
    assert step_at(promotion.local_path) == 7
    promotion.result(PATIENCE_S)
    assert (promotion.path, promotion.done) == (path, True)
    assert step_at(path) == 7
    here, there = (Path(place).iterdir() for place in (promotion.local_path, path))
    assert {f.name: f.read_bytes() for f in here} == {f.name: f.read_bytes() for f in there}
    assert nostall.latest_complete(tier) == promotion.local_path


@on_ranks("tiers:save_steps shared", "tiers:save_steps own", "tiers:split_saves_by_rank")
def test_ranks_save_to_a_disk_of_all_or_to_their_own(found: list[Any]) -> None:
    """Each host brings what it has, and the metadata come when all files are there."""
    assert found == [None, None]


@on_ranks("tiers:save_out_of_sight")
def test_files_that_the_coordinator_does_not_see_are_not_committed(found: list[str]) -> None:
    """Ranks with disks of their own, under the same path, get a typed error."""
    assert all("local_staging_shared=False" in each for each in found)


@on_ranks("tiers:save_with_a_damaged_part")
def test_a_damaged_file_on_another_host_is_never_published(found: list[str]) -> None:
    """The coordinator learns it, and does not wait for ever."""
    coordinator, other = found
    assert "another host's local file is damaged" in coordinator
    assert "a local file does not match its committed" in other


def test_a_destination_in_an_object_store(tier: str, started_s3: S3Server) -> None:
    """Large files are sent in parts."""
    address = f"s3://{started_s3.new_bucket()}/run/step-5"
    large = {"w": torch.randn(3 << 20), "n": torch.tensor(5)}
    for number in range(2):
        large["n"].fill_(number)
        writer = FileSystemWriterAsync(address, local_staging_dir=tier)
        dcp.save(large, storage_writer=writer, no_dist=True)
        promotion_of(writer).result(PATIENCE_S)
        assert nostall.verify(address).ok
    found = {key: torch.zeros_like(each) for key, each in large.items()}
    dcp.load(found, storage_reader=nostall.FileSystemReader(address), no_dist=True)
    assert torch.equal(found["w"], large["w"])
    assert int(found["n"]) == 1


# --- a destination that does not take it ----------------------------------------------------------


def test_a_destination_that_hangs_stops_saves_only_at_the_limit(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the save says what it waits for, and gives up after the time that users set."""
    nostall.configure(EngineOptions(save_timeout_s=2.0))
    save_there(tier, root, 0)
    with hanging_destination():
        begun = [promotion_of(save(tier, root, step, local_staging_limit=2)) for step in (1, 2)]
        assert [each.path for each in nostall.tier.status()] == [each.path for each in begun]
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save(tier, root, 3, local_staging_limit=2)
        error = caught.value.failures[0][0]
        assert isinstance(error, SaveTimeoutError)
        assert (error.phase, error.path) == ("plan", destination_of(root, 1))
        assert "local_staging_limit" in str(error)
        assert "2 checkpoints still to be promoted" in caplog.text
        assert [step_at(destination_of(root, step)) for step in (0, 1, 2)] == [0, None, None]
    for step, promotion in enumerate(begun, 1):
        promotion.result(PATIENCE_S)
        assert step_at(destination_of(root, step)) == step


def test_a_save_at_the_limit_goes_on_when_there_is_room(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the destination, and not for the time-out."""
    save_there(tier, root, 0)
    with hanging_destination() as process:
        first = promotion_of(save(tier, root, 1, local_staging_limit=1))
        waiting = begin("test", lambda: save(tier, root, 2, local_staging_limit=1))
        wait_until(lambda: "the save waits" in caplog.text)
        assert not waiting.done()
        process.resume()
        waiting.result(PATIENCE_S)
    assert first.done


def test_a_destination_that_refuses_is_asked_again(
    tier: str, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In order; the refusal is named, and removing the local checkpoint gives a promotion up."""
    Path(root).write_text("in the way")
    begun = [promotion_of(save(tier, root, step, local_staging_limit=3)) for step in range(3)]
    given_up, promotion, later = begun
    wait_until(lambda: f"{root} is a file; remove it" in str(given_up.status.trouble))
    nostall.remove_checkpoint(given_up.local_path)
    with pytest.raises(DamagedCheckpointError, match="the local checkpoint no longer exists"):
        given_up.result(PATIENCE_S)
    with pytest.raises(SaveTimeoutError, match=r"it is committed in .*tier"):
        promotion.result(0)
    assert "not promoted yet, trying again" in caplog.text
    Path(root).unlink()
    later.result(PATIENCE_S)
    assert promotion.done
    assert [step_at(destination_of(root, step)) for step in (0, 1, 2)] == [None, 1, 2]


def test_a_full_destination(tier: str, root: str) -> None:
    """Nothing of an unfinished file counts; the checkpoint gets there when there is room."""
    save_there(tier, root, 0)
    (process,) = copying_processes()
    unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    promotion = promotion_of(save(tier, root, 1))
    wait_until(lambda: bool(promotion.status.trouble))
    assert step_at(promotion.path) is None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    promotion.result(PATIENCE_S)
    assert step_at(promotion.path) == 1
    assert sorted(os.listdir(promotion.path)) == sorted(os.listdir(promotion.local_path))


def test_the_process_outlives_signals_and_is_started_again(tier: str, root: str) -> None:
    """Ctrl-C or a scheduler's SIGTERM to the whole group; after SIGKILL another one goes on."""
    save_there(tier, root, 0)
    (process,) = copying_processes()
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    save_there(tier, root, 1)
    assert copying_processes() == [process]
    with hanging_destination():
        promotion = promotion_of(save(tier, root, 2))
        process.kill()
    promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 2)) == 2


def test_no_process_can_be_started(tier: str, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is committed; its promotion says what is wrong."""
    save_there(tier, root, 0)
    with hanging_destination() as process:
        monkeypatch.setattr("sys.executable", "")
        process.kill()
        promotion = promotion_of(save(tier, root, 1))
        with pytest.raises(NostallError, match=r"sys\.executable is empty"):
            promotion.result(PATIENCE_S)
    assert step_at(promotion.local_path) == 1


# --- overwriting and retention --------------------------------------------------------------------


def test_the_newest_checkpoint_of_a_destination_wins(tier: str, root: str) -> None:
    """One that was not promoted in time is left out; its files are nowhere."""
    save_there(tier, root, 0)
    with hanging_destination():
        begun = [promotion_of(save(tier, root, step, local_staging_limit=9)) for step in (3, 6, 9)]
    for promotion in begun:
        promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 9)) == 9
    assert len(os.listdir(destination_of(root, 9))) == 3


def test_a_local_checkpoint_that_is_replaced_meanwhile(tier: str, root: str) -> None:
    """Its files are gone: that is no damage, as the later one is copied at the next try."""
    promotion = save_there(tier, root, 0)
    before = committed_at(tier, Path(promotion.local_path).name)
    save_there(tier, root, 3)
    min(Path(promotion.local_path).glob("__*")).unlink()
    with pytest.raises(copying.Waiting, match="a later save"):
        copy(promotion, f"{root}/other", committed=before)
    with pytest.raises(copying.Hopeless, match="missing"):
        copy(promotion, f"{root}/other")
    assert step_at(f"{root}/other") is None


def test_overwrite_false_asks_both_places_and_holds_until_the_end(tier: str, root: str) -> None:
    """Also if somebody else saves to the destination before the promotion."""
    promotion = save_there(tier, root, 0)
    refused = partial(pytest.raises, dcp.api.CheckpointException, match="already exists")
    with refused():
        save(tier, root, 0, overwrite=False)
    nostall.remove_checkpoint(promotion.path)
    with hanging_destination():
        late = promotion_of(save(tier, root, 0, overwrite=False))
        with refused():
            save(tier, root, 0, overwrite=False)
        dcp.save(state_of(3), storage_writer=FileSystemWriterAsync(late.path), no_dist=True)
    with pytest.raises(CheckpointExistsError):
        late.result(PATIENCE_S)
    assert step_at(late.path) == 3


def test_files_that_vanish_at_the_destination_are_copied_again(tier: str, root: str) -> None:
    """Somebody clears up there, during the copies or later."""
    promotion, place = save_there(tier, root, 0), Path(root) / "other"

    def clear(_nbytes: int, _of: int) -> None:
        for each in place.glob("__*"):
            each.unlink()

    with suppress(OSError):
        copy(promotion, str(place), clear)
    for _ in range(2):
        copy(promotion, str(place))
        assert step_at(str(place)) == 0
        clear(0, 0)


def test_only_whole_files_are_not_copied_again(tier: str, root: str) -> None:
    """A file of full length may be half copied by other programs; its checksum decides."""
    promotion, place = save_there(tier, root, 0), Path(root) / "other"
    place.mkdir()
    half, whole = sorted(Path(promotion.local_path).glob("__*"))
    (place / half.name).write_bytes(bytes(half.stat().st_size))
    shutil.copy(whole, place / whole.name)
    (place / f"copy-of-{half.name}").write_bytes(b"of a copy that was killed")
    inode = (place / whole.name).stat().st_ino
    copy(promotion, str(place))
    assert step_at(str(place)) == 0
    assert (place / whole.name).stat().st_ino == inode
    assert len(os.listdir(place)) == 3


def test_files_that_nothing_names_are_removed_at_the_destination(tier: str, root: str) -> None:
    """Files of the replaced checkpoint, and old ones, go; young ones may belong to another save."""
    promotion = save_there(tier, root, 0)
    for name, age_s in (("__0_0-0000000a.distcp", 4000), ("__0_0-0000000b.distcp", 1)):
        Path(promotion.path, name).touch()
        os.utime(Path(promotion.path, name), (time.time() - age_s,) * 2)
    replaced = set(os.listdir(promotion.local_path)) - {".metadata"}
    save_there(tier, root, 3)
    left = set(os.listdir(promotion.path))
    assert not replaced & left
    assert "__0_0-0000000b.distcp" in left


def test_of_promoted_checkpoints_the_newest_stays(tier: str, root: str) -> None:
    """The local disk does not fill, also with what was never committed."""
    for name, age_s in (("old", 3700), ("young", 3500)):
        (Path(tier) / name).mkdir(parents=True)
        (Path(tier) / name / "__0_0.distcp").touch()
        os.utime(Path(tier) / name, (time.time() - age_s,) * 2)
    for step in range(6):
        writer = FileSystemWriterAsync(f"{root}/step-{step}", local_staging_dir=tier)
        dcp.save(state_of(step), storage_writer=writer, no_dist=True)
        promotion_of(writer).result(PATIENCE_S)
    wait_until(lambda: not [name for name in os.listdir(tier) if "removed" in name])
    shown = {name for name in os.listdir(tier) if not name.startswith(".")}
    assert shown == {"young", "step-4", "step-5"}


def test_a_manager_keeps_and_restores_what_is_at_the_destination(tier: str, root: str) -> None:
    """A step that waits locally is not counted; one that retention removed does not come back."""
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
        for promotion in handles[-1].promotions:
            promotion.result(PATIENCE_S)
        assert manager.latest_step() == 4
        model.reset_parameters()
        restored = manager.restore({"model": model})
        assert restored is not None
        assert restored.step == 4
        assert torch.equal(model.weight, torch.full((3, 3), 7.0))
    nostall.remove_checkpoint(handles[-1].path)
    promotions.close()
    assert promote(tier, root) == ()
    assert not Path(handles[-1].path).exists()


# --- crashes --------------------------------------------------------------------------------------


def test_what_a_killed_job_has_left_is_promoted_by_the_next(tier: str, root: str) -> None:
    """It replaces nothing that another job has saved to the destination since; a new save does."""
    Path(root).write_text("nothing gets there")
    _run_killed(tier, root, steps=2)
    Path(root).unlink()
    place = destination_of(root, 1)
    dcp.save(state_of(4), storage_writer=FileSystemWriterAsync(place), no_dist=True)
    save_there(tier, root, 2)
    (left,) = promotions._missing()
    with pytest.raises(CheckpointExistsError, match="not promoted from here"):
        left.result(PATIENCE_S)
    assert [step_at(destination_of(root, step)) for step in range(3)] == [0, 4, 2]
    save_there(tier, root, 7)
    assert step_at(place) == 7
    assert promotions._missing() == []
    assert promote(tier, root) == ()


def test_another_process_that_promotes_is_waited_for(tier: str, root: str) -> None:
    """One of a job that was killed may hang in the destination's file system for a while."""
    Path(root).write_text("nothing gets there")

    def is_free() -> bool:
        with open(f"{tier}/{LOCK}") as lock:
            return is_locked(lock.fileno())

    with _started(tier, root, steps=1) as process:
        wait_until(lambda: not is_free())
        (left,) = promote(tier, root)
        wait_until(lambda: "another process" in left.status.trouble)
        Path(root).unlink()
        process.kill()
    left.result(PATIENCE_S)
    assert step_at(destination_of(root, 0)) == 0


def test_an_idle_process_keeps_nobody_from_promoting(tier: str, root: str) -> None:
    """One rank may promote what is left, and another one save."""
    with _started(tier, root, steps=1) as process:
        wait_until(lambda: step_at(destination_of(root, 0)) == 0)
        save_there(tier, root, 1)
        process.kill()


def test_a_start_leaves_the_record_to_the_process_that_promotes(tier: str, root: str) -> None:
    """Two processes that write it at once would fail a save, or forget what was promoted."""
    save_there(tier, root, 0)
    promotions.close()
    before = os.stat(f"{tier}/{RECORD}").st_ino
    assert promote(tier, root) == ()
    assert os.stat(f"{tier}/{RECORD}").st_ino == before


@contextmanager
def _started(tier: str, root: str, *, steps: int) -> Iterator[psutil.Process]:
    """A program that has saved, and waits."""
    program = str(TESTS / "programs" / "through_tier.py")
    command = [*loaded.python(), "-W", "ignore", program, tier, root, "0", str(steps), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            for step in range(steps):
                assert int(process.stdout.readline()) == step
            yield psutil.Process(process.pid)
        finally:
            process.kill()  # or a failure would wait for its end


def _run_killed(tier: str, root: str, *, steps: int) -> None:
    with _started(tier, root, steps=steps) as trainer:
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
    (coordinator,) = promote(out / "disk-0", out / "far", shared=False)
    wait_until(lambda: "1 of 2 files" in coordinator.status.trouble)
    assert not (out / "far" / "step" / ".metadata").exists()
    assert promote(out / "disk-1", out / "far", shared=False) == ()
    coordinator.result(PATIENCE_S)
    assert nostall.verify(out / "far" / "step").ok
    assert len(os.listdir(out / "far" / "step")) == 3
    wait_until(lambda: os.listdir(out / "disk-1" / "step") == [])


def test_a_crash_between_the_publication_and_its_record_changes_nothing(
    tier: str, root: str
) -> None:
    """The next promotion sees that the destination has the same metadata."""
    promotion = save_there(tier, root, 0)
    before = {each.name: each.stat().st_ino for each in Path(promotion.path).iterdir()}
    promotions.close()
    (Path(tier) / RECORD).write_text(EMPTY % root)
    (again,) = promote(tier, root)
    again.result(PATIENCE_S)
    assert before == {each.name: each.stat().st_ino for each in Path(promotion.path).iterdir()}
    assert promote(tier, root) == ()


@pytest.mark.parametrize("harm", ["flipped", "cut", "longer", "gone", "link"])
def test_a_damaged_local_file_is_never_published(tier: str, root: str, harm: str) -> None:
    """The handle says so, and later saves go on."""
    save_there(tier, root, 0)
    with hanging_destination():
        promotion = promotion_of(save(tier, root, 1))
        file = min(Path(promotion.local_path).glob("__*"))
        content = bytearray(file.read_bytes())
        content[1000] ^= harm == "flipped"
        file.unlink()
        if harm == "link":
            Path(f"{root}-2").write_bytes(content)
            file.symlink_to(f"{root}-2")
        elif harm != "gone":
            file.write_bytes(content[: -1 if harm == "cut" else None] + b"\0" * (harm == "longer"))
    with pytest.raises(DamagedCheckpointError, match="local"):
        promotion.result(PATIENCE_S)
    assert step_at(destination_of(root, 1)) is None
    save_there(tier, root, 2, local_staging_limit=1)


# --- what others have planted ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/outside.distcp", "a/b.distcp"])
def test_names_that_lead_away(tier: str, root: str, name: str, tmp_path: Path) -> None:
    """A manifest names files of its own directory, or nothing is copied, marked or removed."""
    (tmp_path / "outside.distcp").write_bytes(b"mine")
    local = Path(tier) / "step-1"
    (local / "a").mkdir(parents=True)
    (local / "a" / "b.distcp").write_bytes(b"mine")
    file = WrittenFile(name=name, nbytes=4, crc32=checksum.crc32(b"mine"))
    crc32 = checksum.crc32(b"\x80\x02N.")
    content = with_manifest([b"\x80\x02N."], [file], crc32=crc32, committed_at_s=time.time())
    (local / ".metadata").write_bytes(b"".join(content))
    (left,) = promote(tier, root)
    with pytest.raises(DamagedCheckpointError, match="manifest"):
        left.result(PATIENCE_S)
    (local / ".metadata").rename(local / ".metadata.tmp")
    copier = Copier(str(local), set(), lambda _nbytes, _of: None)
    assert copier.content(copying.DRAFT) == b"".join(content)
    assert files_of(b"".join(content)) == ()
    assert not Path(root).exists()
    assert (tmp_path / "outside.distcp").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["foreign", "link", "endless", "pipe", "nonsense", "deep"])
def test_a_planted_record(tier: str, root: str, kind: str, tmp_path: Path) -> None:
    """A foreign destination, or what is no record, is refused at once; nothing is written there."""
    record = Path(tier) / RECORD
    record.parent.mkdir()
    (tmp_path / "elsewhere").write_text(EMPTY % root)
    if kind == "pipe":
        os.mkfifo(record)
    elif kind in ("link", "endless"):
        record.symlink_to(tmp_path / "elsewhere" if kind == "link" else "/dev/zero")
    else:
        texts = {"foreign": EMPTY % "/elsewhere", "deep": "[" * 100_000}
        record.write_text(texts.get(kind, "nonsense"))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tier, root, 0)
    error = caught.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert "local_staging_dir cannot be used" in str(error)
    with pytest.raises(WriteError):
        promote(tier, root)
    assert (tmp_path / "elsewhere").read_text() == EMPTY % root
    assert not Path(root).exists()


def test_planted_links_are_not_followed(tier: str, root: str, tmp_path: Path) -> None:
    """Neither to read a checkpoint, nor to write to the destination, nor for the lock."""
    promotion = save_there(tier, root, 0)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (Path(tier) / "linked").symlink_to(promotion.local_path)
    (Path(tier) / ".removed-0123456789abcdef").symlink_to(precious)
    Path(destination_of(root, 1)).symlink_to(precious)
    refused = promotion_of(save(tier, root, 1))
    wait_until(lambda: "symbolic link" in refused.status.trouble)
    Path(destination_of(root, 1)).unlink()
    refused.result(PATIENCE_S)
    place = Path(root) / "other"
    place.mkdir()
    for file in Path(promotion.local_path).glob("__*"):
        (place / f"copy-of-{file.name}").symlink_to(precious / "file")
        (place / file.name).symlink_to(precious / "file")
    copy(promotion, str(place))
    assert step_at(str(place)) == 0
    assert not [each for each in place.iterdir() if each.is_symlink()]
    promotions.close()
    (Path(tier) / ".nostall-tier.lock").unlink()
    (Path(tier) / ".nostall-tier.lock").symlink_to(precious / "file")
    with pytest.raises(WriteError):
        promote(tier, root)
    assert [each.read_text() for each in precious.iterdir()] == ["precious"]
    assert not (Path(root) / "linked").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_not_read(tier: str, root: str) -> None:
    """They may have planted them in a directory that anybody can write to."""
    promotion = save_there(tier, root, 0)
    promotions.close()
    os.chown(Path(tier) / RECORD, 12345, 12345)
    with pytest.raises(WriteError, match="cannot be used"):
        promote(tier, root)
    (Path(tier) / RECORD).unlink()
    os.chown(promotion.local_path, 12345, 12345)
    assert promote(tier, root) == ()


# --- the end of the process -----------------------------------------------------------------------


@pytest.mark.parametrize("is_split", [False, True])
def test_a_program_that_ends_waits_for_its_promotions(
    tier: str, root: str, *, is_split: bool
) -> None:
    """Its last checkpoint is at its destination, also if it is committed at the end only."""
    split = (
        "from support.states import schedule; from nostall.core import AsyncCallsQueue as Queue;"
    )
    split += f"q = Queue(); schedule(q, {root!r} + '/s', s(1), local_staging_dir={tier!r})"
    with _saving_once(tier, root, PATIENCE_S, split if is_split else "") as process:
        process.communicate(timeout=2 * PATIENCE_S)
    assert (process.returncode, step_at(destination_of(root, 0))) == (0, 0)
    assert step_at(f"{root}/s") == (1 if is_split else None)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_program_whose_promotion_is_late_fails(
    tier: str, root: str, *, is_interrupted: bool
) -> None:
    """A job scheduler must not take the run for a success, whether Ctrl-C ends the wait or time."""
    Path(root).write_text("nothing gets there")
    with _saving_once(tier, root, PATIENCE_S if is_interrupted else 2.0) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waiting up to" in line)
        assert "exiting with 1 checkpoint not yet promoted" in line
        if is_interrupted:
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S / 2)
    assert process.returncode == 1
    assert f"not at its destination: path={destination_of(root, 0)}" in said
    assert "the next job with this local_staging_dir continues" in said


def _saving_once(
    tier: str, root: str, exit_timeout_s: float, then: str = ""
) -> subprocess.Popen[str]:
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import nostall; from programs.through_tier import save, state_of as s;"
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


def test_options_that_are_not_possible(
    tier: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused when the writer is made."""
    make = partial(FileSystemWriterAsync, f"{root}/step", local_staging_dir=tier)
    with pytest.raises(OptionError, match="local_staging_limit=0"):
        make(local_staging_limit=0)
    with pytest.raises(OptionError, match="open_file"):
        make(open_file=print)
    with pytest.raises(OptionError, match="object stores"):
        FileSystemWriterAsync(f"{root}/step", local_staging_dir="s3://bucket/tier")
    for path, local in ((f"{tier}/step", tier), (f"{root}/step", f"{root}/step/tier")):
        with pytest.raises(OptionError, match="is in local_staging_dir"):
            FileSystemWriterAsync(path, local_staging_dir=local)
    for path in (f"{root}/.step", "s3://bucket", "/step"):
        with pytest.raises(OptionError, match="a name without a leading dot"):
            FileSystemWriterAsync(path, local_staging_dir=tier)
    make(local_staging_shared=False)
    with pytest.raises(OptionError, match="tmpfs"):
        FileSystemWriterAsync(f"{root}/step", local_staging_dir="/dev/shm/tier")
    mount = SimpleNamespace(mountpoint=str(Path(tier).parent), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: [mount])
    with pytest.raises(OptionError, match="on a network: its file system is nfs4"):
        make()


def test_a_directory_that_cannot_be_used(tier: str, root: str, tmp_path: Path) -> None:
    """A typed error that names it; for two destinations, one would get those of the other."""
    save_there(tier, root, 0)
    with pytest.raises(dcp.api.CheckpointException, match="local_staging_dir is for"):
        save(tier, f"{root}-2", 0)
    (tmp_path / "file").touch()
    with pytest.raises(dcp.api.CheckpointException, match="cannot be used") as caught:
        save(str(tmp_path / "file"), root, 0)
    error = caught.value.failures[0][0]
    assert isinstance(error, WriteError)
    assert error.path == str(tmp_path / "file")
