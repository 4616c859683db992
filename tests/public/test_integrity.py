"""Whether a checkpoint is what was written: what is found, and what is reported."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import nostall
from nostall import integrity
from nostall._commit import commit
from nostall._commit.checking import read_inventory
from nostall._commit.manifest import manifest_alone, split
from nostall._storage import port, posix
from nostall.cli import main
from nostall.core import AsyncCallsQueue
from nostall.errors import DamagedCheckpointError, OptionError, ReadError, UnknownMetadataError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.integrity import State
from nostall.state_dict_saver import CheckpointMetadataCache
from support.manifests import with_manifest_of
from support.permissions import without_permission
from support.states import (
    read_metadata,
    save_in_background,
    save_now,
    save_split,
    save_stock_way,
    schedule,
    small_state,
)
from support.waiting import AwayOs, RememberingOs

WAYS = [save_split, save_now, save_in_background, save_stock_way]
Way = Callable[..., None]


def state_of(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {**small_state(seed), "large": torch.randn(100_000, generator=generator)}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_saved_is_found_to_be_whole(tmp_path: Path, way: Way) -> None:
    """However it was saved, by stock, too; nostall's manifest has the CRC-32 of other tools."""
    path = tmp_path / "save"
    way(path, state_of(), thread_count=3)
    told: list[tuple[int, int]] = []
    found = nostall.verify(path, progress=lambda done, total: told.append((done, total)))
    assert found.ok
    assert found.unchecked == ()
    assert found.items == len(dcp.FileSystemReader(path).read_metadata().storage_data)
    assert found.files == 3
    assert nostall.is_complete(path)
    assert nostall.is_complete(path, deep=True)
    assert nostall.latest_complete(tmp_path) == str(path)
    contents = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    nbytes = sum(map(len, contents.values()))
    assert told == sorted(told)
    assert told[-1] == (nbytes, nbytes)
    _, manifest = split((path / ".metadata").read_bytes(), path="")
    assert found.has_manifest is (manifest is not None) is (way is not save_stock_way)
    if manifest is not None:
        with open(path / ".metadata", "rb") as stream:
            assert manifest_alone(stream) == manifest
        sums = {file.name: (file.nbytes, file.crc32) for file in manifest.files}
        assert sums == {name: (len(each), zlib.crc32(each)) for name, each in contents.items()}


def test_every_save_of_a_known_structure_has_its_own_manifest(tmp_path: Path) -> None:
    """Although its metadata is not made anew."""
    cache = CheckpointMetadataCache()
    with AsyncCallsQueue() as queue:
        for number in range(4):
            schedule(queue, tmp_path / f"{number}", state_of(number), cache=cache)
            queue.wait()
            assert nostall.verify(tmp_path / f"{number}").ok


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
        save_split(path, small_state(), thread_count=2)
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
    """Nor can its end go, but for all behind the pickle, which leaves one without a manifest."""
    save_split(tmp_path, {"a": torch.ones(3)})
    content = (tmp_path / ".metadata").read_bytes()
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(DamagedCheckpointError):
            split(bytes(damaged), path="")
    pickled, _ = split(content, path="")
    for end in range(len(pickled) + 1, len(content)):
        with pytest.raises(DamagedCheckpointError):
            split(content[:end], path="")
        assert manifest_alone(io.BytesIO(content[:end])) is None
    assert split(pickled, path="") == (pickled, None)
    assert manifest_alone(io.BytesIO(pickled)) is None


def made_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("way", [save_split, save_stock_way])
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *product((cut_off, emptied, Path.unlink, made_a_directory), ["__0_1.distcp"]),
        *product((cut_off, emptied), [".metadata"]),
    ],
)
def test_what_is_missing_is_named_and_not_complete(
    tmp_path: Path, way: Way, damage: Callable[[Path], None], name: str
) -> None:
    """At a glance, without reading what is there."""
    way(tmp_path / "old", state_of(), thread_count=2)
    way(tmp_path / "new", state_of(), thread_count=2)
    damage(tmp_path / "new" / name)
    found = nostall.verify(tmp_path / "new")
    assert [each.file for each in found.damages] == [name]
    assert not nostall.is_complete(tmp_path / "new")
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "old")


