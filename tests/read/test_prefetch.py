"""``nostall.prefetch``: what a rank will load is in the page cache before it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import checkpoint as dcp

import nostall
from benchmarks.machine import cached_share, drop, files_below
from nostall._memory.arena import memory_descriptor
from nostall._storage.posix import PosixStorage
from nostall.errors import OptionError, ReadError
from nostall.prefetching import (
    _PIECE_NBYTES,
    _SLOT_NBYTES,
    _Brought,
    _pieces,
    main,
    running,
    stop_prefetching,
)

MIB = 1 << 20
OF_ALL: dict[str, Any] = {"rank": 0, "world_size": 1, "most_nbytes": 1 << 40, "options": "{}"}
PROGRAM = """
import sys, nostall
nostall.prefetch(sys.argv[1])
assert "torch" not in sys.modules
from nostall.prefetching import running
((process, _),) = running.values()
assert process.wait() == 0
"""


def _state(seed: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((MIB,), float(seed + number)) for number in range(3)}


@pytest.fixture
def root() -> Iterator[Path]:
    """Two checkpoints, on storage only."""
    with tempfile.TemporaryDirectory() as directory:
        for step in (1, 2):
            writer = nostall.FileSystemWriterAsync(Path(directory) / f"step-{step}")
            dcp.save(_state(step), storage_writer=writer)
        drop(files_below(Path(directory)))
        yield Path(directory)


@pytest.mark.parametrize("name", ["", "step-2", "link"])
def test_the_newest_checkpoint_is_brought_before_torch_is_imported(root: Path, name: str) -> None:
    """In a directory of checkpoints, or the one that is named; and no other."""
    (root / "link").symlink_to("step-2")
    command = [sys.executable, "-c", PROGRAM, str(root / name)]
    subprocess.run(command, check=True, timeout=100)
    assert cached_share(files_below(root / "step-2")) == 1
    assert cached_share([next((root / "step-1").glob("*.distcp"))]) == 0


def test_a_load_ends_it_and_reads_the_rest(root: Path) -> None:
    """A process that does not go on, such as one that waits for storage, holds up no load."""
    nostall.prefetch(root)
    ((process, _),) = running.values()
    os.kill(process.pid, signal.SIGSTOP)
    nostall.load(loaded := _state(0), root / "step-2")
    assert process.returncode == -signal.SIGKILL
    assert running == {}
    assert all(torch.equal(loaded[name], value) for name, value in _state(2).items())


def test_nothing_is_read_for_a_process_that_has_ended(root: Path) -> None:
    """Whoever began it is no longer the parent."""
    main(path=str(root), parent=os.getpid(), memory=[], **OF_ALL)
    assert cached_share([next((root / "step-2").glob("*.distcp"))]) == 0


@pytest.mark.parametrize("most_nbytes", [1 << 40, 9 * MIB])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_bring_their_own_files_or_an_even_share(
    tmp_path: Path, world_size: int, most_nbytes: int
) -> None:
    """Each byte once, and none more than memory is for."""
    sizes = {"__0_0.distcp": 10 * MIB + 1, "__0_1.distcp": 1, "__1_0.distcp": 13 * MIB}
    for name, nbytes in sizes.items():
        os.truncate(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY), nbytes)
    (tmp_path / ".metadata").touch()
    found: Counter[str] = Counter()
    for rank in range(world_size):
        mine = _pieces(PosixStorage(str(tmp_path)), rank, world_size, most_nbytes)
        nbytes_of_mine = sum(each.nbytes for each in mine)
        names = {each.name for each in mine}
        if world_size == 2:
            assert all(name.startswith(f"__{rank}_") for name in names)
        assert nbytes_of_mine <= most_nbytes
        assert len({(each.name, each.begin) for each in mine}) == len(mine)
        for each in mine:
            found[each.name] += each.nbytes
    if most_nbytes > 9 * MIB:
        assert found == sizes
    else:
        assert found.total() == min(sum(sizes.values()), 9 * MIB * world_size)


@pytest.mark.parametrize("lost_nbytes", [0, 1])
def test_a_piece_that_is_not_whole_is_not_used(root: Path, lost_nbytes: int) -> None:
    """Memory may take less than it is given; what is there as a whole has a record."""
    memory = memory_descriptor("memory")
    really = os.pwrite
    with patch("os.pwrite", lambda *each: really(*each) - lost_nbytes):
        main(path=str(root), parent=os.getppid(), memory=[memory], **OF_ALL)
    found = _Brought(PosixStorage(str(root)), [memory])
    assert bool(found._pieces) is not bool(lost_nbytes)


@pytest.mark.parametrize("offset", [0, 10, 99, 150, 250, 390])
def test_what_is_not_in_memory_is_read(tmp_path: Path, offset: int) -> None:
    """Pieces that follow each other are used from the first byte asked for on."""
    (tmp_path / "file").write_bytes(b"s" * 400)
    files = PosixStorage(str(tmp_path))
    version = str(files.open("file").stat.version)
    memory = memory_descriptor("memory")
    pieces = ((100, 100, "\n"), (0, 100, "\n"), (300, 50, "\n"), (200, 100, ""))
    for number, (begin, nbytes, end) in enumerate(pieces):  # the last record is cut
        at = number * _SLOT_NBYTES
        record = json.dumps((files.where("file"), version, begin, nbytes))
        os.pwrite(memory, b"m" * nbytes, at)
        os.pwrite(memory, f"{record}{end}".encode(), at + _PIECE_NBYTES)
    target = bytearray(250)
    source = _Brought(files, [memory]).open("file")
    read = source.read_into(offset, memoryview(target)[:7], memoryview(target)[7:])
    expected = (b"m" * 200 + b"s" * 100 + b"m" * 50 + b"s" * 50)[offset : offset + 250]
    if offset < 300:  # the rest of the range is asked for as a whole
        expected = expected[: max(0, 200 - offset)] + b"s" * (len(expected) - max(0, 200 - offset))
    assert bytes(target[:read]) == expected


def test_what_is_not_there_is_an_error_of_the_load_only(tmp_path: Path) -> None:
    """Unless the path can be none."""
    nostall.prefetch(tmp_path / "none")
    with pytest.raises(ReadError):
        nostall.load(_state(0), tmp_path / "none")
    stop_prefetching()
    with pytest.raises(OptionError):
        nostall.prefetch("")
    assert running == {}
