"""``convert``: a checkpoint directory to one file of ``torch.save`` or safetensors, and back.

To a file: tensors are read into memory that is mapped to unnamed files beside the target, and
written from there by the format's own package, checksums included. So the system can move them out
of memory at any time. To a checkpoint: the files are mapped, and a
synchronous save writes the mapped tensors directly. Imports torch.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall import _torch
from nostall._cli.items import (
    Item,
    open_checkpoint,
    require_covered,
    require_undamaged,
)
from nostall._cli.output import Answer, progress
from nostall._model.names import METADATA_NAME, SAFETENSORS_SUFFIX, SHARD_SUFFIX
from nostall._model.wording import counted, some
from nostall._read.objects import reason_of, require_archive, unloadable
from nostall._storage.places import is_address, may_have, storage_at
from nostall._storage.posix import create_new, remove_files, replace_file, sync_directory
from nostall._storage.posix_files import PosixFiles
from nostall._storage.reading import (
    ChecksumMissing,
    as_stream,
    damage_of_container,
    open_to_read,
    read_metadata,
)
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
_PREFIX = ".nostall-convert-"
_MOST_LEVELS = 100


def convert(given: Namespace) -> Answer:
    """Convert in the direction that SOURCE and TARGET say; both are named with the items' number.

    Raises:
        OptionError: The target exists, or a name promises something other than what it has or gets.
    """
    source, target, trust, prefix = given.source, given.target, given.trust, given.prefix
    directory = is_address(source) or os.path.isdir(source)
    of_safetensors = _is_of_safetensors(source)
    to_file = directory and not of_safetensors
    to_safetensors = to_file and target.lower().endswith(SAFETENSORS_SUFFIX)
    if not directory:  # a pipe would block, a device may have no end
        above, name = os.path.split(source)
        storage_at(above).stat(name)
    elif is_address(source) and source.lower().endswith(_FILE_ENDINGS):
        what, hint = "only a checkpoint can be read from an object store", "copy the file to a disk"
        raise OptionError(what, path=source, hint=hint)
    if bool(storage_at(target).list()) if is_address(target) else os.path.lexists(target):
        raise OptionError("the target exists", path=target, hint="remove it, or name another one")
    if prefix and not to_safetensors:
        raise OptionError("--prefix is for a target that ends with .safetensors", path=target)
    if to_file and is_address(target):
        what, hint = "a file can be written to a file system only", "copy it to the store then"
        raise OptionError(what, path=target, hint=hint)
    if target.lower().endswith((*_OTHER_FORMATS, *((os.sep,) if to_file else _FILE_ENDINGS))):
        written = "one file of torch.save" if to_file else "a checkpoint directory"
        raise OptionError(
            f"this command writes {written}, but the name of the target says otherwise",
            path=target,
            hint="use a name such as step-500.pt" if to_file else "name a directory",
        )
    if to_safetensors:
        count = _to_safetensors(source, target, prefix)
    elif to_file:
        count = _to_file(source, target, trust=trust)
    elif of_safetensors:
        count = _from_safetensors(source, target)
    else:
        count = to_checkpoint(source, target, trust=trust)
    plain = {"source": source, "target": target, "items": count}
    return Answer(plain, [f"{source} -> {target}: {counted(count, 'item')}"])


def _is_of_safetensors(path: str) -> bool:
    """Whether it is named like a file of safetensors, or is a directory of such files."""
    if not os.path.isdir(path):
        return path.lower().endswith(SAFETENSORS_SUFFIX)
    names = os.listdir(path)
    return METADATA_NAME not in names and any(name.endswith(SAFETENSORS_SUFFIX) for name in names)


# --- to a file ------------------------------------------------------------------------------------


def _to_file(source: str, target: str, *, trust: bool) -> int:
    checkpoint = open_checkpoint(source)
    require_undamaged(source)
    with _written_beside(target) as draft:
        flat = _loaded(checkpoint.items.values(), source, os.path.dirname(draft), trust=trust)
        state = nested(flat, checkpoint.metadata.planner_data, source)
        try:
            with open(draft, "wb") as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch's, for a write that failed
            raise WriteError(f"cannot write: {error!s:.200}", path=target) from error
    return len(flat)


def _to_safetensors(source: str, target: str, prefix: str) -> int:
    package = _safetensors()
    checkpoint = open_checkpoint(source)
    items = {
        name.removeprefix(prefix): item
        for name, item in checkpoint.items.items()
        if name.startswith(prefix)
    }
    objects = [item.name for item in items.values() if item.shape is None]
    what, hint = None, "choose tensors by the beginning of their names, as in --prefix model."
    if not items:
        what, hint = f"no item's name begins with {prefix!r:.100}", "`nostall inspect` lists them"
    elif objects:
        kind = f"{counted(len(objects), 'item')} of another kind: {some(objects, 3)}"
        what = f"safetensors holds tensors only; {kind}"
    elif "" in items:
        what = f"an item is named {prefix!r:.100}, and nothing is left of its name"
    if what is not None:
        raise OptionError(what, path=source, hint=hint)
    require_undamaged(source)
    with _written_beside(target) as draft:
        tensors = _loaded(items.values(), source, os.path.dirname(draft))
        named = {name: tensors[item.key] for name, item in items.items()}
        try:
            package.torch.save_file(named, draft, metadata={"format": "pt"})
        except (KeyError, package.SafetensorError) as error:
            dtypes = ", ".join(sorted({item.dtype for item in items.values()}))
            raise OptionError(
                f"safetensors cannot hold one of the dtypes {dtypes}: {error!s:.200}",
                path=source,
                hint="convert to a file of torch.save, or other items with --prefix",
            ) from error
    return len(items)


def _loaded(
    items: Iterable[Item], source: str, directory: str, *, trust: bool = False
) -> dict[Any, Any]:
    """The values of items, by key; tensors are in mapped files in a directory."""
    values: dict[Any, Any] = {}
    for item in items:
        require_covered(item, source)
        values[item.key] = None if item.shape is None else _room_for(item, directory)
    try:
        with progress("reading") as report:
            load(values, source, trust=trust, progress=report)
    except UntrustedObjectError as error:
        error.hint = _TRUST_HINT
        raise
    return values


def _room_for(item: Item, directory: str) -> torch.Tensor:
    shape, dtype = torch.Size(item.shape or ()), getattr(torch, item.dtype)
    nbytes = shape.numel() * torch.empty(0, dtype=dtype).element_size()
    if nbytes < _LEAST_MAPPED_NBYTES:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=_PREFIX) as file:
        # A full disk is an error here; it would be a signal when a page is written back.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapped = torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype)
    return mapped.reshape(shape)  # the name is gone now, the pages are not


@contextmanager
def _written_beside(target: str) -> Iterator[str]:
    """The path of a new file that gets the target's name, durably, if the block succeeds."""
    directory, name = os.path.split(os.path.abspath(target))
    try:
        draft, descriptor = create_new(os.path.join(directory, f"{_PREFIX}{name}"))
        try:
            yield draft
            os.fsync(descriptor)
            replace_file(target, by=draft)
        except BaseException:  # removed, and passed on
            remove_files([draft])
            raise
        finally:
            os.close(descriptor)
        sync_directory(directory)
    except NostallError:
        raise
    except OSError as error:
        raise WriteError(
            f"cannot write: {error.strerror or error}", errno=error.errno, path=target
        ) from error


