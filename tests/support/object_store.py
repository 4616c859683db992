"""A real S3 server on loopback, and what tests ask of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

import nostall
from programs.save_once import state_of
from support.ranks import TESTS

SERVERS = {
    "moto": ("s3_server", "test", "test"),
    "swift": ("swift_server", "test:tester", "testing"),
    "seaweedfs": ("seaweedfs_server", "test", "test"),
}
"""Program, name and password of what tests may run against."""
ENVIRONMENT = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
ATTEMPTS = 4
"""So often the client sends a request that fails on the server's side."""
_END_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class S3Server:
    endpoint: str
    knows_if_match: bool
    """Whether it replaces an object on a condition; otherwise a request without one follows those
    with one, which the client repeats, as the answer is 501."""
    forgets_prefixes: bool = True
    """Whether it lists no prefix whose objects were removed; SeaweedFS does for over a minute."""

    def client(self) -> Any:
        """A client of its own, for what nostall's does not do."""
        session = importlib.import_module("botocore.session")  # frameworks' sessions do without
        return session.Session().create_client("s3")

    def new_bucket(self) -> str:
        bucket = f"b{uuid.uuid4().hex}"
        self.client().create_bucket(Bucket=bucket)
        return bucket

    def inject(self, *faults: dict[str, Any]) -> None:
        """Replace the faults of ``tests/support/faulty_store.py``."""
        body = json.dumps(faults).encode()
        request = urllib.request.Request(f"{self.endpoint}/.faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    def inject_into_replacing(self, *faults: dict[str, Any]) -> None:
        """Replace the faults by some that hit the request that replaces an object."""
        refused = 0 if self.knows_if_match else ATTEMPTS
        self.inject(*({**each, "after": refused} for each in faults))

    def requests(self) -> list[str]:
        with urllib.request.urlopen(f"{self.endpoint}/.requests", timeout=10) as answer:
            found: list[str] = json.load(answer)
        return found

    def unfinished(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        answer = self.client().list_multipart_uploads(Bucket=bucket)
        return [each["Key"] for each in answer.get("Uploads", ())]

    def sizes(self, bucket: str) -> dict[str, int]:
        answer = self.client().list_objects_v2(Bucket=bucket)
        return {each["Key"]: each["Size"] for each in answer.get("Contents", ())}

    def keys(self, bucket: str) -> list[str]:
        return list(self.sizes(bucket))

    def names_below(self, url: str) -> list[str]:
        """The names right below an address that keys of objects have, in order."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        below = (key for key in self.keys(bucket) if key.startswith(f"{prefix}/"))
        return sorted({key[len(prefix) + 1 :].partition("/")[0] for key in below})


def is_loaded(url: str, seed: int, reader: Callable[[str], Any] = nostall.FileSystemReader) -> bool:
    """Whether a checkpoint has the state of this seed, to the last bit."""
    wanted, found = state_of(seed), state_of(seed + 1000)
    dcp.load(found, storage_reader=reader(url), no_dist=True)
    model = wanted["model"]
    return found["step"] == seed and all(
        torch.equal(found["model"][name], model[name]) for name in model
    )


@contextmanager
def s3_server(name: str = "moto", *options: str) -> Iterator[S3Server]:
    """Start a server; its address and credentials are in the environment meanwhile."""
    program, user, password = SERVERS[name]
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory())
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"programs.{program}", directory, *options],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "the server did not start"
        own = {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": password}
        environment = {**ENVIRONMENT, **own, "AWS_ENDPOINT_URL": endpoint}
        stack.enter_context(patch.dict(os.environ, environment))
        yield S3Server(
            endpoint, knows_if_match=name != "swift", forgets_prefixes=name != "seaweedfs"
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End a server: with its standard input, so that it can end its own processes."""
    try:
        process.communicate(timeout=_END_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
