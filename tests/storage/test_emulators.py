"""Addresses of Google's and Microsoft's stores, through fsspec, with emulators of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

import nostall
from nostall._storage.places import storage_at
from nostall._storage.port import Storage
from nostall.cli import main
from nostall.integrity import State
from programs.save_once import save, save_in_background
from support import storage_contract
from support.object_store import is_loaded
from support.ranks import TESTS

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sending a large body directly with raw bytes:ResourceWarning"  # aiohttp's, of gcsfs
)

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

NEEDS_CONDITIONS = {"publishing_depends_on_what_was_there"}


@contextmanager
def address_of(command: list[str], directory: Path) -> Iterator[str]:
    """Start a server; it prints its address at the end of a line."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = (line.split() for line in process.stdout)
        found = (line[-1] for line in lines if line and line[-1].startswith("http://"))
        yield next(found)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a bucket of gcp-storage-emulator."""
    for package in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(package, reason="`nox -s emulators` installs it")
    command = [sys.executable, "-W", "ignore", "-m", "programs.gcs_server"]
    with address_of(command, TESTS) as endpoint:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        bucket = f"b{uuid.uuid4().hex}"
        import_module("fsspec").filesystem("gs", skip_instance_cache=True).mkdir(bucket)
        yield f"gs://{bucket}"


@pytest.fixture
def microsoft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a container of azurite."""
    pytest.importorskip("adlfs", reason="`nox -s emulators` installs it")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed; `nox -s emulators` does it where npm is")
    with address_of([program, *AZURITE], tmp_path) as endpoint:
        where = f"BlobEndpoint={endpoint}/{ACCOUNT}"
        connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{where}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        container = f"c{uuid.uuid4().hex}"
        import_module("fsspec").filesystem("az", skip_instance_cache=True).mkdir(container)
        yield f"az://{container}"


@pytest.fixture(params=["google", "microsoft"])
def root(request: pytest.FixtureRequest) -> Iterator[str]:
    """A root that does not exist yet, of each store."""
    over_fsspec = import_module("nostall._storage.objects.over_fsspec")
    over_fsspec._file_system.cache_clear()  # it knows the server of another test
    bucket: str = request.getfixturevalue(request.param)
    yield f"{bucket}/run"
    over_fsspec._file_system.cache_clear()


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
def test_fsspec_keeps_the_contract(
    root: str, check: Callable[[Storage], None], request: pytest.FixtureRequest
) -> None:
    """What a file system does, as long as no other process publishes at the same instant."""
    if root.startswith("gs://") and check.__name__ in NEEDS_CONDITIONS:
        ignored = "gcp-storage-emulator ignores ifGenerationMatch, which gcsfs sends"
        request.applymarker(pytest.mark.xfail(reason=ignored))
    check(storage_at(f"{root}/step-1"))
