"""``convert``: a checkpoint directory to one file of ``torch.save`` or safetensors, and back.

To a file: tensors are read into memory that is mapped to unnamed files beside the target, and
written from there by the format's own package, checksums included. So the system can move them out
of memory at any time. To a checkpoint: the files are mapped, and a synchronous save writes the
mapped tensors directly. Imports torch.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall import _torch
from nostall._cli.items import Item, damage_of, open_checkpoint, require_covered
from nostall._cli.output import Answer, progress
from nostall._model.names import METADATA_NAME, SAFETENSORS_SUFFIX, SHARD_SUFFIX, counted, some
from nostall._read.archives import unloadable
from nostall._storage.damage import ChecksumMissing, NoArchive, damage_of_container
from nostall._storage.locations import is_address, storage_at
from nostall._storage.port import as_stream, may_have, open_to_read, read_metadata
from nostall._storage.posix import PosixStorage, sync_directory
from nostall.errors import (
    DamagedCheckpointError,
    NostallError,
    OptionError,
    ReadError,
    UntrustedObjectError,
    WriteError,
)
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.loading import load
from nostall.removal import remove_checkpoint

_FILE_ENDINGS = (".pt", ".pth", ".bin", ".pkl", SAFETENSORS_SUFFIX)
"""Endings of a file that is written or read here, none of them a directory's."""
_OTHER_FORMATS = (".gguf", ".onnx", ".h5", ".npz", ".npy", ".distcp")
_INDEX = "model.safetensors.index.json"
"""Hugging Face's index of several files: ``weight_map`` has the file of each tensor."""
_SHARDS = "DCP_SHARDING_INFO"
"""Stock's key for the offsets of parts of tensors, in the metadata of a safetensors file."""
_NOT_THAT_JSON = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""Raised for a text that is not JSON, is nested deeply, or has other values than expected."""
_TRUST_HINT = "--trust loads any class; only for files of people you trust"
_LEAST_MAPPED_NBYTES = 1 << 20
"""Smaller tensors stay in memory: a process has some 65,000 mappings."""
_MOST_LEVELS = 100


def convert(given: Namespace) -> Answer:
    """Convert in the direction that SOURCE and TARGET say; ``OptionError`` if they do not fit."""
    source, target = given.source, given.target
    from_store, to_store = is_address(source), is_address(target)
    safetensors = [] if from_store else _safetensors_in(source)
    to_file = from_store or (os.path.isdir(source) and not safetensors)
    to_safetensors = to_file and target.lower().endswith(SAFETENSORS_SUFFIX)
    other_endings = (*_OTHER_FORMATS, *((os.sep,) if to_file else _FILE_ENDINGS))
    what, hint = None, None
    if bool(storage_at(target).list()) if to_store else os.path.lexists(target):
        what, hint = "the target exists", "remove it, or name another one"
    elif given.prefix and not to_safetensors:
        what = "--prefix is for a target that ends with .safetensors"
    elif to_file and to_store:
        what, hint = "a file can be written to a file system only", "then copy it to the store"
    elif target.lower().endswith(other_endings):
        written = "one file of torch.save" if to_file else "a checkpoint directory"
        what = f"this command writes {written}, but the name of the target says otherwise"
        hint = "use a name such as step-500.pt" if to_file else "name a directory first"
    if what is not None:
        raise OptionError(what, path=target, hint=hint)
    if to_safetensors:
        count = _to_safetensors(source, target, given.prefix)
    elif to_file:
        count = _to_file(source, target, trust=given.trust)
    elif safetensors:
        count = _from_safetensors(safetensors, source, target)
    else:
        count = to_checkpoint(source, target, trust=given.trust)
    plain = {"source": source, "target": target, "items": count}
    return Answer(plain, [f"{source} -> {target}: {counted(count, 'item')}"])


# --- to a file ------------------------------------------------------------------------------------


def _to_file(source: str, target: str, *, trust: bool) -> int:
    items, metadata, _ = open_checkpoint(source)
    with _loaded(items.values(), source, target, trust=trust) as (draft, flat):
        state = nested(flat, metadata.planner_data, source)
        with open(draft, "wb") as file:
            torch.save(state, file)
    return len(flat)


def _to_safetensors(source: str, target: str, prefix: str) -> int:
    package = _safetensors()
    items, _, _ = open_checkpoint(source)
    named = {n.removeprefix(prefix): item for n, item in items.items() if n.startswith(prefix)}
    objects = [item.name for item in named.values() if item.shape is None]
    what, hint = None, "choose tensors by the beginning of their names, as in --prefix model."
    if not named:
        what, hint = f"no item's name begins with {prefix!r:.100}", "`nostall inspect` lists them"
    elif objects:
        kind = f"{counted(len(objects), 'item')} of another kind: {some(objects, 3)}"
        what = f"safetensors holds tensors only; {kind}"
    elif "" in named:
        what = f"an item is named {prefix!r:.100}, and nothing is left of its name"
    if what is not None:
        raise OptionError(what, path=source, hint=hint)
    with _loaded(named.values(), source, target) as (draft, values):
        tensors = {name: values[item.key] for name, item in named.items()}
        try:
            package.torch.save_file(tensors, draft, metadata={"format": "pt"})
        except (KeyError, package.SafetensorError) as error:
            dtypes = ", ".join(sorted({item.dtype for item in named.values()}))
            raise OptionError(
                f"safetensors cannot hold one of the dtypes {dtypes}: {error!s:.200}",
                path=source,
                hint="convert to a file of torch.save, or other items with --prefix",
            ) from error
    return len(named)


@contextmanager
def _loaded(
    items: Iterable[Item], source: str, target: str, *, trust: bool = False
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Load items for a new file, which gets the target's name, durably, if the block succeeds.

    Yields the path of that file, and the values by key; large tensors are mapped files beside it.
    All that the block leaves there is removed.
    """
    if (damage := damage_of(source, deep=True)) is not None:
        raise damage
    directory = os.path.dirname(os.path.abspath(target))
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".nostall-convert-") as room:
            values: dict[Any, Any] = {}
            for item in items:
                require_covered(item, source)
                values[item.key] = None if item.shape is None else _room_for(item, room)
            with progress("reading") as report:
                load(values, source, trust=trust, progress=report)
            draft = os.path.join(room, "draft")
            yield draft, values
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            os.replace(draft, target)
        sync_directory(directory)
    except UntrustedObjectError as error:
        error.hint = _TRUST_HINT
        raise
    except NostallError:
        raise
    except (OSError, RuntimeError) as error:  # the latter is torch's, in place of the file's
        cause = error if isinstance(error, OSError) else error.__context__
        raise WriteError(
            f"cannot write: {getattr(cause, 'strerror', None) or error!s:.200}",
            errno=getattr(cause, "errno", None),
            path=target,
            hint="name a target in a directory that exists, is writable and has room",
        ) from error


