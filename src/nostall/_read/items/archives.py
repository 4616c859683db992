"""What an item's archive holds: its form, whether its values are intact, the tensor in it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO

import torch

from nostall._read.items.forms import DESCRIPTOR, Contradictory, Form, Forms, Unusual
from nostall._read.items.opened import OpenFile
from nostall._read.objects import OF_BYTES, loaded_safely, reason_of, refused_by_torch
from nostall._read.plan import Wanted
from nostall._storage.reading import (
    ChecksumMissing,
    NoArchive,
    damage_of_container,
    is_to_blame,
)

_SIGNATURE = b"PK\x07\x08"


class Archives:
    """The archives of one load. Its methods may be called from several threads.

    Args:
        verify: Whether values are compared with the checksums in their archives.
    """

    def __init__(self, *, verify: bool) -> None:
        self.verify = verify
        self.forms = Forms()

    def form_of(
        self,
        head: bytearray,
        at: int,
        archive: Callable[[], BinaryIO],
        file: OpenFile,
        wanted: Wanted,
    ) -> Form | None:
        """The form of an item's archive; ``None`` if only torch may understand it.

        Args:
            head: Has the archive's first bytes, as :meth:`Forms.known` needs them.
            at: Where they begin.
            archive: Opens all of it.
            file: The file that has the item.
            wanted: The item.

        Raises:
            DamagedCheckpointError: The archive contradicts itself, or the item's slice.
            OSError: It cannot be read.
        """
        form = wanted.form or self.forms.known(head, at, wanted.nbytes)
        if form is None:
            try:
                form = self.forms.parse(archive(), wanted.nbytes)
            except Unusual:
                return None
            except Contradictory as error:
                raise file.damaged(f"an item is damaged: {error}", [wanted]) from error
        _require_inside(form.shape, file, wanted)
        return form

    def require_intact(
        self, crc32: int, descriptor: memoryview, file: OpenFile, wanted: Wanted
    ) -> None:
        """Compare values with the checksum in their own archive, if it has one.

        Args:
            crc32: The CRC-32 of the values that were read; there are some.
            descriptor: What is after them.
            file: The file that has the item.
            wanted: The item.

        Raises:
            DamagedCheckpointError: They differ, or the checksum is overwritten.
        """
        signature, expected = DESCRIPTOR.unpack(descriptor)
        if signature != _SIGNATURE:
            raise file.damaged("the checksum of the values is overwritten", [wanted])
        if expected and crc32 != expected:
            what = f"CRC-32 of the values is {crc32:08x}, expected {expected:08x}"
            raise file.damaged(what, [wanted])

    def loaded_by_torch(self, archive: BinaryIO, file: OpenFile, wanted: Wanted) -> torch.Tensor:
        """The slice of a tensor that :meth:`form_of` does not know.

        Raises:
            DamagedCheckpointError: It is damaged, or not a tensor.
            ReadError: It needs something that this environment does not have.
            UntrustedObjectError: It is of a class that is not allowed.
            OSError: It cannot be read.
        """
        if self.verify:
            archive = io.BytesIO(archive.read())  # what is compared is what is loaded
            with suppress(ChecksumMissing, NoArchive):
                if (damage := damage_of_container(archive)) is not None:
                    raise file.damaged(damage, [wanted])
        try:
            loaded = loaded_safely(archive)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # damaged archives and pickles can raise anything
            if (refused := refused_by_torch(error)) is not None:
                raise file.untrusted(f"an item cannot be loaded: {refused}", wanted) from error
            what = f"an item cannot be loaded: {type(error).__name__}: {reason_of(error)}"
            if isinstance(error, OF_BYTES) or is_to_blame(archive, error):
                raise file.damaged(what, [wanted]) from error
            raise file.unreadable(what, wanted) from error
        if not isinstance(loaded, torch.Tensor):
            what = f"an item is of type {type(loaded).__name__}, not a tensor"
            raise file.damaged(what, [wanted])
        if loaded.is_meta:
            raise file.damaged("an item is a tensor without values", [wanted])
        _require_inside(loaded.shape, file, wanted)
        try:
            return sliced(loaded, wanted)
        except RuntimeError as error:  # forged: torch makes tensors that it cannot use
            why = str(error).partition("\n")[0]
            raise file.damaged(f"an item cannot be sliced: {why:.200}", [wanted]) from error


def is_whole(shape: Sequence[int], wanted: Wanted) -> bool:
    """Whether an item is all of a stored tensor."""
    return wanted.item.lengths == shape and not any(wanted.item.storage_offsets)


def sliced(stored: torch.Tensor, wanted: Wanted) -> torch.Tensor:
    """The part of a stored tensor that an item is."""
    if not is_whole(stored.shape, wanted):
        places = zip(wanted.item.storage_offsets, wanted.item.lengths, strict=True)
        for dimension, (offset, length) in enumerate(places):
            stored = stored.narrow(dimension, offset, length)
    return stored


def _require_inside(shape: Sequence[int], file: OpenFile, wanted: Wanted) -> None:
    if is_whole(shape, wanted):
        return
    offsets, lengths = wanted.item.storage_offsets, wanted.item.lengths
    fits = len(shape) == len(offsets) == len(lengths) and all(
        offset >= 0 and offset + length <= size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    )
    if not fits:
        what = f"an item has the shape {tuple(shape)}, not the one in the metadata"
        raise file.damaged(what, [wanted])