class _Node(dict[Any, Any]):
    """A dict made here; an item that is a dict is a leaf."""


def nested(flat: Mapping[Any, Any], paths: Any, where: str) -> dict[Any, Any]:
    """Items in the dicts and lists that they were in, before DCP stored them flat.

    Args:
        flat: The items, by name.
        paths: For each name the keys that lead to it: texts in dicts, numbers in lists; whatever
            metadata has there. Items without such a path stay at the top.
        where: Path of the checkpoint, for errors.

    Raises:
        DamagedCheckpointError: An item would be inside another one.
    """
    root = _Node()
    for name, value in flat.items():
        path: Any = paths.get(name) if isinstance(paths, Mapping) else None
        is_usable = type(path) is tuple and 0 < len(path) <= _MOST_LEVELS
        if not is_usable or not set(map(type, path)) <= {str, int}:
            path = (name,)
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise DamagedCheckpointError(f"{name!r:.80} is inside another item", path=where)
        if path[-1] in node:
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
    if not zipfile.is_zipfile(source):
        what = "it is not a file of torch.save, or is cut off"
        raise ReadError(what, path=source, hint="save files of torch before 1.6 anew")
    directory, name = os.path.split(os.path.abspath(source))
    with closing(PosixFiles(directory).open(name)) as opened, suppress(ChecksumMissing):
        damage = damage_of_container(as_stream(opened))
        if damage is not None:
            raise DamagedCheckpointError(f"the file is damaged: {damage}", path=source)
    try:
        if not trust:
            with open(source, "rb") as stream:
                require_archive(stream)
        state = torch.load(source, map_location="cpu", weights_only=not trust, mmap=True)
    except OSError:
        raise
    except Exception as error:  # a pickle can raise anything
        if not trust and isinstance(error, pickle.UnpicklingError):
            what = f"cannot load: {reason_of(error)}"
            raise DamagedCheckpointError(what, path=source, hint=_TRUST_HINT) from error
        with open(source, "rb") as stream:
            raise unloadable("cannot load", error, stream, path=source) from error
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ReadError(f"it holds an object of type {kind}, not a state dict", path=source)
    if not state:
        raise ReadError("the state dict in it is empty", path=source)
    return _save(state, target)


