"""The metadata of a finished save as a pickle, reusable by later saves of the same structure.

A pickle is a program for a stack machine. This one makes the metadata object and sets all its
attributes but ``storage_meta``, which each save appends. Protocol 3, because later protocols divide
the program into frames with a length.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from nostall import _torch
from nostall._commit.index.indexing import indexed
from nostall._commit.index.writing import WrittenIndex
from nostall._commit.local_plans import LocalPlans
from nostall._commit.metadata import PLANS_KEY
from nostall._commit.result_columns import Places, RankResults, StorageData, places_of
from nostall._model import checksum
from nostall._model.collection import no_collection
from nostall._model.names import FileFormat

_log = logging.getLogger("nostall")

PROTOCOL = 3
PROTO_NBYTES = 2
_SUFFIXES = re.compile("|".join(re.escape(each.value) for each in FileFormat).encode())


def complete_metadata(metadata: Metadata, results: Sequence[RankResults]) -> Metadata:
    """The metadata of a finished save without ``storage_meta``; the argument is not changed."""
    finished = copy(metadata)
    finished.version = _torch.DCP_VERSION
    finished.storage_data = StorageData(list(map(places_of, results)))
    return finished


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Pickled metadata of a finished save without ``storage_meta``; reusable by equal saves."""

    program: tuple[bytes, ...]
    """The pickle, in pieces, without its STOP instruction."""
    storage_data: StorageData
    files: frozenset[str]
    """Names of the shard files."""
    is_renamable: bool
    """Whether no item is named like a file; otherwise the pickle may have one text for both."""
    index: WrittenIndex | None
    """Of the items; ``None`` if it cannot represent all that the metadata says."""

    @cached_property
    def nbytes(self) -> int:
        """Length of the program."""
        return sum(map(len, self.program))

    @cached_property
    def crc32(self) -> int:
        """CRC-32 of the program."""
        return reduce(lambda crc32, piece: checksum.crc32(piece, crc32), self.program, 0)

    def content(self, storage_meta: StorageMeta | None) -> tuple[bytes, ...]:
        """The content of a ``.metadata`` file, in pieces: joining costs more than writing them."""
        return (*self.program, end_of_program(storage_meta))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies have bytes of their own."""
        copied = partial(
            _with_places,
            self.storage_data.parts,
            program=(b"".join(self.program),),
            files=self.files,
            is_renamable=self.is_renamable,
            index=self.index,
        )
        return copied, ()

    def renamed(self, names: Mapping[str, str]) -> Publication | None:
        """The same with other names of shard files; ``None`` if names in the pickle are ambiguous.

        Args:
            names: The present name of each file.
        """
        if all(old == new for old, new in names.items()):
            return self
        if self._cut is None:
            return None
        cut = [names[piece] if isinstance(piece, str) else piece for piece in self._cut]
        renamed = Publication(
            program=tuple(_pickled(each) if isinstance(each, str) else each for each in cut),
            storage_data=self.storage_data.renamed(names),
            files=frozenset(names.values()),
            is_renamable=self.is_renamable,
            index=None if self.index is None else self.index.renamed(names),
        )
        vars(renamed)["_cut"] = cut  # saves another search
        return renamed

    @cached_property
    def _cut(self) -> list[bytes | str] | None:
        """The program, with file names as separate texts: each occurs once, as pickle memoizes."""
        # An fqn that is the same object as a file name would be pickled as a reference to it. Names
        # are made by the layout, so other texts are other objects.
        if not self.is_renamable:
            return None
        program = b"".join(self.program)
        names = {_pickled(name): name for name in self.files}
        lengths = {len(pickled) for pickled in names}
        pieces: list[bytes | str] = []
        done = 0
        # All names have one of these suffixes; searching for each of them would be too slow.
        for found in _SUFFIXES.finditer(program):
            end = found.end()
            for begin in (max(0, end - length) for length in lengths):
                name = names.get(program[begin:end])
                if name is not None:
                    pieces += [program[done:begin], name]
                    done = end
        seen = [each for each in pieces if isinstance(each, str)]
        if sorted(seen) != sorted(self.files):
            return None
        return [*pieces, program[done:]]


def _with_places(parts: Sequence[Places], **others: Any) -> Publication:
    """A publication; by itself, what has its places is pickled as a dictionary."""
    return Publication(storage_data=StorageData(parts), **others)


def program_of(metadata: Metadata) -> bytes:
    """Pickled metadata without ``storage_meta``, and without the STOP instruction.

    Equal sizes are pickled once; the chunks of the argument come to share them.
    """
    twin = _to_pickle(metadata)
    known: dict[Any, Any] = {name: name for name in twin.state_dict_metadata if type(name) is str}
    for entry in twin.state_dict_metadata.values():
        if type(entry) is TensorStorageMetadata:
            for chunk in entry.chunks:
                if type(chunk) is ChunkStorageMetadata:
                    _share_sizes(chunk, known)
    places = twin.storage_data
    if isinstance(places, StorageData):
        is_changed = "in_full" in vars(places)
        twin.storage_data = places.in_full if is_changed else places.made(known)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCED}
    pickler.dump(twin)
    return stream.getvalue()[: -len(pickle.STOP)]


def _share_sizes(chunk: ChunkStorageMetadata, known: dict[Any, Any]) -> None:
    offsets, sizes = chunk.offsets, chunk.sizes
    if type(offsets) is type(sizes) is torch.Size:
        chunk.offsets = known.setdefault(offsets, offsets)
        chunk.sizes = known.setdefault(sizes, sizes)


def _reduced(cls: type, state_of: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    made = (cls,)
    return lambda instance: (copyreg.__newobj__, made, state_of(instance))  # type: ignore[attr-defined]  # what object.__reduce_ex__ returns


_REDUCED = {
    ChunkStorageMetadata: _reduced(ChunkStorageMetadata, vars),
    MetadataIndex: _reduced(MetadataIndex, vars),
    _torch.StorageInfo: _reduced(
        _torch.StorageInfo, getattr(_torch.StorageInfo, "__getstate__", vars)
    ),
}
"""Reducers of the most frequent classes; ``object.__reduce_ex__`` takes three times as long."""


def _to_pickle(metadata: Metadata) -> Metadata:
    """The metadata without ``storage_meta``, and with all local plans in the planner data."""
    plans = getattr(metadata, "all_local_plans", None)
    twin = copy(metadata)
    if isinstance(plans, LocalPlans | list):
        vars(twin).pop("all_local_plans")
        if isinstance(metadata.planner_data, Mapping):
            twin.planner_data = {**metadata.planner_data, PLANS_KEY: LocalPlans.of(plans).plain}
        else:
            vars(twin)["all_local_plans"] = list(plans)
    vars(twin).pop("storage_meta", None)
    return twin


def end_of_program(storage_meta: StorageMeta | None) -> bytes:
    """What makes a pickle of the result of :func:`program_of`."""
    rest = pickle.dumps({"storage_meta": storage_meta}, protocol=PROTOCOL)
    return rest[PROTO_NBYTES:-1] + pickle.BUILD + pickle.STOP


def _pickled(text: str) -> bytes:
    """The first occurrence of a text in a pickle of protocol 3."""
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


@no_collection()
def publication_of(finished: Metadata) -> Publication:
    """The publication of a finished save's metadata."""
    found, places = indexed(finished), finished.storage_data
    if not isinstance(places, StorageData):
        places = StorageData([places])
    if found is None:
        names = {index.fqn for index in places}
        files = {info.relative_path for info in places.values()}
    else:
        names, files = set(found.index.names), set(found.index.files)
    return Publication(
        program=(program_of(finished),),
        storage_data=places,
        files=frozenset(files),
        is_renamable=files.isdisjoint(names),
        index=None if found is None else found.written,
    )
