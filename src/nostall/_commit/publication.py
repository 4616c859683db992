"""The metadata of a finished save as a pickle, reusable by later saves of the same structure.

A pickle is a program for a stack machine. This one makes the metadata object and sets all its
attributes but ``storage_meta``, which each save appends. Protocol 3, because later protocols divide
the program into frames with a length.

:class:`KnownResults` has the results of ranks, too: they are not sent or pickled again. File names
may change from save to save; they are sent with each save.
"""

from __future__ import annotations

import copyreg
import io
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, reduce
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
from nostall._commit.columns import (
    OF_RESULTS,
    LocalPlans,
    RankOutcome,
    RankPlaces,
    ResultColumns,
    Results,
    ResultsReference,
    StorageData,
    made,
    parts_of,
    renamed_places,
    token_of,
)
from nostall._commit.index import IndexBytes
from nostall._commit.indexing import indexed
from nostall._commit.metadata import PLANS_KEY
from nostall._model import checksum
from nostall._model.names import FileFormat
from nostall._model.threads import gc_paused
from nostall.errors import SaveError

_log = logging.getLogger("nostall")

PROTOCOL = 3
PROTO_NBYTES = 2
_SUFFIXES = re.compile("|".join(re.escape(each.value) for each in FileFormat).encode())


# --- the metadata of one save ---------------------------------------------------------------------