def _room_for(item: Item, directory: str) -> torch.Tensor:
    shape, dtype = torch.Size(item.shape or ()), getattr(torch, item.dtype)
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _LEAST_MAPPED_NBYTES:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        # A full disk is an error here; it would be a signal when a page is written back.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapped = torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype)
    return mapped.reshape(shape)  # the name no longer exists, the pages do


class _Node(dict[Any, Any]):
    """A dict made here; an item that is a dict is a leaf."""


def nested(flat: Mapping[Any, Any], paths: Any, where: str) -> dict[Any, Any]:
    """Items in the dicts and lists that they were in, before DCP stored them flat.

    ``paths`` is whatever metadata has: by name, the keys that lead to an item, texts in dicts and
    numbers in lists. Items without such a path stay at the top. ``DamagedCheckpointError`` if an
    item would be inside another one.
    """
    root = _Node()
    for name, value in flat.items():
        path: Any = paths.get(name) if isinstance(paths, Mapping) else None
        is_usable = type(path) is tuple and 0 < len(path) <= _MOST_LEVELS
        if not is_usable or not set(map(type, path)) <= {str, int}:
            path = (name,)
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node()) if type(node) is _Node else node
        if type(node) is not _Node or path[-1] in node:
            raise DamagedCheckpointError(f"{name!r:.80} has the place of another item", path=where)
        node[path[-1]] = value
    return {key: _plain(value) for key, value in root.items()}


