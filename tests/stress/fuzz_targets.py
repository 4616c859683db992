"""Targets: each makes its own inputs, and returns an outcome or raises what is undocumented."""

from __future__ import annotations

import codecs
import io
import json
import pickle
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

import nostall
import nostall._commit.metadata  # before inputs, which must not import anything
import nostall.cached_metadata_filesystem_reader
import nostall.integrity
from nostall._commit.index import IndexBytes
from nostall._commit.manifest import split, with_manifest
from nostall._commit.metadata import extents_of, local_plans_in
from nostall._commit.publication import publication_of
from nostall._model import checksum
from nostall._model.checksum import use_fastest
from nostall._model.values import WrittenFile
from nostall._storage.damage import ChecksumMissing, NoArchive, damage_of_container
from nostall._storage.port import PartStream
from nostall._storage.posix import PosixStorage
from nostall.errors import DamagedCheckpointError, UnknownMetadataError, UntrustedMetadataError
from nostall.integrity import State
from stress.fuzz_inputs import NUMBERS, TEXTS, VALUES, changed_bytes, changed_json, changed_program
from stress.fuzz_reads import ReadsTarget
from support.indexes import content_of, index_of


class Target(Protocol):
    """Something that reads what it has no reason to trust."""

    runs_pickles: bool
    """Whether an input may take any memory up to the limit: pickles may."""

    def make(self, chance: Random) -> bytes:
        """One input."""
        ...

    def prepare(self, content: bytes) -> None:
        """Put it where it is read from."""
        ...

    def run(self, content: bytes) -> str:
        """How that input ended, in a few words; whatever it raises is a finding."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A small checkpoint of stock's, the same every time."""

    metadata: Metadata
    shards: Mapping[str, bytes]
    pickles: tuple[bytes, ...]
    """Its metadata in all protocols stock has used, and as nostall publishes it, with plans."""

    @property
    def files(self) -> list[WrittenFile]:
        """The shards as a manifest lists them."""
        return [
            WrittenFile(name=name, nbytes=len(content), crc32=zlib.crc32(content))
            for name, content in self.shards.items()
        ]


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """Made once, by the process that starts the others, which then need to import nothing."""
    use_fastest()
    codecs.lookup("cp437")  # what zipfile reads old names with
    codecs.lookup("raw_unicode_escape")  # what pickle reads texts of protocol 0 with
    state: dict[str, Any] = {
        "weight": torch.arange(12.0).reshape(3, 4),
        "nested": {"half": torch.ones(5, dtype=torch.bfloat16), "epoch": 7},
    }
    planner = DefaultSavePlanner()
    with tempfile.TemporaryDirectory() as path:
        writer = dcp.FileSystemWriter(path, thread_count=2)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        metadata = dcp.FileSystemReader(path).read_metadata()
        shards = {file.name: file.read_bytes() for file in sorted(Path(path).glob("*.distcp"))}
    metadata.storage_meta = StorageMeta(checkpoint_id="checkpoint", save_id="save")
    pickles = [pickle.dumps(metadata, protocol) for protocol in range(2, 6)]
    planner.set_up_planner(state, is_coordinator=True)
    metadata.all_local_plans = [planner.create_local_plan()]  # type: ignore[attr-defined]  # as frameworks do
    pickles.append(b"".join(publication_of(metadata).content(metadata.storage_meta)))
    return Corpus(metadata=metadata, shards=shards, pickles=tuple(pickles))


class _OnDisk:
    """A checkpoint directory, in memory, whose files are written anew in part."""

    def __init__(self, root: str) -> None:
        self.path = Path(root) / "checkpoint"
        self.path.mkdir()
        for name, content in corpus().shards.items():
            (self.path / name).write_bytes(content)
        self.corpus = corpus()

    def write(self, name: str, content: bytes) -> None:
        (self.path / name).write_bytes(content)

    def verified(self) -> str:
        """Call the public functions, which raise only without manifest and known metadata."""
        found = nostall.verify(self.path, threads=1)
        try:
            complete = nostall.is_complete(self.path)
        except UnknownMetadataError:
            assert found.state is State.NOT_UNDERSTOOD, f"{found.state}, but is_complete() raised"
            return f"verify: not understood{_memory(found.note)}"
        assert complete or not found.ok, "verify() found nothing, is_complete() did"
        assert found.state is not State.NOT_UNDERSTOOD, "is_complete() knows more than verify()"
        if found.ok:
            return f"verify: whole{_memory(found.note)}"
        (kind, *_) = sorted(
            {"metadata" if d.file == ".metadata" else "shard" for d in found.damages}
        )
        return f"verify: damage of {kind}{_memory(*(d.what for d in found.damages))}"


def _memory(*texts: str | None) -> str:
    return next((text for text in texts if text is not None and "MemoryError" in text), "")


def _with_manifest(pickled: bytes, index: IndexBytes | None = None) -> bytes:
    facts: dict[str, Any] = {"crc32": checksum.crc32(pickled), "committed_at_s": 0.0}
    return b"".join(with_manifest([pickled], corpus().files, index=index, **facts))


