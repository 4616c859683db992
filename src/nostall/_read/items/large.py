"""Large tensors: read in pieces by several threads, straight into the target where possible."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from nostall._memory.uploads import Memory
from nostall._model import checksum
from nostall._model.crc import combine
from nostall._read.items.forms import DESCRIPTOR, HEAD_NBYTES, Form
from nostall._read.items.opened import OpenFile
from nostall._read.items.rows import Rows
from nostall._read.items.shared import Shared
from nostall._read.items.targets import (
    bring,
    is_dense,
    note_changes,
    require_usable,
    without_gradient,
)
from nostall._read.plan import Wanted

PIECE_NBYTES = 4 << 20
"""Read by one thread before it looks whether the load goes on."""
_SUMMED_NBYTES = 512 << 10
"""Read by one call if it is checksummed: what the caches of a core still hold then."""


class LargeRead:
    """One tensor whose target is known.

    Args:
        shared: What all reads share.
        file: The file that has it.
        wanted: The item.
        target: Its tensor; autograd knows that it changes if it is plain.
    """

    def __init__(
        self, shared: Shared, file: OpenFile, wanted: Wanted, target: torch.Tensor
    ) -> None:
        self._shared = shared
        self._file = file
        self._wanted = wanted
        self._target = target
        self.nbytes = wanted.nbytes
        self.tasks = min(shared.workers.threads, -(-wanted.nbytes // PIECE_NBYTES))
        self._preparing = threading.Lock()
        self._values: _Values | None = None
        self._stored: torch.Tensor | None = None

    def run(self) -> None:
        """Read pieces until none is left."""
        self._shared.workers.require_running()
        with self._preparing:
            if self._values is None and self._stored is None:
                self._prepare()
        if self._values is not None:
            self._values.read_pieces()

    def _prepare(self) -> None:
        """Find out what is stored, and where it goes."""
        wanted, archives = self._wanted, self._shared.archives
        head = bytearray(min(wanted.nbytes, HEAD_NBYTES))
        self._file.fill(wanted.offset, memoryview(head), [wanted])
        archive = partial(self._file.archive, wanted)
        form = archives.form_of(head, 0, archive, self._file, wanted)
        if form is None:
            self._stored = archives.loaded_by_torch(archive(), self._file, wanted)
            return
        item = wanted.item
        verify = archives.verify and form.nbytes > 0
        rows = Rows.of(form, item.storage_offsets, item.lengths, whole=verify)
        stored, uploads = self._target, self._shared.uploads
        is_alike = rows.is_exact and stored.dtype is form.dtype and is_dense(stored)
        if not (is_alike and uploads.can_fill(stored)):
            stored = uploads.beside(self._target, rows.shape, form.dtype)
            self._stored = rows.cut(stored)
        memory = uploads.into(stored)
        self._values = _Values(self._shared, self._file, wanted, rows, memory, form, verify=verify)

    def finish(self) -> None:
        """Hand over the tensor."""
        if self._values is not None:
            self._values.finish()
        if self._stored is not None:
            bring(self._shared.uploads, [self._target], [self._stored], [self._wanted])
            self._stored = None
        self._shared.planner.commit_tensor(self._wanted.item, self._target)


class _Values:
    """The values of one tensor, some of which are still to be read."""

    def __init__(
        self,
        shared: Shared,
        file: OpenFile,
        wanted: Wanted,
        rows: Rows,
        memory: Memory,
        form: Form,
        *,
        verify: bool,
    ) -> None:
        self._shared = shared
        self._file = file
        self._wanted = wanted
        self._begin = wanted.offset + rows.begin
        self._memory = memory
        self._nbytes = rows.nbytes
        self._form = form
        self._verify = verify
        self._left = deque(range(0, self._nbytes, PIECE_NBYTES))
        self._sums: dict[int, int] = {}
        self._summing = threading.Lock()
        self._count = len(self._left)

    def read_pieces(self) -> None:
        """Read pieces until none is left; other threads may do the same."""
        while True:
            self._shared.workers.require_running()
            try:
                begin = self._left.popleft()
            except IndexError:
                return
            with self._memory.part(begin, min(begin + PIECE_NBYTES, self._nbytes)) as piece:
                if not self._verify:
                    self._file.fill(self._begin + begin, piece, [self._wanted])
                    continue
                crc32 = self._fill_and_sum(self._begin + begin, piece)
            with self._summing:
                self._sums[begin] = crc32
                is_last = len(self._sums) == self._count
            if is_last:
                self._compare()

    def finish(self) -> None:
        """Make the values visible to the caller's thread, and what it tells a device to do."""
        self._memory.finish()

    def _fill_and_sum(self, offset: int, memory: memoryview) -> int:
        crc32 = 0
        for begin in range(0, len(memory), _SUMMED_NBYTES):
            part = memory[begin : begin + _SUMMED_NBYTES]
            self._file.fill(offset + begin, part, [self._wanted])
            crc32 = checksum.crc32(part, crc32)
        return crc32

    def _compare(self) -> None:
        crc32 = 0
        for begin, of_piece in sorted(self._sums.items()):
            crc32 = combine(crc32, of_piece, min(PIECE_NBYTES, self._nbytes - begin))
        descriptor = memoryview(bytearray(DESCRIPTOR.size))
        self._file.fill(self._wanted.offset + self._form.end, descriptor, [self._wanted])
        self._shared.archives.require_intact(crc32, descriptor, self._file, self._wanted)


class LargeReads:
    """Several tensors that follow each other, none of which is worth more than one thread."""

    tasks = 1

    def __init__(self, reads: Sequence[LargeRead]) -> None:
        self._reads = reads
        self.nbytes = sum(each.nbytes for each in reads)

    def run(self) -> None:
        """Read one after the other."""
        for read in self._reads:
            read.run()

    def finish(self) -> None:
        """Hand them over."""
        for read in self._reads:
            read.finish()


class LargeReadInTurn:
    """One tensor whose target the planner is asked for once all before it are committed.

    Args:
        shared: What all reads share.
        file: The file that has it.
        wanted: The item.
    """

    tasks = 0
    nbytes = 0

    def __init__(self, shared: Shared, file: OpenFile, wanted: Wanted) -> None:
        self._shared = shared
        self._file = file
        self._wanted = wanted

    def run(self) -> None:
        """Nothing can be read before its turn."""

    def finish(self) -> None:
        """Read the tensor and hand it over."""
        target = without_gradient(self._shared.planner.resolve_tensor(self._wanted.item))
        require_usable(target, self._wanted)
        note_changes([target])
        self._shared.uploads.prepare([target])
        read = LargeRead(self._shared, self._file, self._wanted, target)
        workers = self._shared.workers
        for task in [workers.submit(read.run) for _ in range(read.tasks)]:
            workers.wait(task)
        read.finish()
