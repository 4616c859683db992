"""A real S3 server on loopback, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nostall._storage.objects.s3 import S3Client
from support.ranks import TESTS

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True, slots=True)
class S3Server:
    """The server of a test session."""

    endpoint: str

    def new_bucket(self) -> str:
        """Make a bucket; returns its name."""
        bucket = f"b{uuid.uuid4().hex}"
        S3Client(bucket)._s3.create_bucket(Bucket=bucket)
        return bucket

    def inject(self, *faults: dict[str, Any]) -> None:
        """Replace the faults of ``tests/programs/s3_server.py``."""
        body = json.dumps(faults).encode()
        request = urllib.request.Request(f"{self.endpoint}/.faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    def requests(self) -> list[str]:
        """The requests since the last call."""
        with urllib.request.urlopen(f"{self.endpoint}/.requests", timeout=10) as answer:
            found: list[str] = json.load(answer)
        return found

    def unfinished(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        answer = S3Client(bucket)._s3.list_multipart_uploads(Bucket=bucket)
        return [each["Key"] for each in answer.get("Uploads", ())]

    def sizes(self, bucket: str) -> dict[str, int]:
        """Lengths of all objects of a bucket, by key."""
        answer = S3Client(bucket)._s3.list_objects_v2(Bucket=bucket)
        return {each["Key"]: each["Size"] for each in answer.get("Contents", ())}

    def keys(self, bucket: str) -> list[str]:
        """All keys of a bucket, in order."""
        return list(self.sizes(bucket))


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server; its address and credentials are in the environment meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(TESTS / "programs" / "s3_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    before = dict(os.environ)
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert endpoint, "the server did not start"
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
        yield S3Server(endpoint)
    finally:
        os.environ.clear()
        os.environ.update(before)
        process.kill()
        process.communicate()
