"""Saves to a loopback S3 server by several writers in turns: blocked, durable, memory.

Each writer has a process of its own, with the same state. Prints medians and extremes without the
first round: how long ``dcp.async_save`` takes to return, and until the checkpoint is durable; and
the most that the process and its children have beyond what they had before the first save, without
program code. The server runs on the same cores; each turn begins when it is at
rest, and each round with another writer.

    python tests/stress/object_bench.py --server seaweedfs --mib 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import nostall
from benchmarks.machine import peak_memory, tree_cpu_s, tree_memory_nbytes
from support.object_store import s3_server
from support.states import begin_async

TENSORS = 256
_REST_S = 1.0
_NO_REST_S = 60.0
_AT_REST = 0.05
"""Share of a processor, over ``_REST_S``, below which a process is at rest."""
NEEDS = {
    "nostall": "nostall",
    "nostall, directory": "nostall",
    "FsspecWriter": "s3fs",
    "multi-storage client": "multistorageclient",
    "s3torchconnector": "s3torchconnector",
}
"""The writers, and the package of each."""


def writer_of(name: str, bucket: str, key: str) -> Any:
    address = f"s3://{bucket}/{key}"
    if name == "nostall":
        return nostall.FileSystemWriterAsync(address)
    if name == "nostall, directory":  # of a local disk, for comparison
        return nostall.FileSystemWriterAsync(Path(os.environ["MSC_CONFIG"]).with_name(key))
    if name == "FsspecWriter":
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(address)
    if name == "multi-storage client":
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        return MultiStorageFileSystemWriter(f"msc://store/{key}")
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    return S3StorageWriter("us-east-1", address, s3client_config=config)


def save_as_told(name: str, bucket: str, nbytes: int) -> None:
    """In a process of its own: make the state; for each key on standard input, save it."""
    state = {f"w{number}": torch.randn(nbytes // TENSORS // 4) for number in range(TENSORS)}
    print("ready", flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        saving = begin_async(writer_of(name, bucket, line.strip()), state)
        blocked_s = time.perf_counter() - began_s
        saving.result()
        print(json.dumps([blocked_s, time.perf_counter() - began_s]), flush=True)


@dataclass
class Contender:
    """A writer's process."""

    process: subprocess.Popen[str]
    before_nbytes: int = 0
    peak_nbytes: int = 0

    def answer(self) -> Any:
        """The next line of the process's output, decoded."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "a writer has failed"
        return line if line.startswith("ready") else json.loads(line)

    def save(self, key: str) -> tuple[float, float]:
        """Save once; seconds until it returns, and until it is durable."""
        assert self.process.stdin is not None
        with peak_memory(self.process.pid) as samples:
            self.process.stdin.write(key + "\n")
            self.process.stdin.flush()
            blocked_s, durable_s = self.answer()
        self.peak_nbytes = max(self.peak_nbytes, *samples)
        return blocked_s, durable_s


def started(name: str, bucket: str, nbytes: int, on_end: Callable[..., object]) -> Contender:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, name, bucket, str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    on_end(process.kill)
    contender = Contender(process)
    contender.answer()
    contender.before_nbytes = tree_memory_nbytes(process.pid)
    return contender


def profile(bucket: str, endpoint: str) -> dict[str, Any]:
    """The configuration of the multi-storage client."""
    keys = {
        "access_key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    options = {"base_path": bucket, "endpoint_url": endpoint, "region_name": "us-east-1"}
    store = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": keys},
    }
    return {"profiles": {"store": store}}


def summary(samples: Sequence[float], *, digits: int) -> str:
    median, least, most = statistics.median(samples), min(samples), max(samples)
    return f"{median:.{digits}f} [{least:.{digits}f}, {most:.{digits}f}]"


def wait_for_rest() -> None:
    """Return when this process's children, the server among them, do next to nothing."""
    before = tree_cpu_s()
    deadline = time.monotonic() + _NO_REST_S
    while True:
        time.sleep(_REST_S)
        assert time.monotonic() < deadline, "the server does not come to rest"
        now = tree_cpu_s()
        if now - before < _AT_REST * _REST_S:
            return
        before = now


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", choices=("moto", "seaweedfs"), default="moto")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    nbytes = arguments.mib << 20
    with ExitStack() as stack:
        bare = ("--bare",) if arguments.server == "seaweedfs" else ()
        server = stack.enter_context(s3_server(arguments.server, *bare))
        bucket = server.new_bucket()
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "msc.json").write_text(json.dumps(profile(bucket, server.endpoint)))
        os.environ["MSC_CONFIG"] = str(directory / "msc.json")
        contenders = {
            name: started(name, bucket, nbytes, stack.callback)
            for name, package in NEEDS.items()
            if importlib.util.find_spec(package) is not None
        }
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(arguments.rounds + 1):
            names = deque(contenders)
            names.rotate(-number)
            for name in names:
                key = f"{name.replace(' ', '-')}-{number}"
                wait_for_rest()
                took[name].append(contenders[name].save(key))
                shutil.rmtree(directory / key, ignore_errors=True)
                for left in server.keys(bucket):
                    server.client().delete_object(Bucket=bucket, Key=left)
        for name, contender in contenders.items():
            blocked_s, durable_s = zip(*took[name][1:], strict=True)
            more = (contender.peak_nbytes - contender.before_nbytes) / nbytes
            blocked = summary([1e3 * each for each in blocked_s], digits=0)
            print(
                f"{name:21} blocked {blocked} ms  durable {summary(durable_s, digits=1)} s"
                f"  memory {more:.2f} of the state",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in NEEDS:
        save_as_told(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
