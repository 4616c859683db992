r"""The manifest of a checkpoint: sizes and checksums of its files, behind its pickled metadata.

Readers of a pickle stop at its STOP instruction. One line of JSON follows, and a footer with the
length and checksum of that line, so that both are found from the end of the file::

    <pickle><index>\n
    {"files": [{"crc32": "89abcdef", "name": "__0_0.distcp", "nbytes": 1073741824}], ...}\n
    #nostall-manifest 000000000187 01234567\n

Before the line there may be an index of the items (``index``), whose length and checksum the
manifest has. All of it is part of the metadata file: the same rename publishes it, and it needs no
fsync of its own. Nothing here imports torch or trusts its input.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, BinaryIO

from nostall._commit.index import MARK, IndexBytes
from nostall._model import checksum
from nostall._model.jobs import MOST_NBYTES
from nostall._model.names import is_shard_name
from nostall._model.values import WrittenFile
from nostall._version import __version__
from nostall.errors import DamagedCheckpointError

_FORMAT = 1
_FOOTER = re.compile(rb"#nostall-manifest (\d{12}) ([0-9a-f]{8})\n\Z")
_FOOTER_NBYTES = len(b"#nostall-manifest 000000000000 00000000\n")
_CRC32 = re.compile(r"[0-9a-f]{8}")
_MARKS = (MARK, b'\n{"committed_at":', b"\n#nostall-manifest ")
"""One of them remains if the end of a file is truncated, or damaged in one place."""
_NO_END = "the end of the file is damaged, or a part of the manifest is missing"
_MOST_LINE_NBYTES = 1 << 30
"""Room for millions of files."""
_MOST_INDEX_NBYTES = 2 << 30
"""Room for millions of items: some hundred bytes each."""
_PIECE_NBYTES = 8 << 20
DAMAGED_HINT = "load another checkpoint; `nostall latest ROOT` prints the last complete one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of a checkpoint."""

    files: tuple[WrittenFile, ...]
    """All shard files of all ranks."""
    metadata_nbytes: int
    """Length of the pickle."""
    metadata_crc32: int
    committed_at_s: float
    """Seconds since the epoch, by the coordinator's clock, just before publishing."""
    version: str
    """Version of the nostall that wrote it."""
    index_nbytes: int
    """Length of the index between the pickle and the manifest; 0 if there is none."""
    index_crc32: int


def with_manifest(
    metadata: Sequence[bytes],
    files: Sequence[WrittenFile],
    *,
    crc32: int,
    committed_at_s: float,
    index: IndexBytes | None = None,
) -> tuple[bytes, ...]:
    """The content of a ``.metadata`` file, in pieces: pickle, index and manifest.

    ``metadata`` is the pickle, ``crc32`` its checksum; ``files`` are all shard files of all ranks.
    """
    plain: dict[str, Any] = {
        "format": _FORMAT,
        "nostall": __version__,
        "committed_at": committed_at_s,
        "metadata": {"nbytes": sum(map(len, metadata)), "crc32": f"{crc32:08x}"},
        "files": [],
    }
    pieces: tuple[bytes, ...] = ()
    if index is not None:
        pieces = index.body, index.tables
        nbytes = sum(map(len, pieces))
        plain["index"] = {"nbytes": nbytes, "crc32": f"{index.crc32:08x}"}
    entries = []
    for file in files:  # there may be tens of thousands: json.dumps takes four times as long
        crc32_of_file = "null" if file.crc32 is None else f'"{file.crc32:08x}"'
        name = encode_basestring_ascii(file.name)
        entries.append(f'{{"crc32":{crc32_of_file},"name":{name},"nbytes":{file.nbytes}}}')
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    line = text.replace('"files":[]', f'"files":[{",".join(entries)}]').encode() + b"\n"
    footer = f"#nostall-manifest {len(line):012d} {checksum.crc32(line):08x}\n".encode()
    return (*metadata, *pieces, b"\n" + line + footer)


def manifest_alone(stream: BinaryIO) -> Manifest | None:
    """The manifest of a ``.metadata`` file, without reading the pickle; ``None`` if not intact."""
    try:
        found = _find(stream, path="")
    except DamagedCheckpointError:
        return None
    return None if found is None else found[0]


def index_alone(stream: BinaryIO, *, path: str) -> tuple[bytes, Manifest] | None:
    """The bytes of the index, and the manifest, without the pickle; ``None`` if there is none.
    ``DamagedCheckpointError`` if the index or the manifest fails its checksum.
    """
    found = _find(stream, path=path)
    if found is None or not found[0].index_nbytes:
        return None
    manifest, begin = found
    nbytes = manifest.index_nbytes
    if manifest.metadata_nbytes + nbytes + 1 == begin and nbytes <= _MOST_INDEX_NBYTES:
        content = _read_at(stream, manifest.metadata_nbytes, nbytes)
        if len(content) == nbytes and checksum.crc32(content) == manifest.index_crc32:
            return content, manifest
    raise _damaged("the index does not match the checksum in its manifest", path)