def test_files_that_were_exchanged_are_both_named(tmp_path: Path) -> None:
    """Although they are of one size and each is sound in itself."""
    state = {"a": torch.randn(5000), "b": torch.randn(5000)}
    save_split(tmp_path, state, thread_count=2)
    one, other = tmp_path / "__0_0.distcp", tmp_path / "__0_1.distcp"
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "third")
    other.rename(one)
    (tmp_path / "third").rename(other)
    assert {damage.file for damage in nostall.verify(tmp_path).damages} == {one.name, other.name}


def test_checksums_that_were_switched_off_are_no_damage(tmp_path: Path) -> None:
    """It is said how many items were not checked."""
    try:
        torch.serialization.set_crc32_options(False)
        save_split(tmp_path, {"a": torch.randn(500)})
    finally:
        torch.serialization.set_crc32_options(True)
    found = nostall.verify(tmp_path)
    assert (found.damages, found.unchecked) == ((), ("a",))


def test_latest_is_what_was_committed_last(tmp_path: Path) -> None:
    """Whatever the directories are called, and whenever they were copied."""
    for name in ("step 9", "step 10", "another"):
        save_split(tmp_path / name, small_state())
    os.utime(tmp_path / "step 9" / ".metadata")
    (tmp_path / "no checkpoint").mkdir()
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "another")
    assert nostall.latest_complete(tmp_path / "no checkpoint") is None


def test_the_command_says_what_is_wrong_and_exits_accordingly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for a checkpoint that is damaged or cannot be read, 4 if nothing can be said of it."""
    save_stock_way(tmp_path / "other", small_state(), planner=PlannerOfOwn())
    assert main(["verify", str(tmp_path / "other")]) == 4
    assert "NOT UNDERSTOOD" in capsys.readouterr().out
    save_split(tmp_path / "save", small_state())
    with without_permission(tmp_path / "save" / ".metadata"):
        assert main(["verify", str(tmp_path / "save")]) == 1
    shown = capsys.readouterr().out
    assert "unreadable: .metadata: cannot be read: Permission denied" in shown
    assert "damaged" not in shown.lower()
    cut_off(tmp_path / "save" / "__0_0.distcp")
    assert main(["verify", str(tmp_path / "save")]) == 1
    assert "damaged: __0_0.distcp: has " in capsys.readouterr().out


# --- hostile metadata and manifests ---------------------------------------------------------------


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
    """No file outside is opened, no endless one read, no pipe waited for, nothing raised."""
    save_split(tmp_path / "save", small_state())
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
    save_split(tmp_path / "save", {"a": torch.ones(3)})  # nor by a save that replaces it
    assert nostall.verify(tmp_path / "save").ok


@pytest.mark.parametrize("way", [save_split, save_stock_way])
def test_an_item_without_a_place_is_damage(tmp_path: Path, way: Way) -> None:
    """Loading would ask for it."""
    way(tmp_path, small_state())
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == "weight"]
    del metadata.storage_data[index]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (damage,) = nostall.verify(tmp_path).damages
    assert "'weight'" in damage.what


class PlannerOfTexts(DefaultSavePlanner):
    """Writes objects as JSON, as planners of frameworks may."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Resolve objects to JSON texts, and tensors like stock."""
        if write_item.type != WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return io.BytesIO(json.dumps(self.state_dict[write_item.index.fqn]).encode())


@pytest.mark.parametrize("names", [{"a", "b"}, {"b"}, {"step"}])
def test_an_item_that_was_overwritten_is_damage(tmp_path: Path, names: set[str]) -> None:
    """Also if no file holds anything like what was written, as after the loss of a disk."""
    path = tmp_path / "save"
    save_stock_way(path, {**dict.fromkeys(names, 7), "a": torch.ones(50), "b": torch.ones(60)})
    for index, info in read_metadata(path).storage_data.items():
        if index.fqn in names:
            with open(path / info.relative_path, "r+b") as stream:
                stream.seek(info.offset)
                stream.write(bytes(info.length))
    (damage,) = nostall.verify(path).damages
    assert set(damage.items) == names
    assert not nostall.is_complete(path, deep=True)
    assert nostall.latest_complete(tmp_path, deep=True) is None


