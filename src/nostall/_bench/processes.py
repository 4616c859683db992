"""The processes around a run: what the trainer's tree consumes, and the benchmark's own helpers."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_INTERVAL_S = 0.02
_LIBC = ctypes.CDLL(None)
MALLOPT = getattr(_LIBC, "mallopt", None)
"""``None`` if the C library is not glibc."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_BLOCK_NBYTES = 128 << 10
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """Seconds of processor time."""

    user_s: float
    system_s: float

    def since(self, before: CpuTime) -> CpuTime:
        """What was used in between."""
        return CpuTime(user_s=self.user_s - before.user_s, system_s=self.system_s - before.system_s)


def tree_cpu_time(excluded: frozenset[int] = frozenset()) -> CpuTime:
    """What this process and its children have used so far, ended children included.

    A child that has ended and was waited for counts in its parent's totals, so that the sum never
    falls. The system counts in ticks, of 10 ms as a rule.
    """
    user_s = system_s = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        if process.pid not in excluded:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            user_s += times.user + times.children_user
            system_s += times.system + times.children_system
    return CpuTime(user_s=user_s, system_s=system_s)


def give_memory_back() -> None:
    """Collect garbage and return free heap pages to the system, so that later peaks show."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_blocks() -> None:
    """Let the heap keep freed blocks of up to 32 MiB.

    These are the thresholds to which glibc adapts when one of that size is freed. In between, how
    many pages are mapped anew would depend on what was freed before.
    """
    if MALLOPT is not None:
        MALLOPT(_M_MMAP_THRESHOLD, 32 << 20)
        MALLOPT(_M_TRIM_THRESHOLD, 64 << 20)


@contextmanager
def fresh_pages_for_each_block() -> Iterator[None]:
    """While inside, what is allocated in 128 KiB or more is mapped anew, and unmapped when freed.

    Trimming the heap is not enough: the second temporary tensor would have the pages of the first.
    So what is free in the heap is taken meanwhile.
    """
    assert MALLOPT is not None
    _LIBC.malloc.restype = _LIBC.sbrk.restype = ctypes.c_size_t
    MALLOPT(_M_MMAP_THRESHOLD, _BLOCK_NBYTES)
    taken = []
    while (block := _LIBC.malloc(_BLOCK_NBYTES)) < _LIBC.sbrk(0):  # above it is what is mapped
        taken.append(block)
    taken.append(block)
    try:
        yield
    finally:
        for block in taken:
            _LIBC.free(ctypes.c_void_p(block))
        keep_freed_blocks()


class MemorySampler:
    """The memory of this process and its children, sampled from another process every 20 ms."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def level(self) -> tuple[int, int]:
        """Bytes now, and the most since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        now, peak = self._process.stdout.readline().split()
        return int(now), int(peak)


@contextmanager
def memory_sampler(excluded: frozenset[int] = frozenset()) -> Iterator[MemorySampler]:
    """A sampler while inside."""
    command = [sys.executable, "-I", "-S", str(_HERE / "sampler.py"), str(os.getpid())]
    command += [str(_INTERVAL_S), *(str(pid) for pid in excluded)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield MemorySampler(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


@contextmanager
def noise(directory: Path, *, wanted: bool) -> Iterator[frozenset[int]]:
    """A noisy neighbour while inside, if wanted; yields its process ids."""
    if not wanted:
        yield frozenset()
        return
    command = [sys.executable, "-I", "-S", str(_HERE / "noise.py"), str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield frozenset({process.pid})
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def lone_environment() -> dict[str, str]:
    """This environment without what torchrun put there, finding the nostall that runs now."""
    root = str(Path(__file__).resolve().parents[2])
    launcher = ("TORCHELASTIC_", "TORCH_NCCL", "MASTER_", "LOCAL_", "ROLE_", "GROUP_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(launcher) and name not in {"RANK", "WORLD_SIZE"}
    }
    path = [root, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"}
