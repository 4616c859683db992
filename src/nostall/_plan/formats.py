"""The two formats of shard files, as arithmetic over bytes, names, dtypes and shapes.

``torch.save`` writes one tensor as a container, a zip archive of stored (uncompressed) records in
this order::

    data.pkl  .format_version  .storage_alignment  byteorder  data/0  version
    .data/serialization_id  | directory

``data/0`` is the raw payload. ``torch.serialization.skip_data`` produces all other records, in the
form of the installed torch. Only three values are computed here, because they depend on the
payload:

* its CRC-32, in the data descriptor after the payload and in the central directory;
* the last 20 digits of the identifier record: ``h = h ^ (crc + 0x9e3779b9 + (h << 6) + (h >> 2))``,
  unsigned 64-bit from 0, over the CRCs of all non-empty records before it in file order (PyTorch's
  ``inline_container.cc``);
* the CRC-32 of that identifier record, in its own descriptor and directory entry.

All of them lie after the payload, so a file can be sealed while it is written from front to back.

A file of safetensors is an unsigned 64-bit length, little endian; a header of that length in JSON;
and the bytes of the tensors, in row-major order, one after the other without gaps
(https://huggingface.co/docs/safetensors/index#format). As the package ``safetensors`` does it:

* tensors lie in the order of their dtypes, the last of :data:`DTYPES` first, then in that of their
  names in UTF-8. So each lies at a multiple of its element size;
* the header ends with spaces, up to a multiple of 8.

``__metadata__`` has what DCP's writer puts there: where each tensor begins in the one that it is a
part of, under the key with which DCP's Hugging Face reader looks for it.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nostall._model.checksum import ID_DIGITS, combine_hash
from nostall._model.jobs import Seal
from nostall._model.names import counted
from nostall._model.values import Container, TensorEntry
from nostall.errors import NostallError

# --- containers of ``torch.save`` -----------------------------------------------------------------

_LOCAL_HEADER_NBYTES = 30
_DIRECTORY_ENTRY_NBYTES = 46
_LENGTHS = struct.Struct("<2H")
"""Lengths of name and extra field, at the end of a local header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: str
    nbytes: int
    crc32: int
    data_at: int
    directory_crc_at: int

    @property
    def descriptor_crc_at(self) -> int:
        return self.data_at + self.nbytes + 4


def with_seal(container: Container, *, checksums: bool) -> Container:
    """A container that knows which of its bytes depend on its payload.

    ``checksums`` is false if torch is configured to leave CRCs at zero. ``NostallError`` if it is
    not of the known form.
    """
    prefix, payload_nbytes, suffix = container.prefix, container.payload_nbytes, container.suffix
    if not checksums or not payload_nbytes:
        return container
    records = list(_records(container))
    payload = next(i for i, r in enumerate(records) if r.name.endswith("/data/0"))
    identifier = records[-1]
    if (
        not identifier.name.endswith("/.data/serialization_id")
        or identifier.nbytes != 2 * ID_DIGITS
    ):
        raise NostallError(
            "torch.save's container has no serialization_id record at its end",
            phase="plan",
            hint="this torch is newer than this nostall; please report it",
        )
    if records[payload].data_at != len(prefix):
        raise NostallError(
            "the directory of torch.save's container has a wrong offset for the payload",
            phase="plan",
            hint="torch cannot read such a file either; use a storage_alignment of at most 65536",
        )
    before = 0
    for record in records[:payload]:
        before = combine_hash(before, record.crc32) if record.nbytes else before
    id_in_suffix = identifier.data_at - len(prefix) - payload_nbytes
    seal = Seal(
        payload_crc_at=(records[payload].descriptor_crc_at, records[payload].directory_crc_at),
        hash_before=before,
        crcs_after=tuple(r.crc32 for r in records[payload + 1 : -1] if r.nbytes),
        id_at=identifier.data_at,
        id_names=suffix[id_in_suffix : id_in_suffix + ID_DIGITS],
        id_crc_at=(identifier.descriptor_crc_at, identifier.directory_crc_at),
    )
    return replace(container, seal=seal)


