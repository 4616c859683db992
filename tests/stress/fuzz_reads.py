"""Small checkpoints with changed bytes, through ``dcp.load`` and ``nostall.load``, into targets.

An input is a list of changes to the files of a small checkpoint, of two kinds. A blind change is
what a disk does: it knows nothing of checksums, so ``verify="crc"`` must notice it where it
matters. A forgery is what somebody writes: other archives, other metadata. Whatever was changed, an
item whose own bytes and metadata are unchanged is loaded right or not at all, every error has a
documented type, and no byte beside a target is written.
"""

from __future__ import annotations

import copy
import io
import json
import linecache
import logging
import pickle
import re
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from random import Random
from traceback import StackSummary
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import nostall
from nostall.errors import (
    DamagedCheckpointError,
    OptionError,
    UntrustedMetadataError,
    UntrustedObjectError,
)
from nostall.filesystem_reader import Verify
from stress.fuzz_inputs import (
    NUMBERS,
    TEXTS,
    changed_bytes,
    changed_program,
    instructions,
)
from support.parts import InHalves

_GUARD_NBYTES = 64
_GUARD = 0xA5
_OBJECT = {"epoch": (1, "text", 2.5)}
_REFUSALS = (DamagedCheckpointError, UntrustedMetadataError, UntrustedObjectError)
_IN_TRACEBACKS = (
    *("nostall", "torch.distributed.checkpoint", "torch.serialization", "torch._weights_only"),
    *("torch._utils", "torch._tensor", "torch.storage", "torch.distributed.c10d_logger"),
    *("zipfile", "pickle", "concurrent.futures", "contextlib", "stress", "torch.utils"),
    *("torch.nn.parameter", "torch._jit_internal", "threading", "logging", "torch._C"),
)
"""Modules whose source ``dcp.load`` reads for the text of its error."""
_MOST_S = 1.0
"""Processor time for one load, beyond what it may need by the length of its input."""
_S_PER_BYTE = 50e-6
"""The texts of errors of ``torch.load`` have all values of a storage."""
_VERIFY: tuple[Verify, ...] = ("none", "crc")
_HOW = tuple(product(("dcp.load", "nostall.load", "slices"), _VERIFY))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Small and large ones, stored whole, in halves, and as only ``torch.load`` understands."""
    made = torch.Generator().manual_seed(seed)
    small, image, large = (
        torch.randn(size, generator=made) for size in ((6, 5), (2, 3, 4, 5), (300, 240))
    )
    return {
        "w": small,
        "half": small[0].to(torch.bfloat16),
        "complex": torch.complex(small[0], small[1]),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "image": image.to(memory_format=torch.channels_last),
        "large": large,
        "large image": torch.randn((4, 4, 70, 70), generator=made).to(
            memory_format=torch.channels_last
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A small checkpoint of stock's."""

    state: Mapping[str, torch.Tensor]
    files: Mapping[str, bytes]
    pickled: bytes
    """Its metadata."""
    programs: tuple[bytes, ...]
    """The pickles of its items."""

    @property
    def metadata(self) -> Metadata:
        loaded = pickle.loads(self.pickled)
        assert isinstance(loaded, Metadata)
        return loaded