class _MetadataFile:
    """A ``.metadata`` file, through ``read`` and at times through verify and is_complete."""

    runs_pickles = False

    def __init__(self, root: str) -> None:
        self._disk = _OnDisk(root)
        self._reader = nostall.CachedMetadataFileSystemReader(self._disk.path)

    def prepare(self, content: bytes) -> None:
        self._disk.write(".metadata", content)
        self._reader.clear_metadata_cache()  # the file is the same one

    def run(self, content: bytes) -> str:
        return self._disk.verified() if zlib.crc32(content) % 8 == 0 else self.read(content)

    def read(self, content: bytes) -> str:
        raise NotImplementedError


class MetadataTarget(_MetadataFile):
    """Any file, through the reader."""

    runs_pickles = True

    def make(self, chance: Random) -> bytes:
        pickles = corpus().pickles
        program = chance.choice(pickles)
        match chance.randrange(10):
            case 0 | 1:
                program = changed_bytes(program, chance, pickles)
            case 2 | 3 | 4:
                program = pickle.dumps(changed_metadata(chance), chance.randrange(2, 6))
            case _:
                program = changed_program(program, chance, pickles)
        return _with_manifest(program) if chance.random() < 0.2 else program

    def read(self, content: bytes) -> str:
        try:
            metadata = self._reader.read_metadata()
        except UntrustedMetadataError as error:
            cause = error.cause or error.__cause__
            why = type(cause).__name__ if cause else " ".join(error.message.split()[:3])
            return f"reader: {type(error).__name__}, {why}"
        local_plans_in(metadata)
        return "reader: accepted"


def changed_metadata(chance: Random) -> Metadata:
    """Metadata with parts of other kinds, in other places, of other sizes, or twice."""
    changed: Metadata = pickle.loads(corpus().pickles[3])
    infos = list(changed.storage_data.items())
    tensor: Any = changed.state_dict_metadata["weight"]
    chunk = tensor.chunks[0]
    for _ in range(chance.choice((1, 1, 2, 3))):
        (index, info), (_, elsewhere) = chance.choice(infos), chance.choice(infos)
        match chance.randrange(9):
            case 0:
                info.relative_path = chance.choice((*TEXTS, elsewhere.relative_path))
            case 1:
                name = chance.choice(("offset", "length", "relative_path", "transform_descriptors"))
                setattr(info, name, chance.choice((*VALUES, elsewhere.offset, elsewhere.length)))
            case 2:
                with suppress(TypeError):  # an index that cannot be a key any more
                    changed.storage_data[index] = elsewhere
            case 3:
                with suppress(TypeError):
                    changed.storage_data.pop(index, None)
            case 4:
                object.__setattr__(index, chance.choice(("fqn", "offset")), chance.choice(VALUES))
            case 5:
                name = chance.choice((*TEXTS, "weight"))
                entries: dict[str, Any] = changed.state_dict_metadata
                entries[name] = chance.choice((*VALUES[:10], *entries.values()))
            case 6:
                place = chance.choice((tensor, chunk))
                name = chance.choice(("size", "chunks", "offsets", "sizes", "properties"))
                size = [min(chance.choice(NUMBERS), 2**63 - 1) for _ in range(chance.randrange(70))]
                setattr(place, name, chance.choice((torch.Size(size), *VALUES)))
            case 7:
                name = chance.choice(
                    ("planner_data", "storage_data", "storage_meta", "version", "x")
                )
                setattr(changed, name, chance.choice(VALUES))
            case _:
                tensor.chunks = [chunk, chunk]
        if not isinstance(changed.storage_data, dict):
            break
    return changed


class ContainerTarget:
    """A shard file, through verify, by a manifest or by the checksums inside."""

    runs_pickles = False

    def __init__(self, root: str) -> None:
        self._disk = _OnDisk(root)
        self._name, self._whole = next(iter(corpus().shards.items()))
        self._metadata = corpus().pickles[0], _with_manifest(corpus().pickles[0])
        self._extents = [
            extent for extent in extents_of(corpus().metadata, path="") if extent.file == self._name
        ]

    def make(self, chance: Random) -> bytes:
        shards = list(corpus().shards.values())
        content = shards[0]
        match chance.randrange(5):
            case 0:
                content = _archive(chance).ljust(len(content), b"\0")
            case 1:
                content = _in_directory(content, chance)
            case _:
                content = changed_bytes(content, chance, shards)
        return bytes([chance.random() < 0.2]) + content

    def prepare(self, content: bytes) -> None:
        self._disk.write(".metadata", self._metadata[content[0]])
        self._disk.write(self._name, content[1:])

    def run(self, content: bytes) -> str:
        if content[0] or zlib.crc32(content) % 4 == 0:
            return self._disk.verified()
        outcomes = set()
        with closing(PosixStorage(str(self._disk.path)).open(self._name)) as source:
            for extent in self._extents:
                try:
                    damage = damage_of_container(PartStream(source, extent.offset, extent.length))
                except (ChecksumMissing, NoArchive) as error:
                    outcomes.add(type(error).__name__)
                else:
                    outcomes.add("whole" if damage is None else _kind_of(damage))
        return f"container: {', '.join(sorted(outcomes - {'whole'})) or 'whole'}"


