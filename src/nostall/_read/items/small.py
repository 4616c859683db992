"""Small items, and objects of any length: neighbours are read together and copied from there."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from nostall._memory.copying import copy_bytes
from nostall._model import checksum
from nostall._read.items.archives import is_whole, sliced
from nostall._read.items.forms import DESCRIPTOR, Form
from nostall._read.items.opened import OpenFile
from nostall._read.items.shared import Shared
from nostall._read.items.targets import address_of, bring, require_usable, without_gradient
from nostall._read.plan import Wanted


class SmallRead:
    """Items that lie close together, in the order in which they are handed over.

    Args:
        shared: What all reads share.
        file: The file that has the items.
        items: The items.
        targets: Their tensors; autograd knows that the plain ones change. ``None``: the planner is
            asked for each one after the one before it was committed.
        addresses: Where the values of plain targets are; 0 for others.
    """

    tasks = 1

    def __init__(
        self,
        shared: Shared,
        file: OpenFile,
        items: Sequence[Wanted],
        targets: Sequence[torch.Tensor | None] | None,
        addresses: Sequence[int],
    ) -> None:
        self._shared = shared
        self._file = file
        self._items = items
        self._targets = targets
        self._addresses = addresses
        self._begin = min(each.offset for each in items)
        self.nbytes = max(each.end for each in items) - self._begin
        self._brought: list[bytes | torch.Tensor | None] = []

    def run(self) -> None:
        """Read all items, and copy those whose targets are known and plain."""
        buffers = self._shared.buffers
        self._shared.workers.require_running()
        content = buffers.take(self.nbytes)
        self._file.fill(self._begin, self._items, memoryview(content)[: self.nbytes])
        address = address_of(content)
        targets = self._targets or [None] * len(self._items)
        archives = self._shared.archives
        known = None if archives.verify else archives.forms.known
        for wanted, target, to in zip(self._items, targets, self._addresses, strict=True):
            # Most items need no more than this, which is half of the work of _bring().
            at = wanted.offset - self._begin
            form = wanted.form
            if form is None and known and to:
                form = known(content, at, wanted.nbytes)
            if form is not None and to and _is_direct(form, wanted, target):
                copy_bytes(to, address + at + form.begin, form.nbytes)
                self._brought.append(None)
            else:
                self._brought.append(self._bring(content, address, wanted, target, to))
        buffers.give(content)

    def _bring(
        self,
        content: bytearray,
        address: int,
        wanted: Wanted,
        target: torch.Tensor | None,
        to: int,
    ) -> bytes | torch.Tensor | None:
        """An object, the values of a tensor, or ``None`` if they are in the target already."""
        at = wanted.offset - self._begin
        if wanted.item.type is LoadItemType.BYTE_IO:
            return bytes(memoryview(content)[at : at + wanted.nbytes])
        archives = self._shared.archives

        def archive() -> io.BytesIO:
            return io.BytesIO(memoryview(content)[at : at + wanted.nbytes])

        form = archives.form_of(content, at, archive, self._file, wanted)
        if form is None:
            return archives.loaded_by_torch(archive(), self._file, wanted)
        begin = at + form.begin
        if archives.verify and form.nbytes and form.has_checksum:
            view = memoryview(content)
            end = at + form.end
            found = checksum.crc32(view[begin:end])
            archives.require_intact(found, view[end : end + DESCRIPTOR.size], self._file, wanted)
        if to and _is_direct(form, wanted, target):
            copy_bytes(to, address + begin, form.nbytes)
            return None
        # Archives begin at any byte; torch needs the alignment of the dtype.
        stored = torch.empty(form.shape, dtype=form.dtype, device="cpu")
        if form.nbytes:
            copy_bytes(stored.data_ptr(), address + begin, form.nbytes)
        return sliced(stored, wanted)

    def finish(self) -> None:
        """Hand over all items."""
        if self._targets is None:
            for wanted, brought in zip(self._items, self._brought, strict=True):
                self._hand_over_one(wanted, brought)
            return
        values, into, of = [], [], []
        tensors: list[tuple[Wanted, torch.Tensor]] = []
        for wanted, target, brought in zip(self._items, self._targets, self._brought, strict=True):
            if isinstance(brought, bytes):
                self._shared.planner.load_bytes(wanted.item, io.BytesIO(brought))
                continue
            assert target is not None
            tensors.append((wanted, target))
            if brought is not None:
                values.append(brought)
                into.append(target)
                of.append(wanted)
        if into:
            bring(self._shared.uploads, into, values, of)
        for wanted, target in tensors:
            self._shared.planner.commit_tensor(wanted.item, target)

    def _hand_over_one(self, wanted: Wanted, brought: bytes | torch.Tensor | None) -> None:
        planner, uploads = self._shared.planner, self._shared.uploads
        if isinstance(brought, bytes):
            planner.load_bytes(wanted.item, io.BytesIO(brought))
            return
        target = without_gradient(planner.resolve_tensor(wanted.item))
        require_usable(target, wanted)
        assert brought is not None
        uploads.prepare([target])
        bring(uploads, [target], [brought], [wanted])
        planner.commit_tensor(wanted.item, target)


def _is_direct(form: Form, wanted: Wanted, target: torch.Tensor | None) -> bool:
    """Whether the stored bytes are those of a plain target."""
    return target is not None and target.dtype is form.dtype and is_whole(form.shape, wanted)