def _saved(seed: int) -> Checkpoint:
    state = tensors(seed)
    with tempfile.TemporaryDirectory() as path:
        writer = dcp.FileSystemWriter(path, thread_count=3, sync_files=False)
        saved = {**state, "object": _OBJECT}
        dcp.save(saved, storage_writer=writer, planner=InHalves(), no_dist=True)
        files = {file.name: file.read_bytes() for file in sorted(Path(path).glob("*.distcp"))}
        pickled = (Path(path) / ".metadata").read_bytes()
    metadata, programs = pickle.loads(pickled), set()
    for info in metadata.storage_data.values():
        archive = files[info.relative_path][info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            (name,) = (each for each in opened.namelist() if each.endswith("data.pkl"))
            programs.add(opened.read(name))
    return Checkpoint(state=state, files=files, pickled=pickled, programs=tuple(sorted(programs)))


@lru_cache(maxsize=1)
def checkpoints() -> tuple[Checkpoint, Checkpoint]:
    """One, and another of the same structure; made by the process that starts the others.

    Everything that loading imports is imported here, too.
    """
    torch.set_num_threads(1)  # children are forked from this process, which must not have threads
    logging.disable(logging.CRITICAL)  # dcp.load logs tracebacks
    found = _saved(1), _saved(2)
    with tempfile.TemporaryDirectory() as path:
        disk = _Disk(path, found[0])
        for how in range(len(_HOW)):
            disk.load(how, _Targets())
    repr(found[0].state)  # as texts of errors have it
    for name, module in sys.modules.copy().items():
        if name.startswith(_IN_TRACEBACKS) and getattr(module, "__file__", None):
            linecache.getlines(str(module.__file__))
    return found


# --- changes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Splice:
    """Some bytes of a file in place of others."""

    file: str
    at: int
    removed: int
    added: bytes


@dataclass(frozen=True, slots=True)
class _Input:
    """How to load, and what was changed before."""

    how: int
    forged: bool
    splices: tuple[_Splice, ...]

    def encoded(self) -> bytes:
        """The input as the content of a finding's file."""
        places = [(each.file, each.at, each.removed, len(each.added)) for each in self.splices]
        header = json.dumps([self.how, self.forged, places]).encode()
        return header + b"\n" + b"".join(each.added for each in self.splices)

    @staticmethod
    def decoded(content: bytes) -> _Input:
        header, rest = content.split(b"\n", 1)
        how, forged, places = json.loads(header)
        splices = []
        for file, at, removed, nbytes in places:
            splices.append(_Splice(file, at, removed, rest[:nbytes]))
            rest = rest[nbytes:]
        return _Input(how, forged, tuple(splices))


def _blind(chance: Random, whole: Checkpoint) -> Iterator[_Splice]:
    """Bits, zeros, other bytes, a lost end: of one place, small beside the file."""
    name, content = chance.choice(list(whole.files.items()))
    begin = min(chance.choice(_interesting(content)) + chance.randrange(-300, 900), len(content))
    begin = max(0, begin)
    nbytes = min(chance.choice((1, 4, 64, 512, 4096)), len(content) - begin)
    window = content[begin : begin + nbytes]
    match chance.randrange(6):
        case 0:
            yield _Splice(name, begin, nbytes, bytes(nbytes))
        case 1:
            yield _Splice(name, begin, len(content) - begin, b"")
        case 2 | 3 if nbytes:
            flipped = bytearray(window)
            flipped[chance.randrange(nbytes)] ^= 1 << chance.randrange(8)
            yield _Splice(name, begin, nbytes, bytes(flipped))
        case 4:
            yield _Splice(name, begin, nbytes, chance.randbytes(nbytes))
        case _:
            yield _Splice(name, begin, nbytes, changed_bytes(window, chance, (content[:5000],)))


@lru_cache(maxsize=16)
def _interesting(content: bytes) -> list[int]:
    """Where records of archives begin, and their names and values are near."""
    return [found.start() for found in re.finditer(b"PK(?:\1\2|\3\4|\5\6|\6\6|\7\b)", content)]


def _exchanged(chance: Random, whole: Checkpoint, other: Checkpoint) -> Iterator[_Splice]:
    """A file or an item of a checkpoint of the same layout, or an item in place of another."""
    name, content = chance.choice(list(whole.files.items()))
    if chance.random() < 0.3:
        yield _Splice(name, 0, len(content), other.files[name])
        return
    infos = [each for each in whole.metadata.storage_data.values() if each.relative_path == name]
    one, two = chance.choice(infos), chance.choice(infos)
    source = chance.choice((whole, other)).files[name]
    piece = source[two.offset : two.offset + two.length]
    yield _Splice(name, one.offset, one.length, piece[: one.length].ljust(one.length, b"\0"))


_REBUILDS = [
    ("torch._utils", f"_rebuild_{name}")
    for name in (
        *("tensor", "tensor_v2", "tensor_v3", "parameter", "sparse_tensor", "qtensor"),
        *("meta_tensor_no_storage", "nested_tensor", "wrapper_subclass"),
        "device_tensor_from_numpy",
    )
]
_REBUILDS += [
    ("torch", name) for name in ("FloatStorage", "DoubleStorage", "QInt8Storage", "int64")
]
_REBUILDS += [("torch.storage", "UntypedStorage"), ("torch", "float8_e4m3fn"), ("torch", "Size")]


def _other_program(program: bytes, chance: Random, others: tuple[bytes, ...]) -> bytes:
    """The pickle of a tensor with other numbers or names, or changed as metadata are."""
    if chance.random() < 0.4:
        return changed_program(program, chance, others)
    changed = list(instructions(program))
    for _ in range(chance.choice((1, 1, 2, 3))):
        number = pickle.dumps(chance.choice((*NUMBERS[:-3], -1, -(2**31))), 2)[2:-1]
        module, name = chance.choice(_REBUILDS)
        places = [at for at, each in enumerate(changed) if each[:1] in b"KMJ\x8ac"]
        at = chance.choice(places or [1])
        is_name = changed[at][:1] == b"c"
        changed[at] = b"c" + f"{module}\n{name}\n".encode() if is_name else number
    return b"".join(changed)


def _archive(content: bytes, chance: Random, others: tuple[bytes, ...]) -> bytes:
    """An archive whose records have other content, lengths, names or compression, or are lost."""
    stream = io.BytesIO()
    kind = chance.randrange(8)
    compression = chance.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)) if kind == 0 else 0
    with (
        zipfile.ZipFile(io.BytesIO(content)) as source,
        zipfile.ZipFile(stream, "w", compression) as target,
    ):
        for entry in source.infolist():
            record, name = source.read(entry), entry.filename
            is_pickle, is_values = name.endswith("data.pkl"), name.endswith("/data/0")
            if kind in (1, 2, 3) and is_pickle:
                record = _other_program(record, chance, others)
            elif kind == 4 and is_values:
                record = record[: chance.randrange(len(record) + 1)] + bytes(chance.choice((0, 99)))
            elif kind == 5 and chance.random() < 0.3:
                name = name.replace("archive", chance.choice(TEXTS))
            elif kind == 6 and chance.random() < 0.2:
                continue
            target.writestr(name.replace("\0", "0").encode("utf-8", "replace").decode(), record)
            if kind == 0 and is_values:  # it unpacks to much more
                target.writestr(f"{name}1", bytes(chance.choice((1000, 1 << 20))))
    made = stream.getvalue()
    return changed_bytes(made, chance, (content,)) if kind == 7 else made


