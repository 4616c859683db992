"""After a crash at any moment of a save the old checkpoint is there, or the new one.

Every operation that a save makes on storage is recorded. For every prefix of that sequence, and for
everything that a crash at that moment may leave (see ``crashes``), the directory is rebuilt and
looked at the way a resuming job does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.options import EngineOptions
from nostall.state_dict_saver import CheckpointMetadataCache
from programs.entry_points import differing
from support.crashes import Disk, Operation, found_in, rebuild, recorded
from support.states import planned


def state_of(seed: int) -> dict[str, Any]:
    return {
        "large": torch.full((7000,), float(seed)),
        "small": torch.arange(5) + seed,
        "epoch": seed,
    }


def by_save(path: Path, seed: int) -> None:
    """``dcp.save``, without a snapshot."""
    dcp.save(
        state_of(seed), storage_writer=FileSystemWriterAsync(path, thread_count=2), no_dist=True
    )


def by_split(path: Path, seed: int, cache: CheckpointMetadataCache | None = None) -> None:
    """The split functions, with a snapshot; the request runs in this process as in the writer."""
    planned(path, state_of(seed), thread_count=2, cache=cache)[1].execute_sync()


def of_a_known_structure(path: Path, seed: int) -> None:
    """A save whose metadata are those of the save before, with other names of files."""
    by_split(path, seed, KNOWN)


KNOWN = CheckpointMetadataCache()
WAYS = [by_save, by_split]
Way = Callable[[Path, int], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory in which checkpoints are made, which exists durably."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def small_chunks() -> Any:
    nostall.configure(EngineOptions(chunk_nbytes=8192, io_threads=2))
    yield
    nostall.configure(EngineOptions())


def loaded_from(path: Path) -> int:
    """Which save a resuming job finds in a directory."""
    state = state_of(-1)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    seed: int = state["epoch"]
    assert differing(state, state_of(seed)) == []
    return seed


def outcomes(
    before: Disk,
    root: Path,
    operations: list[Operation],
    out: Path,
    then: Callable[[Path], None] | None = None,
) -> list[set[int | None]]:
    """For every number of operations before a crash, the saves that may be found, or ``None``."""
    disk, found = before, []
    for number in range(len(operations) + 1):
        if number:
            disk.apply(operations[number - 1])
        here: set[int | None] = set()
        for left in disk.after_crash():
            place = out / "left"
            rebuild(left, root, place)
            here.add(found_in(place / "checkpoint", loaded_from))
            if then is not None:
                then(place / "checkpoint")
                assert not (place / "checkpoint").exists()
            shutil.rmtree(place)
        found.append(here)
    return found


def require_one_or_the_other(
    old: int | None,
    new: int | None,
    act: Callable[[], object],
    out: Path,
    then: Callable[[Path], None] | None = None,
) -> list[str]:
    """A crash while it acts leaves either save, and later the new one; what it did, and to what."""
    root = out / "root"
    before = Disk.holding(root)
    with recorded() as operations:
        act()
    found = outcomes(before, root, operations, out, then)
    assert found[0] == {old}
    assert {old, new} in found
    assert found[-1] == {new}
    assert set().union(*found) == {old, new}
    return [f"{each.name} {Path(each.path).name}" for each in operations]


@pytest.mark.parametrize("way", [*WAYS, of_a_known_structure])
def test_a_new_checkpoint_is_there_as_a_whole_or_not_at_all(
    root: Path, tmp_path: Path, way: Way
) -> None:
    """And it is there for good when the save call has returned, its directory included."""
    for number in range(4 if way is of_a_known_structure else 0):
        way(tmp_path / f"known {number}", 0)
    done = require_one_or_the_other(None, 1, lambda: way(root / "checkpoint", 1), tmp_path)
    made = [each for each in done if each.startswith("create") and each.endswith(".tmp")]
    assert len(made) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_is_replaced_is_there_until_the_new_one_is(
    root: Path, tmp_path: Path, way: Way
) -> None:
    """Never none and never a mixture; the old files go when the new checkpoint is durable."""
    way(root / "checkpoint", 1)
    done = require_one_or_the_other(1, 2, lambda: way(root / "checkpoint", 2), tmp_path)
    assert len([each for each in done if each.startswith("unlink")]) >= 2


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_that_is_removed_is_there_as_a_whole_or_not_at_all(
    root: Path, tmp_path: Path, way: Way
) -> None:
    """A crash leaves the checkpoint or nothing like one; removing it again removes the rest."""
    way(root / "checkpoint", 1)
    remove = nostall.remove_checkpoint
    require_one_or_the_other(1, None, lambda: remove(root / "checkpoint"), tmp_path, then=remove)


def test_the_model_finds_files_that_are_removed_before_the_metadata(
    root: Path, tmp_path: Path
) -> None:
    """Removal in file system order, like ``shutil.rmtree``'s, or without fsync is detected."""
    by_save(root / "checkpoint", 1)
    before = Disk.holding(root)
    with recorded() as operations:
        nostall.remove_checkpoint(root / "checkpoint")
    metadata, *rest = operations
    assert metadata.path.endswith(".metadata")
    for order in ([*rest, metadata], [metadata, *(each for each in rest if each.name != "fsync")]):
        disk = Disk(dict(before.names), dict(before.now), [])
        with pytest.raises(AssertionError):
            outcomes(disk, root, order, tmp_path)
        shutil.rmtree(tmp_path / "left")


def test_the_levels_above_a_new_checkpoint_are_durable_too(root: Path, tmp_path: Path) -> None:
    """All of them that the save has made."""
    before = Disk.holding(root)
    with recorded() as operations:
        by_save(root / "run" / "of today" / "checkpoint", 1)
    for operation in operations:
        before.apply(operation)
    for left in before.after_crash():
        rebuild(left, root, tmp_path / "left")
        assert loaded_from(tmp_path / "left" / "run" / "of today" / "checkpoint") == 1
        shutil.rmtree(tmp_path / "left")


def test_the_model_finds_a_missing_fsync(root: Path, tmp_path: Path) -> None:
    """Without any one fsync some crash loses or tears a checkpoint: the test above can fail."""
    by_save(root / "checkpoint", 1)
    before = Disk.holding(root)
    with recorded() as operations:
        by_save(root / "checkpoint", 2)
    unnoticed = []
    for number, operation in enumerate(operations):
        if operation.name != "fsync" or operation.path == str(root):
            continue  # that of the directory's own name is needed for a new one only
        without = [*operations[:number], *operations[number + 1 :]]
        disk = Disk(dict(before.names), dict(before.now), [])
        try:
            found = outcomes(disk, root, without, tmp_path)
        except AssertionError:
            shutil.rmtree(tmp_path / "left", ignore_errors=True)
            continue
        if found[-1] == {2} and set().union(*found) == {1, 2}:
            unnoticed.append(operation)
    assert unnoticed == []
