"""Host memory for snapshots: reserved once, handed out as leases, reused for every save.

A block is anonymous memory behind a descriptor (``memfd_create``), so that one descriptor gives the writer process the
whole image and nothing is left in ``/dev/shm`` whoever dies. Its pages are reserved when it is made
(``posix_fallocate``): too little memory is an error at that line, not a SIGBUS in the middle of a copy.

The lease that is not yet returned *is* the back-pressure: with ``max_blocks`` leases out, the next one waits.
Blocks are made as large as asked for; for a larger request a free block that is too small grows.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from nostall._memory.available import available_nbytes
from nostall.errors import ReservationError, SaveAbortedError, SaveTimeoutError

_MAP_UNIT_NBYTES = 2 << 20
"""Blocks are whole huge pages, so that the system can back them with such."""
_STAGED_PATIENCE_S = 2.0
"""Planning a staged save takes less; then it is being written, which is waited for."""
_MEMFD_PREFIX = "nostall-"
_MADV_POPULATE_WRITE = 23
"""From ``linux/mman.h``; Python has no name for it."""


class Block:
    """One piece of memory behind one descriptor."""

    _ids = itertools.count(1)
    _all: ClassVar[weakref.WeakSet[Block]] = weakref.WeakSet()

    def __init__(self, nbytes: int) -> None:
        self.id = next(Block._ids)
        self.nbytes = max(1, -(-nbytes // _MAP_UNIT_NBYTES)) * _MAP_UNIT_NBYTES
        _require_available(self.nbytes, self.nbytes)
        self.fd = os.memfd_create(f"{_MEMFD_PREFIX}{self.id}", os.MFD_CLOEXEC)
        try:
            with _as_reservation_error(self.nbytes):
                os.posix_fallocate(self.fd, 0, self.nbytes)
                self.memory = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        # A forked data loader must neither pay for these pages nor keep them.
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.prepared_views: Any = None
        """What the snapshot keeps in the block for the next save of the same layout."""
        self.is_shown = False
        """Whether tensors over it were given to somebody who may keep them; it stays where it is then."""
        self.close_descriptor = weakref.finalize(self, os.close, self.fd)
        self.close_descriptor.atexit = False
        Block._all.add(self)

    def grow(self, nbytes: int) -> bool:
        """Make it larger and keep its pages; it has another ``id`` then. False if somebody still looks into it.

        Nobody else may have it mapped.
        """
        if self.is_shown:
            return False
        size = -(-nbytes // _MAP_UNIT_NBYTES) * _MAP_UNIT_NBYTES
        _require_available(size, size - self.nbytes)
        with _as_reservation_error(size):
            # Only what is new: the system looks at every page of the range, which takes 40 ms for 1 GiB that is there.
            os.posix_fallocate(self.fd, self.nbytes, size - self.nbytes)
        try:
            self.memory.resize(size)
        except (BufferError, OSError):
            os.ftruncate(self.fd, self.nbytes)
            return False
        self.nbytes = size
        self.id = next(Block._ids)
        return True

    def populate(self) -> None:
        """Map all pages in this process now, so that the first copy does not fault them in one by one."""
        # Linux before 5.14 does not know it; then the first copy pays.
        with suppress(OSError, ValueError):
            self.memory.madvise(_MADV_POPULATE_WRITE)

    def image(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of part of the block."""
        return memoryview(self.memory)[offset : offset + nbytes]


def _require_available(nbytes: int, more_nbytes: int) -> None:
    available = available_nbytes()
    if more_nbytes > available:
        # Asked for more than there is, a Linux without swap does not refuse: it takes all and then kills a process.
        raise _reservation_error(nbytes, f"{available} are available")