def _from_safetensors(source: str, target: str) -> int:
    package = _safetensors()
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for path in _files_of(source) if os.path.isdir(source) else [source]:
            try:
                file = opened.enter_context(package.safe_open(path, framework="pt"))
                parts = json.loads((file.metadata() or {}).get(_SHARDS, "{}"))
                # Ranks have saved parts of tensors with stock's writer.
                if any(any(each.get("saved_offsets", ())) for each in parts.values()):
                    raise ReadError(
                        "the file has parts of tensors",
                        path=path,
                        hint="torch's consolidate_safetensors_files makes whole ones of them",
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            except (*_NOT_THAT_JSON, package.SafetensorError) as error:
                raise DamagedCheckpointError(f"cannot read: {error!s:.200}", path=path) from error
            twice = state.keys() & tensors.keys()
            if twice:
                raise DamagedCheckpointError(f"{min(twice)!r} is in two files", path=path)
            state |= tensors
        if not state:
            raise ReadError("there is no tensor in it", path=source)
        return _save(state, target)


def _files_of(source: str) -> list[str]:
    """The files that a directory's index names, or all of safetensors without an index."""
    files = PosixFiles(source)
    index = files.where(_INDEX)
    try:
        with open_to_read(files, _INDEX) as stream:
            names = set(map(str, json.loads(read_metadata(stream, index))["weight_map"].values()))
    except FileNotFoundError:
        names = {name for name in os.listdir(source) if name.endswith(SAFETENSORS_SUFFIX)}
    except _NOT_THAT_JSON as error:
        raise DamagedCheckpointError(f"cannot read: {error!r:.200}", path=index) from error
    for name in names:
        if os.path.basename(name) != name:
            raise DamagedCheckpointError(f"{name!r:.100} leads out of it", path=index)
        try:
            files.stat(name)  # refuses what is not a regular file
        except (FileNotFoundError, ValueError):  # the latter for a name that no file can have
            what = "a file that the index names is missing"
            raise DamagedCheckpointError(what, path=files.where(name)) from None
    return [files.where(name) for name in sorted(names)]


def _save(state: Mapping[Any, Any], target: str) -> int:
    """Save a state dict to a new directory, of which nothing is left if that fails."""
    writer = FileSystemWriterAsync(target, overwrite=False)
    try:
        with warnings.catch_warnings():
            # stock's, on each save without a process group
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
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
        what, hint = "files of safetensors need that package", "pip install 'safetensors>=0.4.5'"
        raise OptionError(what, hint=hint) from error
    return safetensors