def _forged(chance: Random, whole: Checkpoint) -> Iterator[_Splice]:
    """Another archive for an item, at the end of its file."""
    metadata = whole.metadata
    index, info = chance.choice(list(metadata.storage_data.items()))
    content = whole.files[info.relative_path]
    archive = content[info.offset : info.offset + info.length]
    made = _archive(archive, chance, whole.programs)
    yield _Splice(info.relative_path, len(content), 0, made)
    metadata.storage_data[index] = replace(info, offset=len(content), length=len(made))
    yield _Splice(".metadata", 0, len(whole.pickled), pickle.dumps(metadata, 4))


def _other_places(chance: Random, whole: Checkpoint) -> Iterator[_Splice]:
    """Metadata that name another file, place or length for an item, or other chunks of a tensor."""
    metadata = whole.metadata
    places: dict[Any, Any] = metadata.storage_data
    for _ in range(chance.choice((1, 1, 2))):
        (index, info), (_, elsewhere) = chance.choices(list(places.items()), k=2)
        entries = metadata.state_dict_metadata
        tensor = chance.choice(
            [e for e in entries.values() if isinstance(e, TensorStorageMetadata)]
        )
        number = chance.choice((*NUMBERS[:-1], elsewhere.offset, elsewhere.length))
        match chance.randrange(8):
            case 0:
                places[index] = replace(info, offset=number)
            case 1:
                places[index] = replace(info, length=number)
            case 2:
                nbytes = info.length + chance.choice((-22, -1, 1, 64, 4096))
                places[index] = replace(info, length=nbytes)
            case 3:
                offset = info.offset + chance.choice((-1, 1, 64, 512))
                places[index] = replace(info, offset=offset)
            case 4:
                places[index] = elsewhere
            case 5:
                path = chance.choice((*TEXTS, *whole.files))
                places[index] = replace(info, relative_path=path)
            case 6:
                del places[index]
            case _ if tensor.chunks:
                chunk = copy.copy(chance.choice(tensor.chunks))
                name = chance.choice(("offsets", "sizes"))
                sizes = list(getattr(chunk, name)) or [0]
                sizes[chance.randrange(len(sizes))] = chance.choice((*NUMBERS[:6], 2**40, 2**62))
                setattr(chunk, name, torch.Size(sizes))
                tensor.chunks[chance.randrange(len(tensor.chunks))] = chunk
            case _:
                pass
        if not places:
            break
    yield _Splice(".metadata", 0, len(whole.pickled), pickle.dumps(metadata, 4))


# --- targets --------------------------------------------------------------------------------------