@contextmanager
def _as_reservation_error(nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
            raise
        hint = _MEMORY_HINT
        if error.errno == errno.EFBIG:
            hint = "raise the limit on file sizes, `ulimit -f`, which is on memory behind a descriptor, too"
        raise _reservation_error(nbytes, os.strerror(error.errno), hint) from error


_MEMORY_HINT = (
    "free memory on this host or raise the container's limit; a snapshot needs the size of this rank's share of"
    " the checkpoint"
)


def _reservation_error(nbytes: int, reason: str, hint: str = _MEMORY_HINT) -> ReservationError:
    return ReservationError(
        f"{nbytes} bytes of host memory for a snapshot cannot be reserved ({reason})",
        nbytes=nbytes,
        phase="stage",
        hint=hint,
    )


class Lease:
    """The right to one block until :meth:`release`; idempotent, and released by losing the last reference, too."""

    def __init__(self, block: Block, give_back: Callable[[Block], None]) -> None:
        self.block = block
        self.label: Any = None
        """What the holder wants to find again with :meth:`Arena.lease_at`."""
        self._give_back = give_back
        self._finalizer = weakref.finalize(self, give_back, block)
        # A handler that runs later may still wait for what is being written.
        self._finalizer.atexit = False

    def release(self) -> None:
        """Give the block back; its bytes may change from now on."""
        self._finalizer()

    def hand_over(self) -> Lease:
        """A new lease on the same block; this one is over, and losing it no longer gives the block back."""
        self._finalizer.detach()
        return Lease(self.block, self._give_back)

    @property
    def held(self) -> bool:
        """Whether the block is still this lease's."""
        return self._finalizer.alive


class Arena:
    """At most ``max_blocks`` blocks of memory, shared by all saves of this process.

    Memory is made and given back to the system outside the lock, which is only ever held for a look at the lists: a lease
    may be released by the garbage collector, in any thread and at any line.
    """

    def __init__(
        self,
        *,
        max_blocks: int = 2,
        on_drop: Callable[[Block], None] = lambda _: None,
    ) -> None:
        self._pid = os.getpid()
        self._max_blocks = max_blocks
        self._on_drop = on_drop
        self._free: list[Block] = []
        self._leased: list[Block] = []
        self._being_made = 0
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._changed = threading.Condition(threading.RLock())

    def lease(self, nbytes: int, *, timeout_s: float, beyond_limit: bool = False) -> Lease:
        """A block of at least ``nbytes`` bytes, waiting for an earlier save to return one if need be.

        A caller that already holds a lease must not wait for another one: it asks ``beyond_limit``, and what exceeds
        the limit is given back to the system on return. Labelled leases, of staged copies that nobody writes yet, are
        waited for only a moment: if their save has failed, they last as long as somebody keeps its exception.

        Raises:
            ReservationError: The system has not that much memory.
            SaveTimeoutError: No block came back within ``timeout_s`` seconds.
            SaveAbortedError: The arena was closed.
        """
        now = time.monotonic()
        deadline, patience = now + timeout_s, now + _STAGED_PATIENCE_S
        collected = False
        too_small: list[Block] = []
        while True:
            with self._changed:
                block = self._take_free(nbytes)
                if block is not None:
                    return self._leased_out(block)
                if beyond_limit or len(self._leased) + self._being_made < self._max_blocks:
                    # All free blocks are too small, so of no more use than the larger one to come.
                    too_small, self._free = self._free, []
                    self._being_made += 1
                    break
                until = deadline if self._anything_unlabelled else min(deadline, patience)
                if collected and not self._changed.wait(until - time.monotonic()):
                    if until < deadline:
                        beyond_limit = True
                        continue
                    raise SaveTimeoutError(
                        f"all {self._max_blocks} snapshot buffers are still being written after {timeout_s:g} s",
                        phase="stage",
                        hint="save less often, or wait for the saves in flight first",
                    )
            # A failed save's lease may be alive in the traceback of its exception only.
            if not collected:
                gc.collect()
                collected = True
        return self._lease_new(nbytes, too_small)

    def _take_free(self, nbytes: int) -> Block | None:
        if self._max_blocks == 0:
            raise SaveAbortedError(
                "the engine that this save belongs to was closed",
                phase="stage",
                hint="make a new writer; configure() and reset() are for times without a save",
            )
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if not fitting:
            return None
        block = min(fitting, key=lambda candidate: candidate.nbytes)
        self._free.remove(block)
        return block

    def _lease_new(self, nbytes: int, too_small: list[Block]) -> Lease:
        self._drop_all(too_small)
        largest = max(too_small, key=lambda block: block.nbytes, default=None)
        too_small.clear()
        try:
            # Pages that were touched before are worth keeping: touching new ones is most of what a first copy costs.
            made = largest if largest is not None and largest.grow(nbytes) else None
            largest = None
            made = made or Block(nbytes)
        except BaseException:
            with self._changed:
                self._being_made -= 1
                self._changed.notify_all()
            raise
        with self._changed:
            self._being_made -= 1
            return self._leased_out(made)

    def _leased_out(self, block: Block) -> Lease:
        self._leased.append(block)
        lease = Lease(block, self._give_back)
        self._leases.add(lease)
        return lease

    def adopt(self, lease: Lease) -> Lease:
        """Take a lease over from its holder, who can no longer release it."""
        with self._changed:
            mine = lease.hand_over()
            self._leases.add(mine)
            return mine

    @property
    def _anything_unlabelled(self) -> bool:
        return any(lease.held and lease.label is None for lease in self._leases)

    @property
    def anything_labelled(self) -> bool:
        """Whether a lease is out that its holder has labelled, such as a stager's."""
        with self._changed:
            return any(lease.held and lease.label is not None for lease in self._leases)

    def lease_at(self, address: int) -> Lease | None:
        """The lease, still held, whose block a memory address lies in; ``None`` for any other memory."""
        with self._changed:  # another thread may be adding one
            leases = list(self._leases)
        for lease in leases:
            start = address_of(lease.block)
            if lease.held and start <= address < start + lease.block.nbytes:
                return lease
        return None

    @property
    def reserved_nbytes(self) -> int:
        """Memory held at present, leased or free."""
        with self._changed:
            return sum(block.nbytes for block in (*self._free, *self._leased))

    def close(self) -> None:
        """Return all free memory to the system; leased blocks follow when they are returned."""
        with self._changed:
            self._max_blocks = 0
            free, self._free = self._free, []
            self._changed.notify_all()
        for block in free:
            self._drop(block)

    def _give_back(self, block: Block) -> None:
        if os.getpid() != self._pid:
            return  # a forked child's copy of a lease; and another thread may have held the lock when it was made
        with self._changed:
            self._leased.remove(block)
            keep = len(self._leased) + len(self._free) < self._max_blocks
            if keep:
                self._free.append(block)
            self._changed.notify_all()
        if not keep:
            self._drop(block)

    def _drop_all(self, blocks: list[Block]) -> None:
        for block in blocks:  # a method of its own, so that no variable keeps the last one
            self._drop(block)

    def _drop(self, block: Block) -> None:
        block.prepared_views = None
        self._on_drop(block)


def address_of(block: Block) -> int:
    """Address of a block's first byte in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block.memory))


def _let_go_after_fork() -> None:
    """In a forked child, where blocks are not mapped: keep nothing of them alive, and never unmap their addresses.

    An mmap object that is collected unmaps its addresses whatever lies there by then: the child's own memory.
    """
    blocks = list(Block._all)
    for block in blocks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block.memory))
        block.close_descriptor()
    for name in os.listdir("/proc/self/fd") if blocks else ():
        with suppress(OSError):  # an mmap object has a duplicate of its descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_MEMFD_PREFIX}"):
                os.close(int(name))


os.register_at_fork(after_in_child=_let_go_after_fork)
