"""Host memory for snapshots: reserved once, leased to one save at a time, reused by later saves.

A block is anonymous memory behind a descriptor (``memfd_create``). One descriptor gives the writer
process the whole image, and nothing stays in ``/dev/shm`` if a process dies. The pages of a block
are reserved when it is made (``posix_fallocate``): a lack of memory is an error at that line, not a
SIGBUS in the middle of a copy.

Leases are the back-pressure: while ``max_blocks`` leases are out, the next request waits. A block
has the size that was requested; a free block that is too small grows for a larger request.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from glob import glob
from typing import Any, ClassVar

from nostall._model.threads import is_done, uninterrupted
from nostall.errors import ReservationError, SaveAbortedError, SaveTimeoutError

_MAP_UNIT_NBYTES = 2 << 20
"""Blocks are a multiple of a huge page, so that the system can back them with huge pages."""
_STAGED_PATIENCE_S = 2.0
"""Planning a staged save takes less. After that it is being written, and the wait is for that."""
_LOOK_AGAIN_S = 0.005
_MEMFD_PREFIX = "nostall-"
_MARGIN_NBYTES = 32 << 20
"""Stays free when memory is reserved: the writer process needs about half of it."""
_NBYTES_PER_TABLE_BYTE = 256
"""The page tables of trainer and writer process, each a 512th of the memory."""
_PROCESSES = 64
"""Assumed number of processes that reserve at the same time; each takes an equal part."""
_MOST_AT_ONCE_NBYTES = 256 << 20
_MADV_POPULATE_WRITE = 23
"""From ``linux/mman.h``; the ``mmap`` module does not define it."""
_MFD_CLOEXEC = 1


class Block:
    """One piece of memory behind one descriptor."""

    _ids = itertools.count(1)
    _all: ClassVar[weakref.WeakSet[Block]] = weakref.WeakSet()

    def __init__(self, nbytes: int) -> None:
        self.id = next(Block._ids)
        self.nbytes = max(1, -(-nbytes // _MAP_UNIT_NBYTES)) * _MAP_UNIT_NBYTES
        with _refusals(self.nbytes):
            self.fd = memory_descriptor(f"{_MEMFD_PREFIX}{self.id}")
            self.close_descriptor = weakref.finalize(self, os.close, self.fd)
            self.close_descriptor.atexit = False
            try:
                _reserve(self.fd, 0, self.nbytes)
                self.memory = mmap.mmap(self.fd, self.nbytes)
            except BaseException:  # an interrupt, too, must not leave memory behind
                self.close_descriptor()
                raise
        # A forked data loader must neither copy these pages nor keep them alive.
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.prepared_views: Any = None
        """Views that the snapshot keeps for the next save of the same layout."""
        self.is_shown = False
        """Whether a caller may hold tensors over this block, so that it cannot move."""
        Block._all.add(self)

    def grow(self, nbytes: int) -> bool:
        """Enlarge the block and keep its pages; its ``id`` changes.

        ``False``, with the block unchanged, if views of it exist. No other process may have it
        mapped.
        """
        if self.is_shown:
            return False
        size = -(-nbytes // _MAP_UNIT_NBYTES) * _MAP_UNIT_NBYTES
        with _refusals(size):
            # Only the new part: the system visits every page of the range, 40 ms per reserved GiB.
            _reserve(self.fd, self.nbytes, size)
        try:
            self.memory.resize(size)
        except (BufferError, OSError):
            os.ftruncate(self.fd, self.nbytes)
            return False
        self.nbytes = size
        self.id = next(Block._ids)
        return True

    def populate(self) -> None:
        """Map all pages into this process now, so that the first copy causes no page faults."""
        # Linux before 5.14 does not support it; the first copy then maps the pages.
        with suppress(OSError, ValueError):
            self.memory.madvise(_MADV_POPULATE_WRITE)

    def image(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of part of the block."""
        return memoryview(self.memory)[offset : offset + nbytes]


