"""Whether a checkpoint is what was written: what a user is told, and what is found."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nostall
from nostall._manifest import files_in_manifest, split
from nostall.core import AsyncCallsQueue
from nostall.errors import DamagedCheckpointError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import CheckpointMetadataCache
from states import schedule, small_state

COMMAND = [sys.executable, "-m", "nostall", "verify"]


def by_queue(path: Path, state: dict[str, Any], **options: Any) -> None:
    with AsyncCallsQueue() as queue:
        schedule(queue, path, state, **options)


def by_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=FileSystemWriterAsync(path, **options), no_dist=True)


def by_async_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    writer = FileSystemWriterAsync(path, **options)
    saved: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
    saved.result(60)


def by_stock(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)


WAYS = [by_queue, by_save, by_async_save, by_stock]
Way = Callable[..., None]


def state_of(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {**small_state(seed), "large": torch.randn(100_000, generator=generator)}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_is_found_to_be_whole(tmp_path: Path, way: Way) -> None:
    """However it was saved, by stock, too."""
    way(tmp_path / "save", state_of(), thread_count=3)
    found = nostall.verify(tmp_path / "save")
    assert found.damages == ()
    assert found.unchecked == ()
    assert found.items == len(dcp.FileSystemReader(tmp_path / "save").read_metadata().storage_data)
    assert found.files == 3
    assert found.has_manifest is (way is not by_stock)
    assert nostall.is_complete(tmp_path / "save")
    assert nostall.is_complete(tmp_path / "save", deep=True)
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "save")


@pytest.mark.parametrize("way", [by_queue, by_save, by_async_save])
def test_the_manifest_says_what_the_files_are(tmp_path: Path, way: Way) -> None:
    """Size and CRC-32 of every one, as any other tool computes them; and stock reads the metadata in front of it."""
    way(tmp_path, state_of(), thread_count=2)
    _, manifest = split((tmp_path / ".metadata").read_bytes(), path="")
    assert manifest is not None
    with open(tmp_path / ".metadata", "rb") as stream:
        assert files_in_manifest(stream) == {file.name for file in manifest.files}
    sums = {file.name: (file.nbytes, file.crc32) for file in manifest.files}
    contents = {file.name: file.read_bytes() for file in tmp_path.glob("*.distcp")}
    assert sums == {name: (len(content), zlib.crc32(content)) for name, content in contents.items()}
    loaded = {"large": torch.zeros(100_000)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["large"], state_of()["large"])


def test_every_save_of_a_known_structure_has_its_own_manifest(tmp_path: Path) -> None:
    """Although its metadata is not made anew."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(4):
            schedule(queue, tmp_path / f"{number}", state_of(number), cache=cache)
            queue.wait()
            assert nostall.verify(tmp_path / f"{number}").damages == ()


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_found_and_its_item_named(tmp_path: Path, way: Way) -> None:
    """In the middle of a tensor."""
    way(tmp_path, state_of(), thread_count=2)
    storage = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    (info,) = [info for index, info in storage.items() if index.fqn == "large"]
    flip(tmp_path / info.relative_path, info.offset + info.length // 2)
    (damage,) = nostall.verify(tmp_path).damages
    assert (damage.file, damage.items) == (info.relative_path, ("large",))
    assert "CRC-32" in damage.what
    assert nostall.is_complete(tmp_path)
    assert not nostall.is_complete(tmp_path, deep=True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.floats(0, 1, exclude_max=True))
def test_no_bit_of_a_checkpoint_with_a_manifest_can_flip_unseen(
    tmp_path_factory: pytest.TempPathFactory, where: float
) -> None:
    """Shard files and metadata, containers and manifest included."""
    path = tmp_path_factory.getbasetemp() / "flips"
    if not path.exists():
        by_queue(path, small_state(), thread_count=2)
    files = sorted(path.iterdir())
    at = int(where * sum(file.stat().st_size for file in files))
    for file in files:
        if at < file.stat().st_size:
            break
        at -= file.stat().st_size
    flip(file, at)
    try:
        assert file.name in {damage.file for damage in nostall.verify(path).damages}
    finally:
        flip(file, at)
    assert nostall.verify(path).ok


def test_no_bit_of_the_metadata_can_flip_unseen(tmp_path: Path) -> None:
    """Every single one of the pickle, of the manifest, and of what the manifest is found by."""
    by_queue(tmp_path, {"a": torch.ones(3)})
    content = (tmp_path / ".metadata").read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(DamagedCheckpointError):
            split(bytes(damaged), path="")


def cut_off(path: Path) -> str:
    os.truncate(path / "__0_1.distcp", (path / "__0_1.distcp").stat().st_size - 1)
    return "__0_1.distcp"


def emptied(path: Path) -> str:
    os.truncate(path / "__0_0.distcp", 0)
    return "__0_0.distcp"


def removed(path: Path) -> str:
    (path / "__0_1.distcp").unlink()
    return "__0_1.distcp"


def made_a_directory(path: Path) -> str:
    (path / "__0_1.distcp").unlink()
    (path / "__0_1.distcp").mkdir()
    return "__0_1.distcp"


def metadata_removed(path: Path) -> str:
    (path / ".metadata").unlink()
    return ".metadata"


def metadata_cut_off(path: Path) -> str:
    os.truncate(path / ".metadata", 100)
    return ".metadata"


def metadata_emptied(path: Path) -> str:
    os.truncate(path / ".metadata", 0)
    return ".metadata"


@pytest.mark.parametrize("way", [by_queue, by_stock])
@pytest.mark.parametrize(
    "damage",
    [
        cut_off,
        emptied,
        removed,
        made_a_directory,
        metadata_removed,
        metadata_cut_off,
        metadata_emptied,
    ],
)
def test_what_is_missing_is_named_and_not_complete(
    tmp_path: Path, way: Way, damage: Callable[[Path], str]
) -> None:
    """At a glance, without reading what is there."""
    way(tmp_path / "old", state_of(), thread_count=2)
    way(tmp_path / "new", state_of(), thread_count=2)
    file = damage(tmp_path / "new")
    found = nostall.verify(tmp_path / "new")
    assert [each.file for each in found.damages] == [file]
    assert not nostall.is_complete(tmp_path / "new")
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "old")