class _Targets:
    """Memory for all tensors, with guards around each of them."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        like, at = tensors(0), _GUARD_NBYTES
        for name, tensor in like.items():
            self._places[name] = (at, at + tensor.nbytes)
            at += tensor.nbytes + _GUARD_NBYTES
            at += -at % _GUARD_NBYTES
        self._memory = torch.full((at,), _GUARD, dtype=torch.uint8)
        self._bytes = memoryview(self._memory.numpy().data)
        for name, tensor in like.items():
            begin, end = self._places[name]
            flat = self._memory[begin:end].view(tensor.dtype)
            self.state[name] = flat.as_strided(tensor.size(), tensor.contiguous().stride())

    def clear(self) -> None:
        self._memory.fill_(_GUARD)

    def content(self) -> dict[str, bytes]:
        return {name: bytes(self._bytes[i:j]) for name, (i, j) in self._places.items()}

    def require_guards(self) -> None:
        """Raise if something was written beside a tensor."""
        at = 0
        for name, (begin, end) in (*self._places.items(), ("the end", (len(self._bytes), 0))):
            beside = bytes(self._bytes[at:begin])
            assert beside == bytes([_GUARD]) * len(beside), f"bytes before {name} were written"
            at = end


class _Slices(dcp.DefaultLoadPlanner):
    """Loads a part of each stored chunk: all but its first row and its last column."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._state = state

    def plan(self, metadata: Metadata) -> LoadPlan:
        """The parts, in the order of the metadata."""
        items = []
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            for number, chunk in enumerate(entry.chunks):
                sizes = list(chunk.sizes)
                begins = [int(size > 1 and not at) for at, size in enumerate(sizes)]
                lengths = [
                    size - begin - int(size > 1 and at > 0)
                    for at, (size, begin) in enumerate(zip(sizes, begins, strict=True))
                ]
                there = [a + b for a, b in zip(chunk.offsets, begins, strict=True)]
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(name, torch.Size(there)),
                        dest_offsets=torch.Size(there),
                        storage_index=MetadataIndex(name, chunk.offsets, number),
                        storage_offsets=torch.Size(begins),
                        lengths=torch.Size(lengths),
                    )
                )
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._state[read_item.dest_index.fqn]
        for at, begin in enumerate(read_item.dest_offsets):
            tensor = tensor.narrow(at, begin, read_item.lengths[at])
        return tensor


class _Disk:
    """A checkpoint in a directory, whose files are written anew where they were changed."""

    def __init__(self, root: str, checkpoint: Checkpoint) -> None:
        self.path = Path(root) / "read"
        self.path.mkdir()
        self._whole = {**checkpoint.files, ".metadata": checkpoint.pickled}
        self._plan = _Slices({}).plan(checkpoint.metadata)
        self._changed: dict[str, bytes] = {}
        for name, content in self._whole.items():
            (self.path / name).write_bytes(content)

    def change(self, splices: tuple[_Splice, ...]) -> None:
        """Undo the last change, and make another one."""
        changed: dict[str, bytes] = {}
        for each in splices:
            content = changed.get(each.file, self._whole[each.file])
            end = each.at + each.removed
            changed[each.file] = content[: each.at] + each.added + content[end:]
        for name in self._changed.keys() - changed.keys():
            (self.path / name).write_bytes(self._whole[name])
        for name, content in changed.items():
            (self.path / name).write_bytes(content)
        self._changed = changed

    def content(self, name: str) -> bytes:
        return self._changed.get(name) or self._whole.get(name, b"")

    def load(self, how: int, targets: _Targets) -> object:
        """Load all tensors, and by ``nostall.load`` the object, which is returned."""
        way, verify = _HOW[how]
        state: dict[str, Any] = dict(targets.state)
        if way == "nostall.load":
            nested: dict[str, Any] = {"epoch": None}
            nostall.load({**state, "object": nested}, self.path, verify=verify, threads=2)
            return nested
        reader = nostall.FileSystemReader(self.path, verify=verify, threads=2)
        if way == "dcp.load":
            dcp.load(state, storage_reader=reader, no_dist=True)
        else:
            reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
            reader.read_data(self._plan, _Slices(state)).wait()
        return _OBJECT  # stock's planner would unpickle it


