"""An index of items as bytes. Imports no torch."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from nostall._commit.index.columns import (
    HEADER,
    MARK,
    TRANSFORMS,
    ItemIndex,
    Properties,
)
from nostall._commit.index.parsing import parsed
from nostall._model import checksum


@dataclass(frozen=True, kw_only=True)
class WrittenIndex:
    """The bytes of an index."""

    body: bytes
    """All but the tables."""
    properties: Sequence[Properties]
    files: Sequence[str]
    ends: Sequence[int]
    """Where the last place of each file ends."""

    @cached_property
    def tables(self) -> bytes:
        """The end of the index."""
        plain = {"files": self.files, "properties": self.properties}
        return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()

    @property
    def nbytes(self) -> int:
        """Length of the index."""
        return len(self.body) + len(self.tables)

    @cached_property
    def body_crc32(self) -> int:
        """CRC-32 of all but the tables."""
        return checksum.crc32(self.body)

    @property
    def crc32(self) -> int:
        """CRC-32 of the index."""
        return checksum.crc32(self.tables, self.body_crc32)

    def fits(self, nbytes_of: Mapping[str, int]) -> bool:
        """Whether all places are in files of these lengths."""
        return all(
            end <= nbytes_of.get(name, -1) for name, end in zip(self.files, self.ends, strict=True)
        )

    def renamed(self, names: Mapping[str, str]) -> WrittenIndex:
        """The same with other file names.

        Args:
            names: The present name of each file.
        """
        renamed = replace(self, files=[names[name] for name in self.files])
        vars(renamed)["body_crc32"] = self.body_crc32
        return renamed


def written(index: ItemIndex) -> WrittenIndex:
    """The bytes of an index that its reader accepts.

    Raises:
        InvalidIndexError: Its reader would refuse it.
        OverflowError: It has a number that is negative or too large.
        UnicodeEncodeError: A name has a character that UTF-8 cannot represent.
    """
    made = encoded(index)
    parsed(made.body + made.tables, dict(zip(made.files, made.ends, strict=True)))
    return made


def encoded(index: ItemIndex) -> WrittenIndex:
    """As :func:`written`, but whatever it says."""
    names = "".join(index.names).encode()
    dimensions = [number for shape in index.shapes for number in shape]
    counts = len(index.names), len(index.file), len(index.shapes), len(dimensions), len(names)
    number = next(each for each, named in TRANSFORMS.items() if named == index.transforms)
    pieces = [
        HEADER.pack(MARK, number, *counts),
        *(_packed("Q", each) for each in (dimensions, index.offset, index.length)),
        *(
            _packed("I", each)
            for each in (
                list(map(len, index.names)),
                index.kind,
                index.size,
                index.count,
                list(map(len, index.shapes)),
                index.begin,
                index.extent,
                index.file,
            )
        ),
        names,
    ]
    ends = dict.fromkeys(range(len(index.files)), 0)
    for file, end in zip(index.file, map(add, index.offset, index.length), strict=True):
        if end > ends.get(file, 0):
            ends[file] = end
    return WrittenIndex(
        body=b"".join(pieces),
        properties=index.properties,
        files=index.files,
        ends=[ends[number] for number in range(len(index.files))],
    )


def _packed(code: str, numbers: Sequence[int]) -> bytes:
    column = array(code, numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()
