"""Emulators of Google's and Microsoft's stores; their clients find them in the environment."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from support.ranks import TESTS

AZURITE = (
    *("--blobPort", "0", "--inMemoryPersistence", "--disableTelemetry", "--silent"),
    "--skipApiVersionCheck",
)
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of all emulators of Microsoft's store; Microsoft publishes it."""


@contextmanager
def server(command: list[str], directory: Path) -> Iterator[subprocess.Popen[str]]:
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
    """The address that a server prints at the end of a line."""
    lines = (line.split() for line in process.stdout or ())
    return next(line[-1] for line in lines if line and line[-1].startswith("http://"))


@contextmanager
def google() -> Iterator[str]:
    """The address of a bucket of a server with Google's headers and S3's behaviour."""
    bucket = f"b{uuid.uuid4().hex}"
    command = [sys.executable, "-W", "ignore", "-m", "programs.gcs_server", bucket]
    with server(command, TESTS) as started:
        environment = {"GOOGLE_BASE_URL": address_of(started), "GOOGLE_BEARER_TOKEN": "any"}
        with patch.dict(os.environ, environment):
            yield f"gs://{bucket}"


@contextmanager
def microsoft() -> Iterator[str]:
    """The address of a container of azurite.

    Raises:
        ImportError: Microsoft's own client, which makes the container, is not installed.
        FileNotFoundError: azurite is not installed.
    """
    blobs = importlib.import_module("azure.storage.blob")
    program = shutil.which("azurite-blob")
    if program is None:
        raise FileNotFoundError("azurite-blob")
    container = f"c{uuid.uuid4().hex}"
    with (
        tempfile.TemporaryDirectory() as directory,
        server([program, *AZURITE], Path(directory)) as azurite,
    ):
        endpoint = f"{address_of(azurite)}/{ACCOUNT}"
        service = blobs.BlobServiceClient(endpoint, credential=KEY)
        service.create_container(container)
        service.close()
        environment = {
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }
        with patch.dict(os.environ, environment):
            yield f"az://{container}"