def test_an_object_in_another_form_has_no_checksum(tmp_path: Path) -> None:
    """That is not damage."""
    save_stock_way(tmp_path, {"step": 7}, planner=PlannerOfTexts())
    texts = nostall.verify(tmp_path)
    assert (texts.ok, texts.damages, texts.unchecked) == (True, (), ("step",))


# --- metadata of others ---------------------------------------------------------------------------


class Mode(Enum):
    """Something of a planner's own."""

    FAST = 1


class PlannerOfOwn(DefaultSavePlanner):
    """Puts an unknown class into the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan like stock, and put an enum member into the planner data."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {"mode": Mode.FAST, "names": {"a", "b"}}
        return plans, metadata


def keeping_keys() -> DefaultSavePlanner:
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


OTHERS: list[tuple[Callable[[], DefaultSavePlanner], dict[Any, Any]]] = [
    (PlannerOfOwn, {"a": torch.ones(4), "nested": {1: {2: torch.ones(3)}}}),
    (DefaultSavePlanner, {"a": torch.ones(4), "step": 3}),
    (keeping_keys, {0: torch.ones(4), 7: 5}),
    (keeping_keys, {("a", 1): torch.ones(4)}),
    (keeping_keys, {None: torch.ones(3), 1.5: 2}),
]


@pytest.mark.parametrize(("planner", "state"), OTHERS)
@pytest.mark.parametrize("way", [save_split, save_now, save_in_background])
def test_what_was_committed_is_never_denied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
    planner: Callable[[], DefaultSavePlanner],
    state: dict[Any, Any],
) -> None:
    """Whatever a planner puts into the metadata, whatever keys are, whatever torch has saved it."""
    if planner is DefaultSavePlanner:  # as a newer torch pickles
        pickled: Any = TensorProperties.__getstate__
        monkeypatch.setattr(
            TensorProperties, "__getstate__", lambda properties: (*pickled(properties), (), (), ())
        )
    path = tmp_path / "save"
    way(path, state, planner=planner())
    assert nostall.is_complete(path)
    assert nostall.is_complete(path, deep=True)
    assert nostall.latest_complete(tmp_path) == str(path)
    found = nostall.verify(path)
    assert (found.state, found.damages, found.has_manifest) == (State.WHOLE, (), True)
    (file,) = path.glob("*.distcp")
    flip(file, file.stat().st_size // 2)
    (damage,) = nostall.verify(path).damages
    assert damage.file == file.name


def test_unknown_metadata_is_not_reported_as_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a manifest nothing can be said; a caller that asks for the latest gets an error."""
    other = tmp_path / "other"
    save_stock_way(other, small_state(), planner=PlannerOfOwn())
    found = nostall.verify(other)
    assert (found.ok, found.state, found.damages) == (False, State.NOT_UNDERSTOOD, ())
    for deep in (False, True):
        with pytest.raises(UnknownMetadataError):
            nostall.is_complete(other, deep)
        with pytest.raises(UnknownMetadataError, match="1 checkpoint cannot be read or") as caught:
            nostall.latest_complete(tmp_path, deep)
        assert str(other) in str(caught.value)
    save_stock_way(tmp_path / "damaged", small_state())
    (tmp_path / "damaged" / "__0_0.distcp").unlink()
    with pytest.raises(UnknownMetadataError):
        nostall.latest_complete(tmp_path)
    save_stock_way(tmp_path / "old", small_state())
    os.utime(tmp_path / "old" / ".metadata", (0, 0))
    with caplog.at_level("WARNING", "nostall"):
        assert nostall.latest_complete(tmp_path) == str(tmp_path / "old")
    assert str(other) in caplog.text