def _reserve(fd: int, begin: int, end: int) -> None:
    """Allocate the pages from ``begin`` to ``end``, or raise ``OSError`` and keep none of them.

    Without swap, Linux grants an excessive request, takes all memory and kills a process. Processes
    that reserve at the same time see the same memory as available. So each takes a small part of
    that, and looks again.
    """
    kept_nbytes = _MARGIN_NBYTES + (end - begin) // _NBYTES_PER_TABLE_BYTE
    at = begin
    try:
        while at < end:
            left = available_nbytes() - kept_nbytes
            if left < end - at:
                raise OSError(errno.ENOMEM, f"{max(0, left)} bytes available")
            share_nbytes = left // _PROCESSES // _MAP_UNIT_NBYTES * _MAP_UNIT_NBYTES
            part_nbytes = min(max(_MAP_UNIT_NBYTES, share_nbytes), _MOST_AT_ONCE_NBYTES, end - at)
            os.posix_fallocate(fd, at, part_nbytes)
            at += part_nbytes
    except BaseException:  # also an interrupt
        os.ftruncate(fd, begin)  # before the next process looks
        raise


@contextmanager
def _refusals(nbytes: int) -> Iterator[None]:
    """Turn a refusal of the system into a :class:`ReservationError`."""
    try:
        yield
    except OSError as error:
        raise ReservationError(
            f"cannot reserve {nbytes} bytes of host memory for a snapshot: {error.strerror}",
            nbytes=nbytes,
            phase="stage",
            hint=_NEXT_STEPS.get(error.errno or 0, _ALLOW_CALLS),
        ) from error


