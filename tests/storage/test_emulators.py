"""Addresses of Google's and Microsoft's stores, with emulators of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nostall
from nostall._storage.locations import storage_at
from nostall._storage.port import Storage
from nostall.cli import main
from nostall.integrity import State
from programs.save_once import save, save_in_background
from support import storage_contract
from support.object_store import is_loaded
from support.ranks import TESTS

AZURITE = (
    "--blobPort",
    "0",
    "--inMemoryPersistence",
    "--disableTelemetry",
    "--silent",
    "--skipApiVersionCheck",
)
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of all emulators of Microsoft's store; Microsoft publishes it."""


@contextmanager
def server(command: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a server."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    """What a server prints at the end of a line."""
    lines = (line.split() for line in process.stdout or ())
    return next(line[-1] for line in lines if line and line[-1].startswith("http://"))


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a bucket of a server with Google's headers and S3's behaviour."""
    bucket = f"b{uuid.uuid4().hex}"
    command = [sys.executable, "-W", "ignore", "-m", "programs.gcs_server", bucket]
    with server(command, TESTS) as started:
        monkeypatch.setenv("GOOGLE_BASE_URL", address_of(started))
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "any")
        yield f"gs://{bucket}"


@pytest.fixture
def microsoft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a container of azurite."""
    blobs = pytest.importorskip("azure.storage.blob", reason="`nox -s emulators` installs it")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed; `nox -s emulators` does it where npm is")
    container = f"c{uuid.uuid4().hex}"
    with server([program, *AZURITE], tmp_path) as azurite:
        endpoint = f"{address_of(azurite)}/{ACCOUNT}"
        service = blobs.BlobServiceClient(endpoint, credential=KEY)
        service.create_container(container)
        service.close()
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        yield f"az://{container}"


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
    """What a file system does."""
    check(storage_at(f"{root}/step-1"))