class _WithoutPayload(io.BytesIO):
    """A container to read from; nobody reads its payload, which is not known."""

    def __init__(self, container: Container) -> None:
        super().__init__(container.prefix + container.suffix)
        self._payload_at = len(container.prefix)
        self._payload_nbytes = container.payload_nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset > self._payload_at:
            offset -= self._payload_nbytes
        super().seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        at = super().tell()
        return at + self._payload_nbytes if at > self._payload_at else at


def _records(container: Container) -> Iterator[_Record]:
    """The archive's records in file order, from the central directory at its end."""
    with _WithoutPayload(container) as stream, zipfile.ZipFile(stream) as archive:
        at = archive.start_dir
        for entry in archive.infolist():
            stream.seek(entry.header_offset + _LOCAL_HEADER_NBYTES - _LENGTHS.size)
            name_and_extra = _LENGTHS.unpack(stream.read(_LENGTHS.size))
            yield _Record(
                name=entry.filename,
                nbytes=entry.file_size,
                crc32=entry.CRC,
                data_at=entry.header_offset + _LOCAL_HEADER_NBYTES + sum(name_and_extra),
                directory_crc_at=at + 16,
            )
            at += _DIRECTORY_ENTRY_NBYTES + len(entry.filename) + len(entry.extra)
            at += len(entry.comment)


# --- files of safetensors -------------------------------------------------------------------------

DTYPES = {
    "bool": "BOOL",
    "float4_e2m1fn_x2": "F4",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The format's names of torch's dtypes, in the order of ``enum Dtype`` in
https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs. Checked against
safetensors 0.8.0, whose other dtypes, of six bits, torch does not have."""
_RESERVED = "__metadata__"
"""Not a name for a tensor."""
_RANKS = {name: rank for rank, name in enumerate(DTYPES.values())}
_ALIGNMENT = 8
_MOST_NBYTES = 100_000_000
"""The package reads no longer header."""


def entry_of(
    name: Any, dtype: str, shape: Sequence[int], offsets: Sequence[int]
) -> TensorEntry | None:
    """The entry of a tensor; ``None`` if the format has no such dtype or name.

    ``name`` may be of any type, if the planner does not flatten. ``dtype`` is torch's name without
    ``torch.``; ``offsets`` is where the tensor begins in the one that it is a part of.
    """
    named = DTYPES.get(dtype)
    if named is None or type(name) is not str or name == _RESERVED:
        return None
    try:
        name.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return None
    sizes = tuple(shape)
    if named == "F4":  # of which torch counts pairs
        if not sizes:
            return None
        sizes = (*sizes[:-1], 2 * sizes[-1])
    return TensorEntry(name=name, dtype=named, shape=sizes, offsets=tuple(offsets))


def order_of(entry: TensorEntry) -> tuple[int, str]:
    """Sorts the tensors of a file."""
    return -_RANKS[entry.dtype], entry.name


def header_of(tensors: Sequence[tuple[TensorEntry, int]]) -> bytes:
    """The bytes before the first tensor, for entries and payload lengths in plan order.

    ``NostallError`` if there are too many tensors for one file.
    """
    parts = {each.name: {"saved_offsets": each.offsets} for each, _ in tensors}
    header: dict[str, Any] = {
        _RESERVED: {
            "DCP_SHARDING_INFO": json.dumps(parts),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    at = 0
    for entry, nbytes in sorted(tensors, key=lambda each: order_of(each[0])):
        end = at + nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MOST_NBYTES:
        raise NostallError(
            f"the header of a file with {counted(len(tensors), 'tensor')} has {len(text)} bytes;"
            f" safetensors reads at most {_MOST_NBYTES}",
            phase="plan",
            hint="use more files, with thread_count",
        )
    return len(text).to_bytes(8, "little") + text