_FREE_MEMORY = (
    "free memory on this host or raise the container's limit; a snapshot is as large as this"
    " rank's share of the checkpoint"
)
_NEXT_STEPS = {
    errno.ENOMEM: _FREE_MEMORY,
    errno.ENOSPC: _FREE_MEMORY,
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`): it applies to this memory, too",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
_ALLOW_CALLS = (
    "this system, or the container's profile, must allow memfd_create, fallocate and mmap"
)


class Lease:
    """The right to one block until :meth:`release`, or until the last reference is dropped."""

    def __init__(self, block: Block, arena: Arena) -> None:
        self.block = block
        self.label: Any = None
        """Set by the holder; a stager finds its lease by it, see :meth:`Arena.lease_at`."""
        self._finalizer = weakref.finalize(self, arena._give_back, block)
        # At exit, a later handler may still wait for this save to be written.
        self._finalizer.atexit = False
        arena._leases.add(self)  # the caller holds the lock

    def release(self) -> None:
        """Return the block to the arena; its bytes may change from now on. Idempotent."""
        self._finalizer()

    @property
    def held(self) -> bool:
        """Whether this lease still holds the block."""
        return self._finalizer.alive


class Arena:
    """At most ``max_blocks`` blocks of memory, shared by all saves of this process.

    Memory is allocated and freed outside the lock, which only guards the lists: the garbage
    collector may release a lease in any thread and at any line.
    """

    def __init__(
        self, *, max_blocks: int, on_drop: Callable[[Block], None] = lambda _: None
    ) -> None:
        self._pid = os.getpid()
        self._max_blocks = max_blocks
        self._on_drop = on_drop
        self._free: list[Block] = []
        self._leased: list[Block] = []
        self._makers: set[object] = set()
        """Callers that are making a block."""
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._lock = threading.RLock()

    def lease(
        self, nbytes: int, *, timeout_s: float, beyond_limit: bool = False, as_buffer: bool = False
    ) -> Lease:
        """A lease on a block of at least ``nbytes`` bytes; waits for an earlier save to return one.

        A caller that already holds a lease must not wait for another one: it passes
        ``beyond_limit``, and blocks in excess of the limit are freed when they are returned. One
        that takes no snapshot passes ``as_buffer``: while there is room for another block, it gets
        none that is prepared for the next snapshot.
        Labelled leases belong to staged copies that are not being written yet. They are waited for
        only a moment: the exception of a failed save keeps its lease alive for as long as the
        exception is kept.

        Raises ``ReservationError`` if the system does not have that much memory,
        ``SaveTimeoutError`` after ``timeout_s``, and ``SaveAbortedError`` if the arena was closed.
        """
        now = time.monotonic()
        deadline, patience = now + timeout_s, now + _STAGED_PATIENCE_S
        maker, is_collected = object(), False
        too_small: list[Block] = []
        try:
            while True:
                with self._lock:
                    out = len(self._leased) + len(self._makers)
                    has_room = out + len(self._free) < self._max_blocks
                    block = self._take_free(nbytes, unprepared=as_buffer and has_room)
                    if block is not None:
                        self._leased.append(block)
                        return Lease(block, self)
                    if beyond_limit or out < self._max_blocks:
                        # The new, larger block replaces those that are too small.
                        too_small = [block for block in self._free if block.nbytes < nbytes]
                        self._free = [block for block in self._free if block.nbytes >= nbytes]
                        self._makers.add(maker)
                        break
                    are_staged = not any(
                        lease.held and lease.label is None for lease in self._leases
                    )
                if not is_collected:
                    # An exception's traceback may be all that keeps a failed save's lease alive.
                    gc.collect()
                    is_collected = True
                    continue
                now = time.monotonic()
                if now >= deadline:
                    raise SaveTimeoutError(
                        f"all {self._max_blocks} snapshot buffers are still being written after"
                        f" {timeout_s:g} s",
                        phase="stage",
                        hint="save less often, or wait for the saves in flight",
                    )
                beyond_limit = are_staged and now >= patience
                if not beyond_limit:
                    # Not a wait for a signal: the garbage collector may release a lease anywhere.
                    is_done(Future(), _LOOK_AGAIN_S)
            return self._lease_new(nbytes, too_small, maker)
        finally:
            with self._lock:
                self._makers.discard(maker)  # after an error or an interrupt
            self._drop(too_small)  # after an interrupt

    def _take_free(self, nbytes: int, *, unprepared: bool) -> Block | None:
        if self._max_blocks == 0:
            raise SaveAbortedError(
                "the engine that this save belongs to was closed",
                phase="stage",
                hint="make a new writer; call configure() and reset() only while no save runs",
            )
        fitting = [
            block
            for block in self._free
            if block.nbytes >= nbytes and not (unprepared and block.prepared_views)
        ]
        if not fitting:
            return None
        block = min(fitting, key=lambda candidate: candidate.nbytes)
        self._free.remove(block)
        return block

    def _lease_new(self, nbytes: int, too_small: list[Block], maker: object) -> Lease:
        largest = max(too_small, key=lambda block: block.nbytes, default=None)
        self._drop(too_small)
        # Touched pages are worth keeping: touching new ones is most of what a first copy costs.
        made = largest if largest is not None and largest.grow(nbytes) else None
        largest = None
        made = made or Block(nbytes)
        with self._lock:
            self._makers.remove(maker)
            self._leased.append(made)
            return Lease(made, self)

    def adopt(self, lease: Lease) -> Lease:
        """Take over a lease; its previous holder can no longer release it."""
        with self._lock:
            lease._finalizer.detach()
            return Lease(lease.block, self)

    @property
    def anything_labelled(self) -> bool:
        """Whether a labelled lease, such as a stager's, is out."""
        with self._lock:
            return any(lease.held and lease.label is not None for lease in self._leases)

    def lease_at(self, address: int) -> Lease | None:
        """The held lease whose block contains a memory address; ``None`` if there is none."""
        with self._lock:  # other threads add to it
            leases = list(self._leases)
        for lease in leases:
            start = address_of(lease.block)
            if lease.held and start <= address < start + lease.block.nbytes:
                return lease
        return None

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of memory held at present, leased or free."""
        with self._lock:
            return sum(block.nbytes for block in (*self._free, *self._leased))

    def close(self) -> None:
        """Free all unleased memory; leased blocks are freed when they are returned."""
        with self._lock:
            self._max_blocks = 0
        self.trim()

    def trim(self) -> None:
        """Free all unleased memory; later leases reserve it again."""
        with uninterrupted(), self._lock:
            free, self._free = self._free, []
        self._drop(free)

    def _give_back(self, block: Block) -> None:
        if os.getpid() != self._pid:
            return  # a forked child's copy of a lease; the lock may have been held during the fork
        with uninterrupted(), self._lock:  # a finalizer may call this
            self._leased.remove(block)
            keep = len(self._leased) + len(self._free) < self._max_blocks
            if keep:
                self._free.append(block)
        if not keep:
            self._drop([block])

    def _drop(self, blocks: list[Block]) -> None:
        while blocks:  # no local variable: it would keep the last one alive
            blocks[-1].prepared_views = None
            self._on_drop(blocks[-1])
            blocks.pop()


def address_of(block: Block) -> int:
    """Address of a block's first byte in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block.memory))


def _let_go_after_fork() -> None:
    """Close the descriptors of all blocks in a forked child, and never unmap the blocks' addresses.

    Blocks are not mapped in the child (``MADV_DONTFORK``), but collecting an mmap object unmaps its
    addresses anyway, and by then they may hold other memory of the child.
    """
    blocks = list(Block._all)
    for block in blocks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block.memory))
        block.close_descriptor()
    for path in glob("/proc/self/fd/*") if blocks else ():
        with suppress(OSError):  # an mmap object holds a duplicate of its descriptor
            if os.readlink(path).startswith(f"/memfd:{_MEMFD_PREFIX}"):
                os.close(int(os.path.basename(path)))


os.register_at_fork(after_in_child=_let_go_after_fork)


# --- memory of the system -------------------------------------------------------------------------


def memory_descriptor(name: str) -> int:
    """A new descriptor of anonymous memory, closed on ``exec``; ``OSError`` if refused."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    # Missing in a Python that was built with a glibc before 2.27, such as conda's and uv's.
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.memfd_create(name.encode(), _MFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    return fd


def available_nbytes(*, root: str = "/") -> int:
    """Bytes that this process can take without swapping or being killed, as reported by the system.

    The minimum over the host and each control group (v2 or v1) of this process. Reclaimable page
    cache counts as free. Tests pass a ``root`` that contains ``proc`` and ``sys``.
    """
    left = list(_left_in_groups(root))
    with (
        suppress(OSError, StopIteration),  # without /proc the host has no limit
        open(os.path.join(root, "proc/meminfo")) as stream,
    ):
        kib = next(line.split()[1] for line in stream if line.startswith("MemAvailable:"))
        left.append(int(kib) << 10)
    return min(left, default=sys.maxsize)


def _left_in_groups(root: str) -> Iterator[int]:
    """Bytes that each control group of this process, and each group above it, can give."""
    base = os.path.join(root, "sys/fs/cgroup")
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as stream:
            entries = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return
    for _, controllers, path in entries:
        if not controllers:
            names, top = ("memory.max", "memory.current"), base
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = os.path.join(base, "memory")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            directory = os.path.join(top, *parts[:depth])
            limit, usage = (_number(os.path.join(directory, name)) for name in names)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + _reclaimable(os.path.join(directory, "memory.stat")))


def _number(path: str) -> int | None:
    """The number in a file; ``None`` if the file holds none, as with ``max``."""
    try:
        with open(path) as stream:
            return int(stream.read())
    except (OSError, ValueError):
        return None


def _reclaimable(stat_path: str) -> int:
    try:
        with open(stat_path) as stream:
            pairs = dict(line.split(maxsplit=1) for line in stream)
            return sum(
                int(pairs.get(name, pairs.get(f"total_{name}", 0)))
                for name in ("active_file", "inactive_file")
            )
    except (OSError, ValueError):
        return 0