def manifest_of(stream: BinaryIO, *, path: str) -> Manifest | None:
    """The manifest of a ``.metadata`` file, after checking pickle and index; ``None`` without one.

    They are read in pieces, in constant memory. ``DamagedCheckpointError`` if the end of the file
    is damaged, or the pickle or the index fails its checksum.
    """
    found = _find(stream, path=path)
    if found is None:
        end = stream.seek(0, os.SEEK_END)
        if _read_at(stream, end - 1, 1) != pickle.STOP:
            raise _damaged(_NO_END if end else "the file is empty", path)
        return None
    manifest, begin = found
    stream.seek(0)
    if (
        begin - 1 != manifest.metadata_nbytes + manifest.index_nbytes
        or _crc32_of_next(stream, manifest.metadata_nbytes) != manifest.metadata_crc32
        or _crc32_of_next(stream, manifest.index_nbytes) != manifest.index_crc32
        or stream.read(1) != b"\n"
    ):
        raise _damaged("the metadata does not match the checksum in its manifest", path)
    return manifest


def split(content: bytes, *, path: str) -> tuple[bytes, Manifest | None]:
    """The pickle in a ``.metadata`` file, and the manifest after it; ``None`` if there is none.

    ``DamagedCheckpointError`` if the end of the file is damaged, or the manifest, the pickle or the
    index fails its checksum.
    """
    manifest = manifest_of(io.BytesIO(content), path=path)
    if manifest is not None:
        return content[: manifest.metadata_nbytes], manifest
    if any(mark in content for mark in _MARKS):
        raise _damaged(_NO_END, path)
    return content, None


def _find(stream: BinaryIO, *, path: str) -> tuple[Manifest, int] | None:
    """The manifest at the end of a file, and the offset of its line."""
    end = stream.seek(0, os.SEEK_END) - _FOOTER_NBYTES
    footer = _FOOTER.match(_read_at(stream, end, _FOOTER_NBYTES))
    if footer is None:
        return None
    nbytes = int(footer[1])
    line = _read_at(stream, end - nbytes, nbytes) if nbytes <= _MOST_LINE_NBYTES else b""
    if len(line) != nbytes or checksum.crc32(line) != int(footer[2], 16):
        raise _damaged("the manifest does not match its checksum", path)
    return _parsed(line, path), end - nbytes


def _read_at(stream: BinaryIO, begin: int, nbytes: int) -> bytes:
    """The bytes at an offset; empty if the offset is negative."""
    if begin < 0:
        return b""
    stream.seek(begin)
    return stream.read(nbytes)


def _crc32_of_next(stream: BinaryIO, nbytes: int) -> int:
    """The CRC-32 of the next bytes of a file; leaves the stream after them."""
    crc32 = 0
    while nbytes > 0 and (piece := stream.read(min(nbytes, _PIECE_NBYTES))):
        crc32 = checksum.crc32(piece, crc32)
        nbytes -= len(piece)
    return crc32


def _parsed(line: bytes, path: str) -> Manifest:
    try:
        plain: Any = json.loads(line.decode(), object_pairs_hook=_without_duplicates)
        if plain["format"] != _FORMAT:
            raise ValueError(f"unknown format {plain['format']!r}")
        files = tuple(
            WrittenFile(
                name=_shard_name(file["name"]),
                nbytes=_nbytes(file["nbytes"]),
                crc32=None if file["crc32"] is None else _crc32(file["crc32"]),
            )
            for file in plain["files"]
        )
        if len({file.name for file in files}) != len(files):
            raise ValueError("duplicate file")
        index = plain.get("index", {"nbytes": 0, "crc32": "00000000"})
        return Manifest(
            files=files,
            metadata_nbytes=_nbytes(plain["metadata"]["nbytes"]),
            metadata_crc32=_crc32(plain["metadata"]["crc32"]),
            committed_at_s=_finite(plain["committed_at"]),
            version=_checked(plain["nostall"], str),
            index_nbytes=_nbytes(index["nbytes"]),
            index_crc32=_crc32(index["crc32"]),
        )
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(f"the manifest cannot be read: {error!r:.200}", path) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("duplicate entry")
    return plain


def _nbytes(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_NBYTES:
        raise ValueError("invalid length")
    return value


def _crc32(value: Any) -> int:
    if not _CRC32.fullmatch(_checked(value, str)):
        raise ValueError("invalid checksum")
    return int(value, 16)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _shard_name(value: Any) -> str:
    name: str = os.path.normpath(_checked(value, str))
    if not is_shard_name(name):
        raise ValueError(f"{value!r} is not the name of a shard file")
    return name


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a time")
    return number


def _damaged(why: str, path: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(why, phase="verify", path=path, hint=DAMAGED_HINT)