def test_metadata_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a manifest it need not be."""
    monkeypatch.setattr(port, "MOST_METADATA_NBYTES", 100)
    for way, state in ((save_split, State.WHOLE), (save_stock_way, State.NOT_UNDERSTOOD)):
        way(tmp_path / way.__name__, small_state())
        found = nostall.verify(tmp_path / way.__name__)
        assert (found.state, found.damages) == (state, ())
        assert "the limit for metadata is 100" in (found.note or "")
    assert nostall.is_complete(tmp_path / "save_split", deep=True)
    save_split(tmp_path / "save_stock_way", small_state())  # nor by a save that replaces it


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    """The new one is verified; one that is replaced again and again is not judged."""

    def verified(saves: int) -> integrity.Verification:
        seeds = iter(range(1, saves + 1))

        def replace(nbytes: int, total: int) -> None:
            if (seed := next(seeds, None)) is not None:
                save_now(tmp_path, state_of(seed), thread_count=4)

        save_now(tmp_path, state_of(), thread_count=4)
        return nostall.verify(tmp_path, threads=1, progress=replace)

    assert verified(1).ok
    seeds = iter([5])

    def read_then_replace(*arguments: Any, **options: Any) -> Any:
        described = read_inventory(*arguments, **options)
        for seed in seeds:
            save_now(tmp_path, state_of(seed), thread_count=4)
        return described

    with patch("nostall.integrity.read_inventory", read_then_replace):
        assert nostall.is_complete(tmp_path)
    assert next(seeds, None) is None
    found = verified(1000)
    assert (found.state, str(*found.damages)) == (
        State.UNREADABLE,
        ".metadata: replaced whenever it was read",
    )


def test_where_there_is_none_is_not_damage(tmp_path: Path) -> None:
    """No directory, none that a save was committed to, or a file, which has no latest, either."""
    save_split(tmp_path / "uncommitted", small_state())
    (tmp_path / "uncommitted" / ".metadata").unlink()
    (tmp_path / "file").touch()
    for name, why in {
        "nothing": "no such directory",
        "uncommitted": "no checkpoint was committed here",
        "file": "a file",
    }.items():
        found = nostall.verify(tmp_path / name)
        assert (found.ok, found.state, found.damages) == (False, State.NOT_THERE, ()), name
        assert why in (found.note or "")
        assert not nostall.is_complete(tmp_path / name)
        assert not nostall.is_complete(tmp_path / name, deep=True)
    assert nostall.latest_complete(tmp_path / "nothing") is None
    with pytest.raises(ReadError, match="Not a directory") as caught:
        nostall.latest_complete(tmp_path / "file")
    assert (caught.value.path, caught.value.errno) == (str(tmp_path / "file"), errno.ENOTDIR)


@pytest.mark.parametrize("look", [nostall.verify, nostall.is_complete, nostall.latest_complete])
def test_an_unknown_store_or_nothing_does_not_look_like_an_empty_directory(
    look: Callable[[str], Any],
) -> None:
    """A job that finds no checkpoint starts from scratch."""
    with pytest.raises(OptionError, match=r"nowhere:// are not supported"):
        look("nowhere://bucket/checkpoints")
    with pytest.raises(OptionError, match="the checkpoint path is empty"):
        look("")


def test_newer_checkpoints_that_are_passed_over_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is their metadata that is damaged."""
    for name in ("1", "2", "3"):
        save_split(tmp_path / name, small_state())
    cut_off(tmp_path / "3" / ".metadata")
    (tmp_path / "2" / "__0_0.distcp").unlink()
    with caplog.at_level("WARNING", "nostall"):
        assert nostall.latest_complete(tmp_path) == str(tmp_path / "1")
    assert [str(tmp_path / name) in caplog.text for name in "23"] == [True, True]


@contextmanager
def away(path: Path, operation: str) -> Iterator[None]:
    """Storage does not know files below a directory for a moment."""
    storage = AwayOs(operation, f"{path}/")
    with patch.object(commit, "os", storage), patch.object(posix, "os", storage):
        yield


