"""Print how long ``dcp.load`` takes with stock's reader and with ours, in turns, in one process.

Also the limits: a flat copy of the bytes in memory, and a read of the file by several threads into
memory that is there. Before each turn free memory is warm, and the heap trimmed, as in the
benchmark of saves. Cold means that the kernel was told to drop the file's pages
(``POSIX_FADV_DONTNEED``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import nostall
from nostall._bench.free_memory import warm_free_memory
from nostall._bench.processes import give_memory_back
from nostall._bench.workloads import Workload, differences, make_workload

_PIECE_NBYTES = 8 << 20
_THREADS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("large", "many"), default="large")
    parser.add_argument("--bytes", type=int, default=1 << 30, dest="nbytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    workload = make_workload(options.shape, options.nbytes, rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        _measure(workload, folder, options.rounds, cold=options.cold)
    finally:
        shutil.rmtree(folder)


def _measure(workload: Workload, folder: Path, rounds: int, *, cold: bool) -> None:
    path = folder / "checkpoint"
    writer = nostall.FileSystemWriterAsync(path)
    dcp.save(workload.state, storage_writer=writer, no_dist=True)
    target, file = workload.blank(), path / "__0_0.distcp"

    def load(reader: Callable[[Path], dcp.FileSystemReader]) -> Callable[[], object]:
        return lambda: dcp.load(target, storage_reader=reader(path), no_dist=True)

    flat, copy = torch.ones(workload.nbytes // 4), torch.ones(workload.nbytes // 4)
    room = memoryview(bytearray(file.stat().st_size))
    contenders: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(flat),
        "raw read": lambda: _read(file, room),
        "dcp.load": load(dcp.FileSystemReader),
        "nostall": load(nostall.FileSystemReader),
        "nostall, crc": load(lambda path: nostall.FileSystemReader(path, verify="crc")),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):  # the first one warms up
        for name, run in contenders.items():
            _prepare(workload, folder, file, cold=cold)
            began_s = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - began_s)
    assert differences(workload.state, target) == []
    limit = statistics.median(times["raw read" if cold else "memcpy"])
    for name, each in times.items():
        median = statistics.median(each)
        spread = f"[{min(each) * 1000:.0f}, {max(each) * 1000:.0f}]"
        print(f"{name:14} {median * 1000:7.0f} ms {spread:16} {median / limit:7.2f} of the limit")


def _prepare(workload: Workload, folder: Path, file: Path, *, cold: bool) -> None:
    warm_free_memory(folder, workload.nbytes, rank=0, barrier=lambda: None)
    give_memory_back()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(descriptor, _PIECE_NBYTES):
                pass
    finally:
        os.close(descriptor)


def _read(file: Path, room: memoryview) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            pieces = range(0, len(room), _PIECE_NBYTES)
            reads = (
                pool.submit(os.preadv, descriptor, [room[at : at + _PIECE_NBYTES]], at)
                for at in pieces
            )
            assert sum(read.result() for read in list(reads)) == len(room)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
