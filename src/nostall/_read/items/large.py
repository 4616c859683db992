"""Large tensors: read in pieces by several threads, straight into the target where possible."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from nostall._memory.uploads import PART_NBYTES, Memory
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
    span_of,
    without_gradient,
)
from nostall._read.plan import Wanted

PIECE_NBYTES = 4 << 20
"""Read by one thread before it looks whether the load goes on, into memory of the CPU."""


def _piece_nbytes(memory: torch.Tensor) -> int:
    """What one thread reads into memory at a time; for a device, what one copy sends there."""
    return PIECE_NBYTES if memory.is_cpu else PART_NBYTES


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
        pieces = -(-(wanted.nbytes - HEAD_NBYTES) // _piece_nbytes(target))  # of values, about
        self.tasks = min(shared.workers.threads, max(1, pieces))
        self._preparing = threading.Lock()
        self._values: _Values | None = None
        self._stored: torch.Tensor | None = None

    def run(self) -> None:
        """Read pieces until none is left."""
        self._shared.workers.require_running()
        with self._preparing:
            if self._values is None and self._stored is None:
                self._prepare()
        if self._values is None:
            return
        with suppress(_OtherForm):  # only of a read that one thread does
            self._values.read_pieces()
            return
        self._shared.archives.forms.note_wrong_guess(self._wanted.nbytes)
        self._values = self._stored = None
        self._read_head()
        if self._values is not None:
            self._values.read_pieces()

    def _prepare(self) -> None:
        """Find out what is stored, and where it goes."""
        guess = None
        if (
            self._wanted.form is None
            and self.tasks == 1
            and not any(self._wanted.item.storage_offsets)
        ):
            forms, shape = self._shared.archives.forms, self._wanted.item.lengths
            guess = forms.guess(self._wanted.nbytes, shape, self._target.dtype)
        if guess is None:
            self._read_head()
        else:
            self._begin(guess, is_guess=True)

    def _read_head(self) -> None:
        wanted, archives = self._wanted, self._shared.archives
        head = bytearray(min(wanted.nbytes, HEAD_NBYTES) if wanted.form is None else 0)
        self._file.fill(wanted.offset, [wanted], memoryview(head))
        archive = partial(self._file.archive, wanted)
        form = archives.form_of(head, 0, archive, self._file, wanted)
        if form is None:
            self._stored = archives.loaded_by_torch(archive(), self._file, wanted)
        else:
            self._begin(form, is_guess=False)

    def _begin(self, form: Form, *, is_guess: bool) -> None:
        item, archives = self._wanted.item, self._shared.archives
        verify = archives.verify and form.nbytes > 0 and form.has_checksum
        rows = Rows.of(form, item.storage_offsets, item.lengths, whole=verify)
        stored, uploads = self._target, self._shared.uploads
        is_alike = rows.is_exact and stored.dtype is form.dtype and is_dense(stored)
        if not (is_alike and uploads.can_fill(stored)):
            stored = uploads.beside(self._target, rows.shape, form.dtype)
            self._stored = rows.cut(stored)
        memory = uploads.into(stored)
        self._values = _Values(
            self._shared,
            self._file,
            self._wanted,
            rows,
            memory,
            form,
            piece_nbytes=_piece_nbytes(stored),
            verify=verify,
            is_guess=is_guess,
        )

    def finish(self) -> None:
        """Hand over the tensor."""
        if self._values is not None:
            self._values.finish()
        if self._stored is not None:
            bring(self._shared.uploads, [self._target], [self._stored], [self._wanted])
            self._stored = None
        self._shared.planner.commit_tensor(self._wanted.item, self._target)


class _OtherForm(Exception):  # an answer, not an error
    """An archive does not have the form that was guessed."""


class _Values:
    """The values of one tensor, some of which are still to be read.

    Args:
        is_guess: Whether the form has to be compared with what is before the values. All rows are
            read then, by one thread.
    """

    def __init__(
        self,
        shared: Shared,
        file: OpenFile,
        wanted: Wanted,
        rows: Rows,
        memory: Memory,
        form: Form,
        *,
        piece_nbytes: int,
        verify: bool,
        is_guess: bool,
    ) -> None:
        self._shared = shared
        self._file = file
        self._wanted = wanted
        self._begin = wanted.offset + rows.begin
        self._memory = memory
        self._nbytes = rows.nbytes
        self._form = form
        self._verify = verify
        self._head = memoryview(bytearray(form.begin if is_guess else 0))
        self._descriptor = memoryview(bytearray(DESCRIPTOR.size))
        self._left = deque(_pieces(self._begin, rows.nbytes, piece_nbytes))
        self._sums: dict[int, tuple[int, int]] = {}
        """Checksum and length of each piece, by where it begins."""
        self._summing = threading.Lock()
        self._count = len(self._left)

    def read_pieces(self) -> None:
        """Read pieces until none is left; other threads may do the same.

        Raises:
            _OtherForm: The form was guessed, and is another one.
        """
        while True:
            self._shared.workers.require_running()
            try:
                begin, end = self._left.popleft()
            except IndexError:
                return
            with self._memory.part(begin, end) as piece:
                if not self._verify:
                    self._fill(begin, piece)
                    continue
                self._fill(begin, piece, *([self._descriptor] if end == self._nbytes else []))
                crc32 = checksum.crc32(piece)
            with self._summing:
                self._sums[begin] = crc32, end - begin
                is_last = len(self._sums) == self._count
            if is_last:
                self._compare()

    def finish(self) -> None:
        """Make the values visible to the caller's thread, and what it tells a device to do."""
        self._memory.finish()

    def _fill(self, begin: int, memory: memoryview, *more: memoryview) -> None:
        offset = self._begin + begin
        if begin or not self._head:
            self._file.fill(offset, [self._wanted], memory, *more)
            return
        self._file.fill(offset - len(self._head), [self._wanted], self._head, memory, *more)
        if self._head != self._form.prefix:
            raise _OtherForm

    def _compare(self) -> None:
        crc32 = 0
        for _, (of_piece, nbytes) in sorted(self._sums.items()):
            crc32 = combine(crc32, of_piece, nbytes)
        archives = self._shared.archives
        archives.require_intact(crc32, self._descriptor, self._file, self._wanted)


def _pieces(offset: int, nbytes: int, piece_nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of values that lie at this offset of a file.

    If there are several, all but the first begin at a multiple of ``piece_nbytes`` in the file, so
    that no two of them need the same page.
    """
    if nbytes <= piece_nbytes:
        offset = 0
    begin = 0
    while begin < nbytes:
        end = min(nbytes, begin + piece_nbytes - (offset + begin) % piece_nbytes)
        yield begin, end
        begin = end


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
        note_changes([target], [span_of(target)])
        self._shared.uploads.prepare([target])
        read = LargeRead(self._shared, self._file, self._wanted, target)
        workers = self._shared.workers
        for task in [workers.submit(read.run) for _ in range(read.tasks)]:
            workers.wait(task)
        read.finish()