AGAIN, RIGHTS = "try again when storage answers", "give this user the right to read it"
TROUBLES: dict[str, tuple[Callable[[Path], AbstractContextManager[None]], str]] = {
    "stat": (partial(away, operation="stat"), AGAIN),
    "open": (partial(away, operation="open"), AGAIN),
    "directory": (without_permission, RIGHTS),
    "metadata": (lambda path: without_permission(path / ".metadata"), RIGHTS),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_latest_is_not_denied_while_storage_is_away(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job does not begin anew because of a hiccup; an older one is taken, with a warning."""
    for path in ("one/new", "two/old", "two/new"):
        save_split(tmp_path / path, small_state())
    (tmp_path / "one" / "lost+found").mkdir()
    hide, hint = TROUBLES[trouble]
    with hide(tmp_path / "one" / "new"):
        with pytest.raises(ReadError, match="1 checkpoint cannot be read or understood") as caught:
            nostall.latest_complete(tmp_path / "one")
        assert (caught.value.path, caught.value.hint) == (str(tmp_path / "one" / "new"), hint)
        found = nostall.verify(tmp_path / "one" / "new")
        assert (found.ok, found.state) == (False, State.UNREADABLE)
    with hide(tmp_path / "two" / "new"), caplog.at_level("WARNING", "nostall"):
        assert nostall.latest_complete(tmp_path / "two") == str(tmp_path / "two" / "old")
    assert f"skipped {tmp_path / 'two' / 'new'}: the checkpoint cannot be read" in caplog.text
    assert nostall.latest_complete(tmp_path / "two") == str(tmp_path / "two" / "new")


@pytest.mark.parametrize("part", [".distcp", ".metadata"])
@pytest.mark.parametrize("look", ["is_complete", "verify", "load", "dcp.load"])
def test_a_file_that_another_host_has_just_made_is_not_missing(
    tmp_path: Path, look: str, part: str
) -> None:
    """A host with NFS remembers for a while that a file did not exist when it last looked."""
    save_split(tmp_path / "save", {"w": torch.ones(9)})
    found = {"w": torch.zeros(9)}
    with patch.object(posix, "os", RememberingOs(part)) as storage:
        if look == "load":
            nostall.load(found, tmp_path / "save")
        elif look == "dcp.load":
            reader = nostall.FileSystemReader(tmp_path / "save")
            dcp.load(found, storage_reader=reader, no_dist=True)
        elif look == "verify":
            assert nostall.verify(tmp_path / "save").ok
        else:
            assert nostall.is_complete(tmp_path / "save")
        assert storage.denied
    assert "load" not in look or torch.equal(found["w"], torch.ones(9))


def test_a_shard_that_may_not_be_read_is_not_damage(tmp_path: Path) -> None:
    """Beside damage, which counts."""
    save_split(tmp_path / "new", {f"{each}": torch.ones(9) for each in range(4)}, thread_count=2)
    first, second = sorted((tmp_path / "new").glob("*.distcp"))
    with without_permission(first):
        assert nostall.verify(tmp_path / "new").state is State.UNREADABLE
        with pytest.raises(ReadError, match="Permission denied"):
            nostall.latest_complete(tmp_path, deep=True)
        assert nostall.latest_complete(tmp_path) == str(tmp_path / "new")  # looks at sizes only
        second.write_bytes(bytes(second.stat().st_size))
        found = nostall.verify(tmp_path / "new")
        assert found.state is State.DAMAGED
        assert [each.is_certain for each in found.damages] == [False, True]
    second.unlink()
    with without_permission(first):
        assert nostall.verify(tmp_path / "new").state is State.DAMAGED


def test_a_root_that_is_a_checkpoint_itself_is_refused(tmp_path: Path) -> None:
    """A job that is told of no checkpoint begins from scratch, and saves over it."""
    dcp.save({"weight": torch.ones(3)}, storage_writer=FileSystemWriterAsync(tmp_path))
    with pytest.raises(OptionError, match="this is a checkpoint itself"):
        nostall.latest_complete(tmp_path)
    dcp.save({"weight": torch.ones(3)}, storage_writer=FileSystemWriterAsync(tmp_path / "step-1"))
    assert nostall.latest_complete(tmp_path) == str(tmp_path / "step-1")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "__0.metadata").touch()  # of a rank with use_collectives=False
    with pytest.raises(OptionError, match="this is a checkpoint itself"):
        nostall.latest_complete(tmp_path / "alone")


def test_a_root_that_storage_does_not_tell_about_is_no_checkpoint(tmp_path: Path) -> None:
    """Nor is one with a directory of that name; only storage's error is one."""
    with (
        patch.object(posix.PosixStorage, "stat", side_effect=OSError(errno.EIO, "by a test")),
        pytest.raises(ReadError, match="by a test"),
    ):
        nostall.latest_complete(tmp_path)
    (tmp_path / ".metadata").mkdir()
    assert nostall.latest_complete(tmp_path) is None