def test_files_that_were_exchanged_are_both_named(tmp_path: Path) -> None:
    """Although they are of one size and each is sound in itself."""
    state = {"a": torch.randn(5000), "b": torch.randn(5000)}
    by_queue(tmp_path, state, thread_count=2)
    one, other = tmp_path / "__0_0.distcp", tmp_path / "__0_1.distcp"
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "third")
    other.rename(one)
    (tmp_path / "third").rename(other)
    assert {damage.file for damage in nostall.verify(tmp_path).damages} == {one.name, other.name}


def test_metadata_of_another_save_is_found(tmp_path: Path) -> None:
    """Of the same structure, so that only the values differ."""
    for number in range(2):
        by_queue(tmp_path / f"{number}", state_of(number))
    shutil.copy(tmp_path / "0" / ".metadata", tmp_path / "1" / ".metadata")
    (damage,) = nostall.verify(tmp_path / "1").damages
    assert damage.file == "__0_0.distcp"


def test_checksums_that_were_switched_off_are_no_damage(tmp_path: Path) -> None:
    """It is said how many items were not checked."""
    try:
        torch.serialization.set_crc32_options(False)
        by_queue(tmp_path, {"a": torch.randn(500)})
    finally:
        torch.serialization.set_crc32_options(True)
    found = nostall.verify(tmp_path)
    assert (found.damages, found.unchecked) == ((), ("a",))


