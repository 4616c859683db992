"""The cost to pickle and to load metadata of many entries, in processes of their own.

    python tests/stress/metadata_bench.py --ranks 1024 --items 1000

Each tensor has a shard on every rank. Times are of the processor; memory is what the process has
more after loading than before.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

import nostall
from nostall import _torch
from nostall._commit.columns import in_columns
from nostall._commit.indexing import read_index
from nostall._commit.manifest import with_manifest
from nostall._commit.publication import Publication, complete_metadata, publication_of
from nostall._model import checksum
from nostall._model.threads import gc_paused
from nostall._model.values import WrittenFile

ROW = 1024


def metadata(ranks: int, items: int) -> Metadata:
    """Metadata of tensors in rows, with one file per rank."""
    entries: dict[str, Any] = {}
    places = {}
    for item in range(items):
        name = f"model.layers.{item}.weight"
        begins = [torch.Size((rank, 0)) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(begin, torch.Size((1, ROW))) for begin in begins]
        size = torch.Size((ranks, ROW))
        entries[name] = TensorStorageMetadata(TensorProperties(), size, chunks)
        for rank, begin in enumerate(begins):
            place = _torch.StorageInfo(f"__{rank}_0.distcp", item * 5000, 5000)
            places[MetadataIndex(name, begin, rank)] = place
    return Metadata(entries, storage_data=places)


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of a call, and its result."""
    begun_s = time.process_time()
    found = do()
    return time.process_time() - begun_s, found


def write_stock(file: Path, found: Metadata) -> tuple[float, int]:
    """Write stock's pickle of metadata; the seconds of pickling, and the number of bytes."""
    seconds, pickled = timed(lambda: pickle.dumps(found))
    file.write_bytes(pickled)
    return seconds, len(pickled)


def write_nostall(file: Path, found: Metadata) -> tuple[float, int]:
    """Write nostall's pickle of any metadata, with the index; seconds and bytes."""
    return _write(file, lambda: publication_of(found))


def write_sent(file: Path, found: Metadata) -> tuple[float, int]:
    """Write nostall's pickle of results that ranks sent to the coordinator; seconds and bytes."""
    ranks: dict[str, list[WriteResult]] = {}
    for index, info in found.storage_data.items():
        result = WriteResult(index=index, size_in_bytes=info.length, storage_data=info)
        ranks.setdefault(info.relative_path, []).append(result)
    sent = [pickle.loads(pickle.dumps(in_columns(results))) for results in ranks.values()]
    return _write(file, lambda: publication_of(complete_metadata(found, sent)))


def _write(file: Path, make: Callable[[], Publication]) -> tuple[float, int]:
    with gc_paused():  # the commit pauses it, too; stock does not
        seconds, publication = timed(make)
    pieces = publication.content(None)
    files = [WrittenFile(name=name, nbytes=1 << 40, crc32=None) for name in publication.files]
    crc32 = checksum.crc32(b"".join(pieces))
    content = with_manifest(pieces, files, crc32=crc32, committed_at_s=0, index=publication.index)
    file.write_bytes(b"".join(content))
    return seconds, sum(map(len, publication.program))


# Each in a process of its own: the first to look at an object pays for its dictionary.
WRITERS = {"stock": write_stock, "nostall": write_nostall, "nostall, in a save": write_sent}


def index_of(path: Path) -> object:
    """The index, which ``nostall.load`` reads instead of the pickle."""
    with (path / ".metadata").open("rb") as stream:
        return read_index(stream, path=str(path))


READERS: dict[str, Callable[[Path], object]] = {
    "dcp.FileSystemReader": lambda path: dcp.FileSystemReader(path).read_metadata(),
    "nostall.FileSystemReader": lambda path: nostall.FileSystemReader(path).read_metadata(),
    "the index alone": index_of,
}
LOADS = [
    ("dcp.FileSystemReader", "stock"),
    ("dcp.FileSystemReader", "nostall"),
    ("nostall.FileSystemReader", "nostall"),
    ("the index alone", "nostall"),
]


def load(path: Path, reader: str) -> list[float]:
    """Seconds, and MB more."""
    process = psutil.Process()
    before = process.memory_info().rss
    seconds, kept = timed(lambda: READERS[reader](path))
    assert kept is not None
    return [seconds, (process.memory_info().rss - before) / 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        what, path = given.step
        done: Any = (
            WRITERS[what](Path(path) / ".metadata", metadata(given.ranks, given.items))
            if what in WRITERS
            else load(Path(path), what)
        )
        print(json.dumps(done))
        return
    with TemporaryDirectory(dir=Path.cwd()) as directory:

        def step(what: str, path: Path) -> Any:
            command = [sys.executable, "-W", "ignore", __file__, "--step", what, str(path)]
            command += ["--ranks", f"{given.ranks}", "--items", f"{given.items}"]
            return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

        root = Path(directory)
        entries = given.ranks * given.items
        print(f"| {entries} entries, pickled by | CPU s | bytes per entry |\n|---|---:|---:|")
        for writer in WRITERS:
            (root / writer).mkdir()
            seconds, nbytes = step(writer, root / writer)
            print(f"| {writer} | {seconds:.2f} | {nbytes / entries:.0f} |")
        print("\n| loaded by | written by | CPU s | MB |\n|---|---|---:|---:|")
        for reader, writer in LOADS:
            seconds, more = step(reader, root / writer)
            print(f"| {reader} | {writer} | {seconds:.2f} | {more:.0f} |")


if __name__ == "__main__":
    main()
