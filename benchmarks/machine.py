"""The machine: facts about it, its page cache, free memory, processor time and memory in use."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import psutil
import torch

import nostall
from benchmarks.group import Group

_LIBC = ctypes.CDLL(None, use_errno=True)
_CHUNK = bytearray(8 << 20)
_SAMPLE_EVERY_S = 0.02
_PACKAGES = ("torch", "isal", "safetensors", "nvidia-resiliency-ext", "numpy")


def facts(directory: Path) -> dict[str, str]:
    """Processor, memory, kernel, and the file system of a directory."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    point = max((at for at in mounts if directory.resolve().is_relative_to(at)), key=len)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "threads": f"{torch.get_num_threads()} threads of torch",
        "memory": f"{psutil.virtual_memory().total >> 20} MiB",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator",
        "kernel": f"Linux {platform.release()}",
        "file_system": mounts[point],
    }


def versions() -> dict[str, str]:
    """Versions of Python, nostall, torch and what else is installed."""
    installed = {each.name: each.version for each in metadata.distributions()}
    there = {name: installed[name] for name in _PACKAGES if name in installed}
    return {"Python": platform.python_version(), "nostall": nostall.__version__, **there}


def files_below(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Fsync every file and directory below a path, and the path itself."""
    for each in [*path.rglob("*"), path]:
        sync(each)


def bring_in(files: Sequence[Path]) -> None:
    """Read files to their ends, through the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(_CHUNK):
                pass


def drop(files: Sequence[Path]) -> None:
    """Tell the kernel that nobody needs the pages of these files.

    It keeps pages that are not on storage yet, and those that a process maps. What a hypervisor has
    cached stays.
    """
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[Path]) -> float:
    """The share of their pages that is in the page cache; 0 for empty files."""
    pages = [cached for file in files for cached in cached_pages(file)]
    return sum(pages) / len(pages) if pages else 0.0


def cached_pages(file: Path) -> list[bool]:
    """Whether each page of a file is in the page cache. Reads none of them."""
    nbytes = file.stat().st_size
    if not nbytes:
        return []
    found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with file.open("rb") as stream:
        # Writable but private: only memory that could be written to has an address in Python.
        mapped = mmap.mmap(stream.fileno(), nbytes, access=mmap.ACCESS_COPY)
    first = ctypes.c_char.from_buffer(mapped)
    try:
        address = ctypes.c_void_p(ctypes.addressof(first))
        if _LIBC.mincore(address, ctypes.c_size_t(nbytes), found):
            raise OSError(ctypes.get_errno(), "mincore failed", os.fspath(file))
    finally:
        del first  # a mapping with a pointer into it cannot be closed
        mapped.close()
    return [bool(page & 1) for page in found]


def warm_free_memory(directory: Path, nbytes: int, group: Group) -> None:
    """Make free memory available for this rank's next turn by a file that is removed. Collective.

    A hypervisor takes back memory that a virtual machine has freed (free page reporting), and
    brings fresh pages in when they are touched again: stock ``dcp.save``, which goes through the
    page cache, then takes three to four times as long. So every turn begins right after twice its
    bytes were written through the page cache, synced and freed; anonymous memory does not do. Then
    the heap is trimmed: whether it kept the last copy would depend on what lies at its top.
    """
    path = directory / f"scratch-{group.rank}"
    try:
        with path.open("wb", buffering=0) as stream:
            rest = 2 * nbytes
            while rest > 0:
                rest -= stream.write(memoryview(_CHUNK)[:rest])
            os.fsync(stream.fileno())
    finally:
        group.barrier()
    path.unlink()
    sync(directory)  # what deleting costs the file system is paid here
    give_memory_back()


def give_memory_back() -> None:
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def keep_freed_blocks() -> None:
    """Let the heap keep freed blocks of up to 32 MiB, as glibc does once it has adapted to them."""
    if hasattr(_LIBC, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3  # of malloc.h
        _LIBC.mallopt(mmap_threshold, 32 << 20)
        _LIBC.mallopt(trim_threshold, 64 << 20)


def tree_cpu_s() -> float:
    """User and system time of this process and its children so far, ended ones included."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def tree_memory_nbytes(pid: int | None = None) -> int:
    """Anonymous and shared PSS of a process, or this, and its children: a shared page counts once.

    Pages of mapped files, program code above all, do not count: other processes share them.
    """
    nbytes = 0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        sizes = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        nbytes += 1024 * sum(map(int, sizes))
    return nbytes


@contextmanager
def peak_memory(pid: int | None = None) -> Iterator[list[int]]:
    """While inside, sample the memory of a process tree every 20 ms; the list gets each sample.

    A thread of the trainer does it, so nothing is timed meanwhile.
    """
    samples = [tree_memory_nbytes(pid)]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_SAMPLE_EVERY_S):
            samples.append(tree_memory_nbytes(pid))

    thread = threading.Thread(target=watch, name="benchmark-memory")
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
