"""Addresses of Google's and Microsoft's stores, with emulators of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

import nostall
from nostall._storage.locations import storage_at
from nostall._storage.port import Storage
from nostall.cli import main
from nostall.integrity import State
from programs.save_once import save, save_in_background
from support import emulators, storage_contract
from support.object_store import is_loaded


@pytest.fixture
def google() -> Iterator[str]:
    """The address of a bucket."""
    with emulators.google() as bucket:
        yield bucket


@pytest.fixture
def microsoft() -> Iterator[str]:
    """The address of a container."""
    pytest.importorskip("azure.storage.blob", reason="`nox -s emulators` installs it")
    if shutil.which("azurite-blob") is None:
        pytest.skip("azurite is not installed; `nox -s emulators` does it where npm is")
    with emulators.microsoft() as container:
        yield container


@pytest.fixture(params=["google", "microsoft"])
def root(request: pytest.FixtureRequest) -> str:
    """A root that does not exist yet, of each store."""
    return f"{request.getfixturevalue(request.param)}/run"


def test_checkpoints_are_saved_found_and_removed(root: str) -> None:
    """In the background and while the caller waits; overwriting leaves only the new files."""
    assert nostall.latest_complete(root) is None
    url = f"{root}/step-1"
    for seed, begin in ((1, save), (2, save_in_background), (3, save)):
        future = begin(url, seed)
        if future is not None:
            future.result()
        assert is_loaded(url, seed)
        assert nostall.verify(url).ok
        assert len(storage_at(url).list()) == 2
    save(f"{root}/step-2", 4)
    assert nostall.latest_complete(root) == f"{root}/step-2"
    assert main(["ls", root]) == 0
    nostall.remove_checkpoint(f"{root}/step-2")
    assert nostall.verify(f"{root}/step-2").state is State.NOT_THERE
    assert nostall.latest_complete(root) == url
    assert storage_at(root).list() == ["step-1"]


@pytest.mark.parametrize("check", storage_contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_is_kept(root: str, check: Callable[[Storage], None]) -> None:
    """Each emulated store passes the contract's checks."""
    check(storage_at(f"{root}/step-1"))