def test_latest_is_what_was_committed_last(tmp_path: Path) -> None:
    """Whatever the directories are called, and whenever they were copied."""
    for name in ("step 9", "step 10", "another"):
        by_queue(tmp_path / name, small_state())
    os.utime(tmp_path / "step 9" / ".metadata")
    (tmp_path / "no checkpoint").mkdir()
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "another")
    assert nostall.latest_complete(tmp_path / "no checkpoint") is None


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_says_what_is_wrong_and_exits_accordingly(tmp_path: Path) -> None:
    """0 for a checkpoint that is whole, 1 for one that is not or is not there, 2 for wrong arguments."""
    by_queue(tmp_path / "save", state_of(), thread_count=2)
    whole = run(tmp_path / "save")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "as it was written" in whole.stdout
    file = cut_off(tmp_path / "save")
    damaged = run(tmp_path / "save")
    assert damaged.returncode == 1
    assert f"damaged: {file}: it has " in damaged.stdout
    as_json = run(tmp_path / "save", "--json")
    assert as_json.returncode == 1
    plain = json.loads(as_json.stdout)
    assert plain["ok"] is False
    assert plain["damages"][0]["file"] == file
    nothing = run(tmp_path / "nothing")
    assert nothing.returncode == 1
    assert "no checkpoint was committed here" in nothing.stdout
    assert run().returncode == 2


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    """Bytes read never exceed bytes to read, and are all of them in the end."""
    by_queue(tmp_path, state_of(), thread_count=3)
    told: list[tuple[int, int]] = []
    nostall.verify(tmp_path, progress=lambda done, total: told.append((done, total)))
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert told[-1] == (nbytes, nbytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# --- what nobody has written by accident --------------------------------------------------------------------------------


def with_manifest_of(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Give a checkpoint a manifest that is valid but for what ``change`` does to it."""
    content = (path / ".metadata").read_bytes()
    pickled, _ = split(content, path="")
    plain = json.loads(content[len(pickled) + 1 :].split(b"\n")[0])
    change(plain)
    line = json.dumps(plain).encode() + b"\n"
    footer = f"#nostall-manifest {len(line):012d} {zlib.crc32(line):08x}\n".encode()
    (path / ".metadata").write_bytes(pickled + b"\n" + line + footer)


def another_file(name: str, nbytes: int = 0) -> Callable[[dict[str, Any]], object]:
    return lambda plain: plain["files"].append({"name": name, "nbytes": nbytes, "crc32": "0" * 8})


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "outside": another_file("../../../../../../../../etc/hostname"),
    "endless": another_file("/dev/zero"),
    "zero byte": another_file("a\0b"),
    "no character": another_file("a\ud800b"),
    "pipe": another_file("pipe"),
    "metadata": another_file(".metadata"),
    "negative": another_file("there is no such file", -1),
    "huge time": lambda plain: plain.update(committed_at=10**400),
    "no time": lambda plain: plain.update(committed_at=float("nan")),
    "no list": lambda plain: plain.update(files=7),
    "other format": lambda plain: plain.update(format=2),
    "no number": lambda plain: plain["metadata"].update(nbytes="many"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_damage_and_nothing_else(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """No file outside is opened, none that has no end is read, no pipe waited for, and nothing raised."""
    by_queue(tmp_path / "save", small_state())
    os.mkfifo(tmp_path / "save" / "pipe")
    with_manifest_of(tmp_path / "save", change)
    assert len(nostall.verify(tmp_path / "save").damages) == 1
    assert not nostall.is_complete(tmp_path / "save")
    assert nostall.latest_complete(tmp_path) is None


def test_metadata_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """It is no checkpoint."""
    (tmp_path / "save").mkdir()
    os.mkfifo(tmp_path / "save" / ".metadata")
    (damage,) = nostall.verify(tmp_path / "save").damages
    assert damage.file == ".metadata"
    assert nostall.latest_complete(tmp_path) is None
    by_queue(tmp_path / "save", {"a": torch.ones(3)})  # nor by a save that replaces it
    assert nostall.verify(tmp_path / "save").ok


@pytest.mark.parametrize("way", [by_queue, by_stock])
def test_an_item_without_a_place_is_damage(tmp_path: Path, way: Way) -> None:
    """Loading would ask for it."""
    way(tmp_path, small_state())
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == "weight"]
    del metadata.storage_data[index]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (damage,) = nostall.verify(tmp_path).damages
    assert "'weight'" in damage.what


def poisoned(metadata: bytes, target: type, name: str) -> bytes:
    """The same pickle, which sets an attribute of a class before."""
    build = (
        pickle.GLOBAL
        + f"{target.__module__}\n{target.__qualname__}\n".encode()
        + pickle.NONE
        + pickle.dumps({name: 7}, protocol=3)[2:-1]
        + pickle.TUPLE2
        + pickle.BUILD
        + pickle.POP
    )
    return metadata[:2] + build + metadata[2:]


@pytest.mark.parametrize("name", ["is_dir", "a_new_one"])
def test_a_pickle_cannot_change_classes_for_the_whole_process(tmp_path: Path, name: str) -> None:
    """What it has set is undone, and it is refused."""
    by_stock(tmp_path, small_state())
    metadata = tmp_path / ".metadata"
    before = dict(vars(type(metadata)))
    metadata.write_bytes(poisoned(metadata.read_bytes(), type(metadata), name))
    (damage,) = nostall.verify(tmp_path).damages
    assert "which is no part of it" in damage.what
    assert dict(vars(type(metadata))) == before


def test_what_is_no_archive_has_no_checksum(tmp_path: Path) -> None:
    """Another serialisation format is not damage; an archive that was overwritten is."""
    by_stock(tmp_path / "other", {"a": torch.ones(50), "b": torch.ones(60)})
    by_stock(tmp_path / "zeros", {"a": torch.ones(50), "b": torch.ones(60)})
    for path, names in ((tmp_path / "other", "ab"), (tmp_path / "zeros", "b")):
        storage = dcp.FileSystemReader(path).read_metadata().storage_data
        for index, info in storage.items():
            if index.fqn in names:
                with open(path / info.relative_path, "r+b") as stream:
                    stream.seek(info.offset)
                    stream.write(bytes(info.length))
    other = nostall.verify(tmp_path / "other")
    assert (other.damages, sorted(other.unchecked)) == ((), ["a", "b"])
    (damage,) = nostall.verify(tmp_path / "zeros").damages
    assert damage.items == ("b",)


def test_newer_checkpoints_that_are_passed_over_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is their metadata that is damaged."""
    for name in ("1", "2", "3"):
        by_queue(tmp_path / name, small_state())
    metadata_cut_off(tmp_path / "3")
    removed_file = tmp_path / "2" / "__0_0.distcp"
    removed_file.unlink()
    with caplog.at_level("WARNING", "nostall"):
        assert nostall.latest_complete(tmp_path) == str(tmp_path / "1")
    assert [str(tmp_path / "3") in caplog.text, str(tmp_path / "2") in caplog.text] == [True, True]


def test_metadata_that_ends_within_the_manifest_is_damaged(tmp_path: Path) -> None:
    """Wherever; but exactly behind the pickle it is a checkpoint without one."""
    by_queue(tmp_path, {"a": torch.ones(3)})
    content = (tmp_path / ".metadata").read_bytes()
    pickled, _ = split(content, path="")
    for end in range(len(pickled) + 1, len(content)):
        with pytest.raises(DamagedCheckpointError):
            split(content[:end], path="")
        assert files_in_manifest(io.BytesIO(content[:end])) is None
    assert split(pickled, path="") == (pickled, None)
    assert files_in_manifest(io.BytesIO(pickled)) is None