def complete_metadata(metadata: Metadata, results: Sequence[RankPlaces]) -> Metadata:
    """The metadata of a finished save without ``storage_meta``; the argument is not changed."""
    finished = copy(metadata)
    finished.version = _torch.DCP_VERSION
    finished.storage_data = StorageData(results)
    return finished


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Pickled metadata of a finished save without ``storage_meta``; reusable by equal saves."""

    program: tuple[bytes, ...]
    """The pickle, in pieces, without its STOP instruction."""
    places: tuple[RankPlaces, ...]
    """Where the items of each rank are."""
    files: frozenset[str]
    """Names of the shard files."""
    is_renamable: bool
    """Whether no item is named like a file; otherwise the pickle may have one text for both."""
    index: IndexBytes | None
    """The index of the items; ``None`` if it cannot represent all that the metadata says."""

    @property
    def storage_data(self) -> StorageData:
        """``Metadata.storage_data``, for somebody who may change it."""
        return StorageData(self.places)

    @cached_property
    def crc32(self) -> int:
        """CRC-32 of the program."""
        return reduce(lambda crc32, piece: checksum.crc32(piece, crc32), self.program, 0)

    def content(self, storage_meta: StorageMeta | None) -> tuple[bytes, ...]:
        """The content of a ``.metadata`` file, in pieces: joining costs more than writing them."""
        rest = pickle.dumps({"storage_meta": storage_meta}, protocol=PROTOCOL)
        return (*self.program, rest[PROTO_NBYTES:-1] + pickle.BUILD + pickle.STOP)

    def renamed(self, names: Mapping[str, str]) -> Publication | None:
        """A copy with new names by old names of files; ``None`` if the pickle is ambiguous."""
        if all(old == new for old, new in names.items()):
            return self
        if self._cut is None:
            return None
        cut = [names[piece] if isinstance(piece, str) else piece for piece in self._cut]
        publication = Publication(
            program=tuple(_pickled(each) if isinstance(each, str) else each for each in cut),
            places=tuple(renamed_places(part, names) for part in self.places),
            files=frozenset(names.values()),
            is_renamable=self.is_renamable,
            index=None if self.index is None else self.index.renamed(names),
        )
        vars(publication)["_cut"] = cut  # saves another search
        return publication

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


@gc_paused()
def publication_of(finished: Metadata) -> Publication:
    """The publication of a finished save's metadata.

    All local plans are in the planner data of its pickle. Equal sizes are pickled once; the chunks
    of the argument come to share them.
    """
    index, places = indexed(finished), tuple(parts_of(finished.storage_data))
    if index is None:
        names = {each.fqn for each in finished.storage_data}
        files = {each.relative_path for each in finished.storage_data.values()}
    else:
        names, files = set(finished.state_dict_metadata), set(index.files)
    twin, plans = copy(finished), getattr(finished, "all_local_plans", None)
    if isinstance(plans, LocalPlans | list):
        vars(twin).pop("all_local_plans")
        if isinstance(finished.planner_data, Mapping):
            twin.planner_data = {**finished.planner_data, PLANS_KEY: LocalPlans(plans).plain}
        else:
            vars(twin)["all_local_plans"] = list(plans)
    vars(twin).pop("storage_meta", None)
    memo: dict[Any, Any] = {name: name for name in twin.state_dict_metadata if type(name) is str}
    for entry in twin.state_dict_metadata.values():
        for chunk in entry.chunks if type(entry) is TensorStorageMetadata else ():
            if type(chunk) is ChunkStorageMetadata:
                offsets, sizes = chunk.offsets, chunk.sizes
                if type(offsets) is type(sizes) is torch.Size:
                    chunk.offsets = memo.setdefault(offsets, offsets)
                    chunk.sizes = memo.setdefault(sizes, sizes)
    twin.storage_data = made(places, memo)
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCED}
    pickler.dump(twin)
    return Publication(
        program=(stream.getvalue()[: -len(pickle.STOP)],),
        places=places,
        files=frozenset(files),
        is_renamable=files.isdisjoint(names),
        index=index,
    )


def _reduced(cls: type, state_of: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    made = (cls,)
    return lambda instance: (copyreg.__newobj__, made, state_of(instance))  # type: ignore[attr-defined]  # what object.__reduce_ex__ returns


_REDUCED = {
    ChunkStorageMetadata: _reduced(ChunkStorageMetadata, vars),
    MetadataIndex: _reduced(MetadataIndex, vars),
    _torch.StorageInfo: _reduced(_torch.StorageInfo, _torch.StorageInfo.__getstate__),
}
"""Reducers of the most frequent classes; ``object.__reduce_ex__`` takes three times as long."""


def _pickled(text: str) -> bytes:
    """The first occurrence of a text in a pickle of protocol 3."""
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded


# --- what the coordinator knows of earlier saves --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """The last publication, with its results and its planned metadata."""

    tokens: list[str]
    attributes: dict[str, Any]
    files: list[str]
    publication: Publication


class KnownResults:
    """The coordinator's memory of the last save."""

    def __init__(self) -> None:
        self._of_rank: dict[int, Results] = {}
        self._published: _Published | None = None

    def token(self, rank: int) -> str | None:
        """The token of a rank's results, if they are kept."""
        kept = self._of_rank.get(rank)
        return None if kept is None else kept.token

    def fill_in(
        self, outcomes: Sequence[RankOutcome]
    ) -> list[RankPlaces | _torch.WrappedException]:
        """All ranks' results or failures; results with a token are kept.

        A reference becomes the kept results, with the earlier file names; see
        :meth:`under_new_names`.
        """
        everyone: list[RankPlaces | _torch.WrappedException] = []
        before: ResultColumns | None = None
        for rank, each in enumerate(outcomes):
            match each:
                case ResultsReference(token=token):  # first, as all are in the steady state
                    kept = self._of_rank.get(rank)
                    if kept is None or kept.token != token:
                        everyone.append(_unknown(rank))
                    else:
                        everyone.append(kept.items)
                case Results(items=items, token=token):
                    if isinstance(items, ResultColumns):
                        if before is not None and before.names == items.names:
                            items = replace(items, names=before.names)  # ranks share names
                        before = items
                    if token is not None:
                        self._of_rank[rank] = replace(each, items=items)
                    everyone.append(items)
                case failure:
                    everyone.append(failure)
        return everyone

    def under_new_names(
        self, outcomes: Sequence[RankOutcome], results: Sequence[RankPlaces]
    ) -> list[RankPlaces]:
        """All ranks' results from :meth:`fill_in`, with the present file names."""
        return [
            renamed_places(items, dict(zip(self._of_rank[rank].files, each.files, strict=True)))
            if isinstance(each, ResultsReference)
            else items
            for rank, (each, items) in enumerate(zip(outcomes, results, strict=True))
        ]

    def publication(self, outcomes: Sequence[RankOutcome], planned: Metadata) -> Publication | None:
        """The last publication with new file names, if its results and metadata were the same."""
        last = self._published
        if last is None or list(map(token_of, outcomes)) != last.tokens:
            return None
        now, before = _attributes(planned), last.attributes
        # The same objects: comparing their contents costs too much.
        if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
            return None
        files = [name for each in outcomes if isinstance(each, OF_RESULTS) for name in each.files]
        publication = last.publication.renamed(dict(zip(last.files, files, strict=True)))
        if publication is not None:
            self._published = replace(last, files=files, publication=publication)
        return publication

    def note_published(
        self, outcomes: Sequence[RankOutcome], planned: Metadata, publication: Publication
    ) -> None:
        """Keep a publication, if the results of all ranks have a token."""
        tokens = [token for token in map(token_of, outcomes) if token is not None]
        if len(tokens) == len(outcomes):
            self._published = _Published(
                tokens=tokens,
                attributes=_attributes(planned),
                files=[n for each in outcomes if isinstance(each, OF_RESULTS) for n in each.files],
                publication=publication,
            )


def _unknown(rank: int) -> _torch.WrappedException:
    return _torch.wrap_exception(
        SaveError(
            "this rank refers to results of an earlier save that the coordinator does not have",
            rank=rank,
            phase="collect",
            hint="use one metadata cache per sequence of saves, in the same way on all ranks",
        )
    )


def _attributes(metadata: Metadata) -> dict[str, Any]:
    """The objects of planned metadata, by attribute."""
    return {
        name: value
        for name, value in vars(metadata).items()
        if name not in ("storage_data", "storage_meta", "version")
    }