class ReadsTarget:
    """A checkpoint, through ``dcp.load``, ``nostall.load``, and slice by slice."""

    runs_pickles = True

    def __init__(self, root: str) -> None:
        self._whole, self._other = checkpoints()
        self._disk = _Disk(root, self._whole)
        self.targets = _Targets()
        self._input = _Input(0, False, ())
        self._expected = []
        for how in range(len(_HOW)):
            self.targets.clear()
            self._disk.load(how, self.targets)
            self._expected.append(self.targets.content())
        for name, tensor in self._whole.state.items():
            values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert all(self._expected[how][name] == values for how in range(4))

    def make(self, chance: Random) -> bytes:
        how = chance.randrange(len(_HOW))
        whole = self._whole
        match chance.randrange(8):
            case 0 | 1 | 2:
                made = _Input(how, False, tuple(_blind(chance, whole)))
            case 3:
                made = _Input(how, True, tuple(_exchanged(chance, whole, self._other)))
            case 4 | 5:
                made = _Input(how, True, tuple(_other_places(chance, whole)))
            case _:
                made = _Input(how, True, tuple(_forged(chance, whole)))
        return made.encoded()

    def prepare(self, content: bytes) -> None:
        self._input = _Input.decoded(content)
        self._disk.change(self._input.splices)
        self.targets.clear()

    def run(self, content: bytes) -> str:
        way, verify = _HOW[self._input.how]
        began_s, loaded, outcome = time.process_time(), None, "loaded"
        try:
            loaded = self.load(self._input.how)
        except _REFUSALS as error:
            outcome = type(error).__name__
        except OptionError:
            # The state does not fit: by metadata that somebody wrote.
            assert self._input.forged
            outcome = "OptionError"
        except OSError as error:
            assert self._input.forged  # a name that no file can have
            outcome = f"OSError {error.errno}"
        except MemoryError:
            assert self._input.forged  # a pickle that makes something without a measure
            outcome = "MemoryError"
        except CheckpointException as caught:
            outcome = self._refused(*caught.failures[0])
        took_s = time.process_time() - began_s
        assert took_s < _MOST_S + _S_PER_BYTE * len(content), f"{took_s} s of processor time"
        self.targets.require_guards()
        wrong = self._wrong(is_loaded=outcome == "loaded", loaded=loaded)
        unchanged = wrong - self._changed_items()
        assert not unchanged, f"{outcome}, and wrong values in {sorted(unchanged)}"
        if outcome == "loaded" and wrong:
            assert self._input.forged or verify == "none", f"wrong values in {sorted(wrong)}"
            outcome = "loaded, other values"
        return f"{way} {verify}: {outcome}"

    def load(self, how: int) -> object:
        """Load into the targets; what became of the object."""
        return self._disk.load(how, self.targets)

    def _refused(self, error: BaseException, frames: StackSummary) -> str:
        """How ``dcp.load`` has refused: by an error of ours, or of stock's planner."""
        if isinstance(error, _REFUSALS):
            return type(error).__name__
        if self._input.forged and isinstance(error, OSError):
            return f"OSError {error.errno}"
        if self._input.forged and isinstance(error, MemoryError):
            return "MemoryError"
        if self._input.forged and not any("nostall" in frame.filename for frame in frames):
            return f"{type(error).__name__} of stock's planner"
        raise error

    def _wrong(self, *, is_loaded: bool, loaded: object) -> set[str]:
        """Items with other values than saved; after an error, than saved or before."""
        expected, found = self._expected[self._input.how], self.targets.content()
        wrong = {name for name in expected if found[name] != expected[name]}
        if is_loaded:
            return wrong if loaded == _OBJECT else {*wrong, "object.epoch"}
        return {name for name in wrong if not _is_partly(found[name], expected[name])}

    def _changed_items(self) -> set[str]:
        """Items whose metadata or archives are not those that were saved."""
        before, now = self._whole.metadata, self._whole.metadata
        if any(each.file == ".metadata" for each in self._input.splices):
            now = pickle.loads(self._disk.content(".metadata"))
        old, new = before.state_dict_metadata, now.state_dict_metadata
        changed = {name for name in old if old[name] != new.get(name)}
        for index, info in before.storage_data.items():
            file, end = info.relative_path, info.offset + info.length
            is_same = now.storage_data.get(index) == info
            content = self._whole.files[file][info.offset : end]
            if not is_same or self._disk.content(file)[info.offset : end] != content:
                changed.add(index.fqn)
        return changed


def _is_partly(found: bytes, expected: bytes) -> bool:
    """Whether each byte is the expected one, or was not written."""
    if found == bytes([_GUARD]) * len(found):
        return True
    one, other = np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8)
    return bool(((one == other) | (one == _GUARD)).all())
