"""The storage port: its implementations, and the layers above when storage fails."""

from __future__ import annotations

import errno
import mmap
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nostall._commit.commit import commit
from nostall._model.jobs import Faults, FileImage, SealTable, WriteJob
from nostall._storage.port import Conflict, Storage
from nostall._storage.posix import PosixStorage
from nostall._writer.chunks import write_images
from nostall._writer.shared import Position, WholeImage
from nostall.errors import NotDurableError, WriteError
from support import storage_contract
from support.memory_storage import MemoryStorage

EIO = OSError(errno.EIO, "storage is away")


def _posix(path: Path, **options: bool) -> Storage:
    return PosixStorage(str(path), **options)


MAKERS: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda _: MemoryStorage(),
    "posix": _posix,
    "posix, direct": lambda path: _posix(path, direct=True),
    "posix, not synced": lambda path: _posix(path, sync=False),
}


@pytest.mark.parametrize(
    "check", storage_contract.FILE_SYSTEM_CHECKS, ids=lambda check: check.__name__
)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_implementation_keeps_the_contract(
    tmp_path: Path, make: Callable[[Path], Storage], check: Callable[[Storage], None]
) -> None:
    """The shipped fake does what a file system does."""
    check(make(tmp_path))


class _Overwriting(MemoryStorage):
    def put(self, name: str, nbytes: int, **options: Any) -> Any:
        self.remove([name])
        return super().put(name, nbytes, **options)


class _Careless(MemoryStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        super().publish(name, content, **{**options, "expected": None})


class _Hasty(MemoryStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        before = options.pop("before", lambda: None)
        super().publish(name, content, **options)
        before()


class _Tearing(MemoryStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        super().publish(name, [b"half"])
        super().publish(name, content, **options)


@pytest.mark.parametrize("kind", [_Overwriting, _Careless, _Hasty, _Tearing])
def test_the_contract_finds_a_storage_that_breaks_it(kind: type[MemoryStorage]) -> None:
    """Each rule is checked by something."""
    broken = []
    for check in storage_contract.FILE_SYSTEM_CHECKS:
        try:
            check(kind())
        except AssertionError:
            broken.append(check)
        except Conflict:
            broken.append(check)
    assert broken


def test_a_conflict_crosses_processes() -> None:
    """With the place."""
    conflict = pickle.loads(pickle.dumps(Conflict("memory:///.metadata")))
    assert (conflict.errno, conflict.filename) == (errno.ESTALE, "memory:///.metadata")


# --- the layers above ----------------------------------------------------------------------------


def _commit(storage: MemoryStorage, **options: Any) -> tuple[str, ...]:
    arguments = {"metadata_name": ".metadata", "replaced_files": ["old.distcp"], **options}
    return commit(storage, [b"new ", b"metadata"], **arguments)


@pytest.fixture
def memory() -> MemoryStorage:
    """With a checkpoint."""
    storage = MemoryStorage()
    storage.put("old.distcp", 0).finish()
    storage.publish(".metadata", [b"old"])
    storage.operations.clear()
    return storage


def test_the_fake_fails_as_the_port_says(memory: MemoryStorage) -> None:
    """Giving an upload up never raises."""
    memory.fail("abort", EIO)
    memory.put("new.distcp", 1).close()
    assert memory.operations == [("put", "new.distcp")]


def test_replaced_files_are_determined_after_the_publication(memory: MemoryStorage) -> None:
    """So none is named that could be part of the checkpoint until then."""

    def replaced() -> Iterator[str]:
        assert memory.operations == [("publish", ".metadata")]
        yield "old.distcp"

    assert _commit(memory, replaced_files=replaced()) == ("old.distcp",)


def test_a_commit_that_storage_refuses_removes_nothing(memory: MemoryStorage) -> None:
    """The error names the place and the reason."""
    memory.fail("publish", EIO)
    with pytest.raises(WriteError, match="storage is away") as caught:
        _commit(memory)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, "memory:///.metadata")
    assert memory.operations == []
    assert sorted(memory.list()) == [".metadata", "old.distcp"]


def test_a_commit_in_doubt_removes_nothing(memory: MemoryStorage) -> None:
    """No file is removed, as either checkpoint may be the published one."""
    memory.fail("publish", EIO, done=True)
    with pytest.raises(NotDurableError):
        _commit(memory)
    assert memory.operations == [("publish", ".metadata")]


def test_replaced_files_that_cannot_be_determined_do_not_fail_the_save(
    memory: MemoryStorage,
) -> None:
    """The checkpoint is there, and nothing is removed."""

    def replaced() -> Iterator[str]:
        yield "old.distcp"
        raise MemoryError

    assert _commit(memory, replaced_files=replaced()) == ()
    assert memory.operations == [("publish", ".metadata")]


def _write(storage: MemoryStorage, *, retries: int) -> bytes:
    content = bytes(range(256)) * 100
    image = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    image[: len(content)] = content
    seals = SealTable(
        templates=((0, len(content), None),), blob_offsets=(0,), template_of_slot=(0,)
    )
    file = FileImage(name="a.distcp", nbytes=len(content), block=0, block_offset=0, seals=seals)
    job = WriteJob(
        job="job",
        rank=0,
        directory="unused",
        files=(file, file._replace(name="b.distcp")),
        sync_files=True,
        io_threads=3,
        chunk_nbytes=mmap.PAGESIZE,
        direct=False,
        checksum_files=True,
        retries=retries,
        faults=b"",
    )
    receipts = write_images(
        job,
        storage,
        {each.name: WholeImage(memoryview(image)) for each in job.files},
        Faults(b""),
        Position(
            "",
            cancelled=threading.Event(),
            on_progress=lambda _: None,
            on_created=lambda _: None,
        ),
    )
    assert [receipt.name for receipt in receipts] == ["a.distcp", "b.distcp"]
    return content


def test_files_are_put_in_any_storage(memory: MemoryStorage) -> None:
    """Also if a part or the end is refused at first: the file is given up and put anew."""
    memory.fail("write", EIO, name="a.distcp", times=2)
    memory.fail("finish", EIO, name="b.distcp")
    content = _write(memory, retries=3)
    for name in ("a.distcp", "b.distcp"):
        read = bytearray(len(content))
        assert memory.open(name).read_into(0, memoryview(read)) == len(content)
        assert read == content
    assert {name for kind, name in memory.operations if kind == "abort"} == {
        "a.distcp",
        "b.distcp",
    }


def test_files_that_storage_refuses_for_good_leave_nothing(memory: MemoryStorage) -> None:
    """Neither the refused one nor a part of another."""
    memory.fail("write", EIO, name="a.distcp", times=1000)
    with pytest.raises(OSError, match="storage is away"):
        _write(memory, retries=1)
    assert "a.distcp" not in memory.list()
