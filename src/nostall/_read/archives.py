"""Where a tensor's values lie in the archive that ``torch.save`` has made of it.

An archive of one tensor has two records that matter: ``data.pkl`` names dtype and shape, ``data/0``
holds the values, uncompressed. All bytes before the values are the same for all tensors of one
form. So one archive of a form is parsed, and later ones are recognised by these bytes. Whatever has
another form, and every object, is left to ``torch.load``: :func:`object_in`, :func:`loaded_safely`.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import torch

from nostall import _torch
from nostall._model.names import some
from nostall._model.progress import ReadCounter
from nostall._model.threads import uninterrupted
from nostall._read.plan import Form, Wanted
from nostall._storage.damage import ChecksumMissing, NoArchive, damage_of_container, is_to_blame
from nostall._storage.port import ReadableFiles
from nostall.errors import DamagedCheckpointError, ReadError, UntrustedObjectError

HEAD_NBYTES = 4096
"""More than ``torch.save`` writes before the values: a kilobyte, which ends at a multiple of 64."""
DESCRIPTOR = struct.Struct("<4sL")
"""Follows the values: a signature, and their CRC-32, which is zero if there is none."""
_SIGNATURE = b"PK\x07\x08"
_LOCAL_HEADER = struct.Struct("<6xH18x2H")
"""Flags of a record, and the lengths of name and extra field, which come before its content."""
_HAS_DESCRIPTOR = 8
"""Flag of a record whose checksum comes after its content."""
_MOST_FORMS = 4096
_MOST_PICKLE_NBYTES = 4096
_NAMED = 3
"""How many items an error names."""
_OPERATIONS = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"),
        *("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    }
)
"""All that pickles of a plain tensor have. None of them hashes or repeats what was made."""


class OpenFile:
    """An open shard file that is as long as its items need; its reads are counted.

    ``DamagedCheckpointError`` if the file is missing, or ends before an item does.
    """

    def __init__(
        self, files: ReadableFiles, name: str, items: Sequence[Wanted], counter: ReadCounter
    ) -> None:
        self.path = files.where(name)
        directory = os.path.dirname(self.path)
        self.damage_hint = f"`nostall verify {directory}` lists all damage; load another checkpoint"
        self._counter = counter
        try:
            self._source = files.open(name)
        except FileNotFoundError as error:
            raise self.damaged("the file is missing", items) from error
        self.stat = self._source.stat
        beyond = [each for each in items if each.end > self.stat.nbytes]
        if beyond:
            self.close()
            end = max(each.end for each in beyond)
            what = f"the file has {self.stat.nbytes} bytes, its items end at {end}"
            raise self.damaged(what, beyond)

    def fill(self, offset: int, items: Sequence[Wanted], *memories: memoryview) -> None:
        """Read from an offset until the pieces of memory are full, one after the other.

        ``DamagedCheckpointError``, which names the items, if the file has become shorter.
        """
        if self.read_into(offset, *memories) < sum(map(len, memories)):
            raise self.damaged("the file has become shorter", items)

    def read_into(self, offset: int, *memories: memoryview) -> int:
        """Read up to the end of the file; see :class:`~nostall._storage.port.Source`."""
        nbytes = self._source.read_into(offset, *memories)
        self._counter.add(nbytes)
        return nbytes

    def damaged(self, what: str, items: Sequence[Wanted]) -> DamagedCheckpointError:
        """The error for damage to items of this file; names the first of them."""
        return DamagedCheckpointError(
            f"{what} (items {some([each.name for each in items], _NAMED)})",
            phase="read",
            path=self.path,
            hint=self.damage_hint,
        )

    def close(self) -> None:
        """Close the file. Idempotent."""
        with uninterrupted():
            self._source.close()


class Unusual(Exception):  # an answer, not an error
    """Not an archive of one plain tensor; ``torch.load`` may understand it."""


class Broken(Exception):  # a finding; the reader makes an error of it
    """Not an archive that ``torch.save`` makes, or one of too few values."""


class Archives:
    """The archives of one load, and the forms of those seen. Used by several threads."""

    def __init__(self, *, verify: bool) -> None:
        self.verify = verify
        self._forms: dict[int, list[Form]] = {}
        """By the length of their archives."""
        self._count = 0

    def form_of(
        self,
        head: bytearray,
        at: int,
        archive: Callable[[], BinaryIO],
        file: OpenFile,
        wanted: Wanted,
    ) -> Form | None:
        """The form of an item's archive; ``None`` if only torch may understand it.

        ``head`` has, from ``at``, the first :data:`HEAD_NBYTES` of the archive, or all of it;
        ``archive`` opens the whole. ``DamagedCheckpointError`` if the archive contradicts itself,
        or the item's slice.
        """
        alike = self._forms.get(wanted.nbytes, ())
        form = wanted.form or next(
            (each for each in alike if head.startswith(each.prefix, at)), None
        )
        if form is None:
            try:
                form = _parsed(archive(), wanted.nbytes)
            except Broken as error:
                raise file.damaged(f"an item is damaged: {error}", [wanted]) from error
            except (OSError, MemoryError):
                raise
            except Exception:  # damaged archives and pickles can raise anything, and Unusual
                return None
            if self._count < _MOST_FORMS and form.begin <= HEAD_NBYTES:
                self._forms.setdefault(wanted.nbytes, []).append(form)
                self._count += 1
        _require_inside(form.shape, file, wanted)
        return form

    def require_intact(
        self, crc32: int, descriptor: memoryview, file: OpenFile, wanted: Wanted
    ) -> None:
        """Compare values, at least one, with the checksum in their own archive, if it has one.

        ``descriptor`` is the bytes after them. ``DamagedCheckpointError`` if the checksums differ,
        or the stored one is overwritten.
        """
        signature, expected = DESCRIPTOR.unpack(descriptor)
        if signature != _SIGNATURE:
            raise file.damaged("the checksum of the values is overwritten", [wanted])
        if expected and crc32 != expected:
            what = f"CRC-32 of the values is {crc32:08x}, expected {expected:08x}"
            raise file.damaged(what, [wanted])

    def loaded_by_torch(self, archive: BinaryIO, file: OpenFile, wanted: Wanted) -> torch.Tensor:
        """The slice of a tensor that :meth:`form_of` does not know.

        ``DamagedCheckpointError`` if it is damaged, or not a tensor; ``UntrustedObjectError`` if it
        is of a class that is not allowed; ``ReadError`` if it needs something that this environment
        does not have.
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
            what = f"cannot load the tensor {wanted.name!r}"
            if "not an allowed global" in (refused := reason_of(error)):
                raise UntrustedObjectError(
                    f"{what}: {refused}",
                    phase="read",
                    path=file.path,
                    hint="torch.serialization.add_safe_globals allows a class; trust=True is for"
                    " objects",
                ) from error
            hint = file.damage_hint
            raise unloadable(what, error, archive, path=file.path, damage_hint=hint) from error
        if not isinstance(loaded, torch.Tensor):
            what = f"an item is of type {type(loaded).__name__}, not a tensor"
            raise file.damaged(what, [wanted])
        if loaded.is_meta:
            raise file.damaged("an item is a tensor without values", [wanted])
        _require_inside(loaded.shape, file, wanted)
        try:
            return sliced(loaded, wanted.item.storage_offsets, wanted.item.lengths)
        except RuntimeError as error:  # forged: torch makes tensors that it cannot use
            why = str(error).partition("\n")[0]
            raise file.damaged(f"an item cannot be sliced: {why:.200}", [wanted]) from error


