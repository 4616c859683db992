"""A rank's write results, as columns where they have the usual form.

A result of DCP's has fifteen objects: its item, its place in a file, their attributes. As columns
results take a fifteenth of the memory, and of the time to unpickle. So ranks send them like this,
and the coordinator keeps them like this. Results of an unusual form stay as they are.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from nostall import _torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumns:
    """Columns with an entry per result, and what results have in common."""

    names: list[str]
    begins: Sequence[torch.Size | None]
    """Offsets of chunks in their tensors, without duplicates; ``None`` for an object."""
    begin_of: array[int]
    """Positions in ``begins``."""
    hints: list[Any]
    """``MetadataIndex.index`` of each."""
    files: Sequence[str]
    """Names, without duplicates."""
    file_of: array[int]
    """Positions in ``files``."""
    offsets: array[int]
    """In the file."""
    lengths: array[int]
    """In the file, in bytes."""
    transforms: tuple[str, ...] | None
    """DCP's names of the stream transforms, which all items have in common."""

    def renamed(self, names: Mapping[str, str]) -> ResultColumns:
        """These results under the present names of files, given by the earlier ones."""
        return replace(self, files=[names[name] for name in self.files])

    def places(self, known: dict[Any, Any]) -> Iterator[tuple[MetadataIndex, Any]]:
        """Each item, and its place as an object of DCP's.

        ``known`` maps names and offsets to themselves; equal ones become one object.
        """
        new, begins = object.__new__, [known.setdefault(each, each) for each in self.begins]
        for name, begin, hint, file, offset, length in zip(
            map(known.setdefault, self.names, self.names),
            map(begins.__getitem__, self.begin_of),
            self.hints,
            map(self.files.__getitem__, self.file_of),
            self.offsets,
            self.lengths,
            strict=True,
        ):
            # In half of the time that the constructors take.
            key, place = new(MetadataIndex), new(_torch.StorageInfo)
            vars(key).update(fqn=name, index=hint)
            if begin is not None:
                vars(key)["offset"] = begin
            vars(place).update(relative_path=file, offset=offset, length=length)
            if self.transforms is not None:
                vars(place)["transform_descriptors"] = list(self.transforms)
            yield key, place


RankResults: TypeAlias = ResultColumns | list[WriteResult]
"""The results of a rank, as columns if they have the usual form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A rank's write results, in full."""

    items: RankResults
    files: tuple[str, ...]
    token: str | None
    """Identifies results that a later save may refer to."""


class ResultsReference(NamedTuple):
    """A reference to write results that the coordinator received before, under this token."""

    token: str
    files: tuple[str, ...]
    """The present names of the files, in the order of the first report."""


OF_RESULTS = (Results, ResultsReference)  # made once: there are thousands of ranks
RankOutcome: TypeAlias = Results | ResultsReference | _torch.WrappedException
"""A rank's report of its part of a save."""


def token_of(outcome: RankOutcome) -> str | None:
    """The token of these results, if a later save may refer to them."""
    return outcome.token if isinstance(outcome, OF_RESULTS) else None


def columns_of(places: Iterable[tuple[Any, Any]]) -> ResultColumns | None:
    """Items and their places as columns; ``None`` if something would be lost.

    ``KeyError`` if a part is missing; ``OverflowError`` if a number is negative or too large;
    ``TypeError`` if something has no hash, or is no number.
    """
    begins = defaultdict[Any, int](count().__next__)
    files = defaultdict[str, int](count().__next__)
    names, hints, begin_of, file_of, offsets, lengths = [], [], [], [], [], []
    are_plain, transforms = False, set()
    for index, info in places:
        if type(index) is not MetadataIndex or type(info) is not _torch.StorageInfo:
            return None
        # Instances that were unpickled do not have what is None.
        key, place = vars(index), vars(info)
        begin, named = key.get("offset"), place.get("transform_descriptors")
        if len(key) != _KEY_PARTS + (begin is not None) or (
            begin is not None and type(begin) is not torch.Size
        ):
            return None
        if len(place) != _PLACE_PARTS + ("transform_descriptors" in place):
            return None
        if named is None:
            are_plain = True
        else:
            transforms.add(tuple(named))
        names.append(key["fqn"])
        begin_of.append(begins[begin])
        hints.append(key.get("index"))
        file_of.append(files[place["relative_path"]])
        offsets.append(place["offset"])
        lengths.append(place["length"])
    numbers, texts = (
        {*map(type, offsets), *map(type, lengths)},
        {*map(type, names), *map(type, files)},
    )
    if not (numbers <= {int} and texts <= {str} and are_plain + len(transforms) <= 1):
        return None
    return ResultColumns(
        names=names,
        begins=list(begins),
        begin_of=array("I", begin_of),
        hints=hints,
        files=list(files),
        file_of=array("I", file_of),
        offsets=array("Q", offsets),
        lengths=array("Q", lengths),
        transforms=transforms.pop() if transforms else None,
    )


_KEY_PARTS = 2
_PLACE_PARTS = 3
"""Numbers of attributes that instances have, without the optional one; others would be lost."""


def in_columns(results: list[WriteResult]) -> RankResults:
    """The results as columns if nothing is lost; otherwise the argument. Never raises."""
    try:
        if any(type(each) is not WriteResult for each in results):
            return results
        columns = columns_of((each.index, each.storage_data) for each in results)
        if columns is None or list(columns.lengths) != [each.size_in_bytes for each in results]:
            return results
    except Exception:  # of any kind: a planner of a user's may make any items
        return results
    return columns


Places: TypeAlias = ResultColumns | Mapping[MetadataIndex, Any]
"""Items and their places in files."""


def renamed(places: Places, names: Mapping[str, str]) -> Places:
    """Places under the present names of files, given by the earlier ones."""
    if isinstance(places, ResultColumns):
        return places.renamed(names)
    return {
        index: replace(info, relative_path=names[info.relative_path])
        for index, info in places.items()
    }


def made(parts: Iterable[Places], known: dict[Any, Any]) -> dict[MetadataIndex, Any]:
    """A dictionary of the places of all ranks; columns become new objects, which share what
    ``known`` has (see :meth:`ResultColumns.places`).
    """
    places = dict[MetadataIndex, Any]()
    for part in parts:
        places.update(part.places(known) if isinstance(part, ResultColumns) else part)
    return places


class StorageData(MutableMapping[MetadataIndex, Any]):
    """``Metadata.storage_data`` of all ranks; it has objects from when somebody looks at one."""

    def __init__(self, parts: Sequence[Places]) -> None:
        self.parts = parts

    @cached_property
    def in_full(self) -> dict[MetadataIndex, Any]:
        """All places as one dictionary, which later changes change."""
        return made(self.parts, {})

    def copy(self) -> dict[MetadataIndex, Any]:
        """A plain dictionary."""
        return dict(self.in_full)

    def __getitem__(self, index: MetadataIndex) -> Any:
        return self.in_full[index]

    def __setitem__(self, index: MetadataIndex, place: Any) -> None:
        self.in_full[index] = place

    def __delitem__(self, index: MetadataIndex) -> None:
        del self.in_full[index]

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self.in_full)

    def __len__(self) -> int:
        return len(self.in_full)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.in_full,)


def parts_of(places: Mapping[MetadataIndex, Any]) -> Sequence[Places]:
    """The places of ranks as they are now; in one part if somebody may have changed them."""
    if isinstance(places, StorageData) and "in_full" not in vars(places):
        return places.parts
    return [places]