def _plain(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    if all(type(key) is int for key in value) and sorted(value) == list(range(len(value))):
        return [_plain(value[position]) for position in range(len(value))]
    return {key: _plain(each) for key, each in value.items()}


# --- to a checkpoint ------------------------------------------------------------------------------


def to_checkpoint(source: str, target: str, *, trust: bool) -> int:
    """Convert a file of ``torch.save`` to a checkpoint directory; returns the number of items."""
    if source.endswith(SHARD_SUFFIX):
        what, hint = "it is a shard file of a checkpoint", "pass the checkpoint's directory"
        raise ReadError(what, path=source, hint=hint)
    try:
        with closing(PosixStorage("").open(source)) as opened, suppress(ChecksumMissing):
            damage = damage_of_container(as_stream(opened))
            if damage is not None:
                raise DamagedCheckpointError(f"the file is damaged: {damage}", path=source)
    except NoArchive as error:
        what, hint = "it is not a file of torch.save", "save it again if torch before 1.6 wrote it"
        raise ReadError(what, path=source, hint=hint) from error
    try:
        # With mmap, torch takes no other bytes for a file of an older version.
        state = torch.load(source, map_location="cpu", weights_only=not trust, mmap=True)
    except Exception as error:  # a pickle can raise anything
        may_help = not trust and isinstance(error, pickle.UnpicklingError)
        advice = _TRUST_HINT if may_help else None
        with open(source, "rb") as stream:
            what = "cannot load"
            raise unloadable(what, error, stream, path=source, damage_hint=advice) from error
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ReadError(f"it holds an object of type {kind}, not a state dict", path=source)
    return _save(state, source, target)


def _from_safetensors(files: Sequence[str], source: str, target: str) -> int:
    package = _safetensors()
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for path in files:
            try:
                file = opened.enter_context(package.safe_open(path, framework="pt"))
                parts = json.loads((file.metadata() or {}).get(_SHARDS, "{}"))
                # Ranks have saved parts of tensors with stock's writer.
                if any(any(each.get("saved_offsets", ())) for each in parts.values()):
                    raise ReadError(
                        "the file has parts of tensors, not whole ones",
                        path=path,
                        hint="torch's consolidate_safetensors_files joins them",
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            except (*_NOT_THAT_JSON, package.SafetensorError) as error:
                raise DamagedCheckpointError(f"cannot read: {error!s:.200}", path=path) from error
            twice = state.keys() & tensors.keys()
            if twice:
                raise DamagedCheckpointError(f"{min(twice)!r} is in two files", path=path)
            state |= tensors
        return _save(state, source, target)


def _safetensors_in(source: str) -> list[str]:
    """The file itself, or the files of a directory: its index names them, or the names do.

    None of another format, or if ``.metadata`` exists. ``DamagedCheckpointError`` if the index is
    of another form, or names what is not in the directory; ``ReadError`` if a file is not a regular
    file.
    """
    directory, name = (source, "") if os.path.isdir(source) else os.path.split(source)
    listed = os.listdir(directory) if not name else [name]
    names = {each for each in listed if each.lower().endswith(SAFETENSORS_SUFFIX)}
    if not names or METADATA_NAME in listed:
        return []
    files = PosixStorage(directory)
    index = files.where(_INDEX)
    if _INDEX in listed:
        try:
            with open_to_read(files, _INDEX) as stream:
                plain = json.loads(read_metadata(stream, index))
            names = set(map(str, plain["weight_map"].values()))
        except _NOT_THAT_JSON as error:
            raise DamagedCheckpointError(f"cannot read: {error!r:.200}", path=index) from error
    for name in names:
        if os.path.basename(name) != name:
            raise DamagedCheckpointError(f"{name!r:.100} is not a plain file name", path=index)
        try:
            files.stat(name)  # refuses what is not a regular file
        except (FileNotFoundError, ValueError):  # the latter for a name that no file can have
            what = "a file that the index names is missing"
            raise DamagedCheckpointError(what, path=files.where(name)) from None
    return [files.where(name) for name in sorted(names)]


def _save(state: Mapping[Any, Any], source: str, target: str) -> int:
    """Save a state dict to a new directory, of which nothing is left if that fails."""
    if not state:
        raise ReadError("the state dict in it is empty", path=source)
    writer = FileSystemWriterAsync(target, overwrite=False)
    try:
        saved = dcp.save(dict(state), storage_writer=writer, no_dist=True)
    except BaseException as failed:  # passed on
        with suppress(NostallError, OSError):  # the save has failed, which is an error already
            if not may_have(storage_at(target), METADATA_NAME):  # not another process's checkpoint
                remove_checkpoint(target)
        if not isinstance(failed, _torch.CheckpointException):
            raise
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, KeyboardInterrupt | NostallError):
            raise error from failed
        raise NostallError(f"cannot save: {error!r:.200}", path=target) from failed
    return len(saved.state_dict_metadata)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        what, hint = "the package safetensors is missing", "pip install 'safetensors>=0.4.5'"
        raise OptionError(what, hint=hint) from error
    return safetensors