def is_whole(shape: Sequence[int], wanted: Wanted) -> bool:
    """Whether an item is all of a stored tensor."""
    return wanted.item.lengths == shape and not any(wanted.item.storage_offsets)


def sliced(stored: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The part of a stored tensor that begins at these offsets."""
    if stored.shape != lengths:
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
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


def _parsed(stream: BinaryIO, nbytes: int) -> Form:
    """The form of an archive of this length.

    Raises :class:`Broken` if it has too few values, ``OSError`` if it cannot be read, and anything
    else, such as :class:`Unusual`, if it is not an archive of one plain tensor.
    """
    with zipfile.ZipFile(stream) as archive:
        records = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        pickled, values = records["data.pkl"], records["data/0"]
        order = records.get("byteorder", pickled)
        for each in (pickled, order):
            # What a form is recognised by has to be before the values.
            is_before = each.header_offset < values.header_offset
            if not is_before or each.file_size > _MOST_PICKLE_NBYTES:
                raise Unusual
        if {each.compress_type for each in (pickled, order, values)} != {zipfile.ZIP_STORED}:
            raise Unusual
        if order is not pickled and archive.read(order) != sys.byteorder.encode():
            raise Unusual
        content = archive.read(pickled)
    require_simple(content)
    unpickler = _Unpickler(io.BytesIO(content))
    plain = unpickler.load()
    if values.file_size < unpickler.stored_nbytes:  # torch 2.9 would read past their end
        raise Broken(f"its values have {values.file_size} bytes, not {unpickler.stored_nbytes}")
    if (
        type(plain) is not torch.Tensor
        or not plain.is_contiguous()
        or plain.storage_offset()
        or plain.is_conj()
        or plain.is_neg()
    ):
        raise Unusual
    stream.seek(values.header_offset)
    flags, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    begin = values.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
    needed = plain.nbytes
    if values.file_size < needed or begin + values.file_size > nbytes:
        # Older versions of torch make up the rest.
        raise Broken(f"its values have {values.file_size} bytes, its shape needs {needed}")
    has_descriptor = flags & _HAS_DESCRIPTOR and begin + needed + DESCRIPTOR.size <= nbytes
    if values.file_size > needed or (needed and not has_descriptor):
        raise Unusual
    stream.seek(0)
    prefix, shape = stream.read(begin), tuple(plain.shape)
    return Form(prefix=prefix, dtype=plain.dtype, shape=shape, nbytes=needed)


def require_simple(content: bytes) -> None:
    """Raise :class:`Unusual` for a pickle that may take much time or memory for few bytes."""
    for op, argument, _ in pickletools.genops(content):
        index = argument if op.name in ("BINPUT", "LONG_BINPUT") else 0
        if op.name not in _OPERATIONS or not isinstance(index, int) or index > len(content):
            raise Unusual


class _Unpickler(pickle.Unpickler):
    """Unpickles a tensor of strided memory without its values; makes nothing else."""

    stored_nbytes = 0
    """Bytes of the values, as the pickle has it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _torch.REBUILD_TENSORS:
            return super().find_class(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        if module == "torch" and (dtype := _torch.dtype_named(name)) is not None:
            return dtype
        raise Unusual

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, count = pid
        if (kind, key) != ("storage", "0"):
            raise Unusual
        self.stored_nbytes = count * (1 if dtype is None else dtype.itemsize)
        return _torch.storage_without_values(dtype)


# --- objects, and tensors that are not plain ------------------------------------------------------

_ENVIRONMENT_HINT = (
    "its bytes do not seem to be damaged: make the modules of the program that saved it importable"
    " here, in the same versions"
)


_OF_BYTES = (Broken, pickle.UnpicklingError, RuntimeError)
"""Raised for bytes that contradict each other; the last two by torch."""
_BEGIN = b"PK\x03\x04"
"""Anything else torch takes for a file of an older version, which has several pickles."""
_REFUSED = re.compile(
    r"(?:WeightsUnpickler error:\s*|trusted source\.\n\s*\n)(.*?)(?:\. |$)", re.MULTILINE
)


def object_in(content: io.BytesIO, name: str, *, path: str, trust: bool, hint: str) -> Any:
    """The object in an archive of ``torch.save``.

    With ``trust`` it may be of any class, which can run code; otherwise of those that
    ``weights_only`` allows; ``UntrustedObjectError``, with ``hint``, if it is of another class.
    ``DamagedCheckpointError`` if its bytes are damaged; ``ReadError`` if it needs something that
    this environment does not have.
    """
    what = f"cannot load the object {name!r}"
    try:
        if not trust:
            return loaded_safely(content)
        return torch.load(content, map_location="cpu", weights_only=False)
    except MemoryError:
        raise
    except Exception as error:  # a pickle can raise anything
        if not trust and isinstance(error, pickle.UnpicklingError):
            why = f"{what}: {reason_of(error)}"
            raise UntrustedObjectError(why, phase="read", path=path, hint=hint) from error
        raise unloadable(what, error, content, path=path) from error


def unloadable(
    what: str, error: Exception, archive: BinaryIO, *, path: str, damage_hint: str | None = None
) -> DamagedCheckpointError | ReadError:
    """The error for an archive that cannot be loaded: damage only if its bytes are the reason."""
    why = f"{what}: {type(error).__name__}: {reason_of(error)}"
    if isinstance(error, _OF_BYTES) or is_to_blame(archive, error):
        return DamagedCheckpointError(why, phase="read", path=path, hint=damage_hint)
    return ReadError(why, phase="read", path=path, hint=_ENVIRONMENT_HINT)


def loaded_safely(archive: BinaryIO) -> Any:
    """The object that ``torch.load(weights_only=True)`` makes of an archive.

    Raises :class:`Broken` for another file, or if its records are compressed, or longer than itself
    because they are used several times, and anything for a damaged archive.
    """
    nbytes = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    if archive.read(len(_BEGIN)) != _BEGIN:
        raise Broken("not an archive of torch.save")
    with zipfile.ZipFile(archive) as records:
        entries = records.infolist()
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > nbytes:
        raise Broken("its records are compressed, or longer than the archive")
    archive.seek(0)
    return torch.load(archive, map_location="cpu", weights_only=True)


def reason_of(error: Exception) -> str:
    """The message of ``torch.load`` in one line, or the class that ``weights_only`` refuses."""
    refused = _REFUSED.search(str(error))
    said = refused[1] if refused else str(error).partition("\n")[0]
    return f"{said or type(error).__name__:.200}"