def _kind_of(damage: str) -> str:
    if "cannot be read" in damage:
        return damage.split(":")[1].strip()
    return "other CRC-32" if "CRC-32" in damage else " ".join(damage.split()[-3:])


def _archive(chance: Random) -> bytes:
    """An archive of another make: compressed, with any names, or one record many times."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", chance.choice((0, 8, 12))) as archive:
        for number in range(chance.choice((1, 2, 5))):
            name = f"{chance.choice(TEXTS[:7])}{number}"
            archive.writestr(name, bytes(chance.choice((0, 1, 500, 200_000))))
        entries = archive.filelist
        archive.filelist = entries * chance.choice((1, 1, 50))
    return stream.getvalue()


def _in_directory(content: bytes, chance: Random) -> bytes:
    """With other numbers in a record of the archive's directory."""
    changed = bytearray(content)
    places = _records(content)
    for _ in range(chance.choice((1, 2, 4))):
        kind = chance.choice(("<B", "<H", "<I", "<Q"))
        at = chance.choice(places) + chance.randrange(4, 46)
        number = chance.choice(NUMBERS) & ((1 << 8 * struct.calcsize(kind)) - 1)
        changed[at : at + struct.calcsize(kind)] = struct.pack(kind, number)
    return bytes(changed)


@lru_cache(maxsize=1)
def _records(content: bytes) -> list[int]:
    """Where records of archives begin."""
    return [found.start() for found in re.finditer(b"PK(?:\1\2|\3\4|\5\6|\6\6)", content)]


class ManifestTarget(_MetadataFile):
    """A manifest behind good metadata, through its parser."""

    def make(self, chance: Random) -> bytes:
        pickled = corpus().pickles[chance.randrange(4)]
        whole = _with_manifest(pickled)
        if chance.random() < 0.3:
            behind = changed_bytes(whole[len(pickled) :], chance, (whole,))
            return pickled + behind
        plain = json.loads(whole[len(pickled) + 1 :].split(b"\n")[0])
        line = changed_json(plain, chance).encode("utf-8", "surrogatepass") + b"\n"
        footer = f"#nostall-manifest {len(line):012d} {zlib.crc32(line):08x}\n".encode()
        return pickled + b"\n" + line + footer

    def read(self, content: bytes) -> str:
        try:
            _, manifest = split(content, path="")
        except DamagedCheckpointError as error:
            return f"split: {type(error).__name__}, {error.message.split(':')[0][:48]}"
        return "split: accepted" if manifest is not None else "split: no manifest"


class IndexTarget(_MetadataFile):
    """An index of items with right checksums, through the reader."""

    def make(self, chance: Random) -> bytes:
        index = index_of(corpus().metadata)
        assert index is not None
        if chance.random() < 0.3:
            plain = {"files": index.files, "properties": index.properties}
            tables = changed_json(plain, chance).encode("utf-8", "surrogatepass")
            return bytes(index.body) + tables
        content = content_of(index)
        if chance.random() < 0.5:
            return changed_bytes(content, chance, (content,))
        changed = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 4))):
            kind, first = chance.choice((("<Q", 16), ("<I", 64)))
            width = struct.calcsize(kind)
            at = first + width * chance.randrange((len(index.body) - first) // width)
            number = chance.choice((*NUMBERS, 3, 4, 5)) & ((1 << 8 * width) - 1)
            changed[at : at + width] = struct.pack(kind, number)
        return bytes(changed)

    def prepare(self, content: bytes) -> None:
        crc32 = checksum.crc32(content)
        index = IndexBytes(body=content, body_crc32=crc32, properties=(), files=(), ends=())
        vars(index)["tables"] = b""  # they are in the content
        super().prepare(_with_manifest(corpus().pickles[1], index))

    def read(self, content: bytes) -> str:
        try:
            shared = self._reader.shared_metadata()
            metadata = self._reader.read_metadata()
        except UntrustedMetadataError as error:
            return f"index: {type(error).__name__}, {' '.join(error.message.split()[:4])}"
        assert dict(shared.state_dict_metadata) == metadata.state_dict_metadata
        assert dict(shared.storage_data) == metadata.storage_data
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            assert end <= len(corpus().shards[place.relative_path]), "beyond the end of a file"
        assert metadata.version is not None
        return "index: accepted"


MAKERS: Mapping[str, Callable[[str], Target]] = {
    "metadata": MetadataTarget,
    "container": ContainerTarget,
    "manifest": ManifestTarget,
    "index": IndexTarget,
    "reads": ReadsTarget,
}
