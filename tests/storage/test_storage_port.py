"""The storage port: the implementation for file systems, and the commit above any."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from nostall._commit.commit import commit
from nostall._storage.port import Conflict, Storage
from nostall._storage.posix import PosixStorage
from nostall.errors import NotDurableError
from support import storage_contract


@pytest.mark.parametrize(
    "check", storage_contract.FILE_SYSTEM_CHECKS, ids=lambda check: check.__name__
)
@pytest.mark.parametrize(
    "options", [{}, {"direct": True}, {"sync": False}], ids=["posix", "direct", "not synced"]
)
def test_an_implementation_keeps_the_contract(
    tmp_path: Path, options: dict[str, bool], check: Callable[[Storage], None]
) -> None:
    """A directory does what the port promises, past the page cache and without fsync, too."""
    check(PosixStorage(str(tmp_path), **options))


class _Overwriting(PosixStorage):
    def put(self, name: str, nbytes: int, **options: Any) -> Any:
        self.remove([name])
        return super().put(name, nbytes, **options)


class _Careless(PosixStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        super().publish(name, content, **{**options, "expected": None})


class _Hasty(PosixStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        before = options.pop("before", lambda: None)
        super().publish(name, content, **options)
        before()


class _Tearing(PosixStorage):
    def publish(self, name: str, content: Sequence[bytes], **options: Any) -> None:
        super().publish(name, [b"half"])
        super().publish(name, content, **options)


@pytest.mark.parametrize("kind", [_Overwriting, _Careless, _Hasty, _Tearing])
def test_the_contract_finds_a_storage_that_breaks_it(
    tmp_path: Path, kind: type[PosixStorage]
) -> None:
    """Each rule is checked by something."""

    def check_all() -> None:
        for check in storage_contract.FILE_SYSTEM_CHECKS:
            (tmp_path / check.__name__).mkdir()
            check(kind(str(tmp_path / check.__name__), sync=False))

    with pytest.raises((AssertionError, Conflict)):
        check_all()


def test_a_conflict_crosses_processes() -> None:
    """With the place."""
    conflict = pickle.loads(pickle.dumps(Conflict("memory:///.metadata")))
    assert (conflict.errno, conflict.filename) == (errno.ESTALE, "memory:///.metadata")


# --- the commit above it --------------------------------------------------------------------------


def _commit(directory: Path, replaced_files: Iterator[str]) -> tuple[str, ...]:
    storage = PosixStorage(str(directory))
    return commit(storage, [b"new"], metadata_name=".metadata", replaced_files=replaced_files)


def test_replaced_files_are_determined_after_the_publication(tmp_path: Path) -> None:
    """So none is named that could be part of the checkpoint until then."""

    def replaced() -> Iterator[str]:
        assert (tmp_path / ".metadata").read_bytes() == b"new"
        yield "old.distcp"

    assert _commit(tmp_path, replaced()) == ("old.distcp",)


def test_a_commit_in_doubt_removes_nothing(tmp_path: Path) -> None:
    """No file is removed, as either checkpoint may be the published one."""
    replaced = iter(["old.distcp"])
    with (
        patch.object(PosixStorage, "publish", side_effect=NotDurableError("perhaps")),
        pytest.raises(NotDurableError),
    ):
        _commit(tmp_path, replaced)
    assert next(replaced) == "old.distcp"


def test_replaced_files_that_cannot_be_determined_do_not_fail_the_save(tmp_path: Path) -> None:
    """The checkpoint is there, and nothing is removed."""

    def replaced() -> Iterator[str]:
        yield "old.distcp"
        raise MemoryError

    assert _commit(tmp_path, replaced()) == ()
    assert (tmp_path / ".metadata").read_bytes() == b"new"
