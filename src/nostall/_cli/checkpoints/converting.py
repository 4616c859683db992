"""Conversions between a checkpoint directory and one ``torch.save`` file. Imports torch.

To a file: tensors are read, one batch after another, into memory that is mapped to unnamed files
beside the target; ``torch.save`` then writes them from there. So the system can move them out of
memory at any time, and the archive is torch's own, checksums included.

To a checkpoint: the file is mapped, and a synchronous save writes the mapped tensors directly.
"""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nostall import _torch
from nostall._cli.checkpoints.checkpoint import (
    Checkpoint,
    Item,
    in_file_order,
    read_checkpoint,
    require_undamaged,
)
from nostall._cli.checkpoints.nesting import nested
from nostall._cli.checkpoints.reading import TRUST_HINT, read_into, read_objects
from nostall._cli.output import progress
from nostall._model.names import SHARD_SUFFIX
from nostall._read.objects import object_in, reason_of, require_archive, unloadable
from nostall._storage.places import may_have, storage_at
from nostall._storage.posix import (
    create_new,
    remove_files,
    replace_file,
    sync_directory,
)
from nostall._storage.posix_files import PosixFiles
from nostall._storage.reading import ChecksumMissing, as_stream, damage_of_container
from nostall.errors import DamagedCheckpointError, NostallError, ReadError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.removal import remove_checkpoint

_LEAST_MAPPED_NBYTES = 1 << 20
"""Smaller tensors stay in memory: a process has some 65,000 mappings."""
_BATCH_NBYTES = 64 << 20
_PREFIX = ".nostall-convert-"


def to_file(source: str, target: str, *, trust: bool) -> int:
    """Convert a checkpoint directory to a ``torch.save`` file; returns the number of items.

    Raises:
        NotThere: No checkpoint was committed in the directory.
        DamagedCheckpointError: A file is missing or damaged; or there is an object that needs
            ``trust``.
        WriteError: The file cannot be written.
    """
    checkpoint = read_checkpoint(source)
    require_undamaged(checkpoint)
    directory = os.path.dirname(os.path.abspath(target))
    with write_errors(target):
        flat: dict[Any, Any] = dict.fromkeys(item.key for item in checkpoint.items)
        objects = [item for item in checkpoint.items if not item.is_tensor]
        for key, content in read_objects(checkpoint, objects).items():
            flat[key] = object_in(
                io.BytesIO(content), str(key), path=source, trust=trust, hint=TRUST_HINT
            )
        read_tensors(checkpoint, checkpoint.items, flat, directory)
        _save(nested(flat, checkpoint.metadata.planner_data, source), target)
    return len(flat)


@contextmanager
def write_errors(target: str) -> Iterator[None]:
    """Errors of storage as those of writing the target."""
    try:
        yield
    except NostallError:
        raise
    except OSError as error:
        raise WriteError(
            f"cannot write: {error.strerror or error}", errno=error.errno, path=target
        ) from error


def read_tensors(
    checkpoint: Checkpoint, items: Iterable[Item], flat: dict[Any, Any], directory: str
) -> None:
    """Read the tensors among the items into mapped files in a directory.

    Args:
        checkpoint: The checkpoint.
        items: Some of its items.
        flat: Receives the tensors, by key.
        directory: Where the files are.

    Raises:
        DamagedCheckpointError: A file is missing or cannot be read.
        OSError: There is no room for them.
    """
    tensors = {item.name: item for item in items if item.is_tensor}
    total, done, waiting = sum(item.nbytes for item in tensors.values()), 0, 0
    batch: dict[Any, torch.Tensor] = {}
    with progress("reading") as report:
        for item in in_file_order(tensors):
            item.require_covered(checkpoint.path)
            batch[item.key] = flat[item.key] = _room_for(item, directory)
            waiting += item.nbytes
            if waiting >= _BATCH_NBYTES:
                read_into(checkpoint, batch)
                done, waiting, batch = done + waiting, 0, {}
                report(done, total)
        read_into(checkpoint, batch)


def _room_for(item: Item, directory: str) -> torch.Tensor:
    assert item.dtype is not None
    count = torch.Size(item.shape).numel()
    nbytes = count * torch.empty(0, dtype=item.dtype).element_size()
    if nbytes < _LEAST_MAPPED_NBYTES:
        return torch.empty(item.shape, dtype=item.dtype)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=_PREFIX) as file:
        # A full disk is an error here; it would be a signal when a page is written back.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        mapped = torch.from_file(file.name, shared=True, size=count, dtype=item.dtype)
    return mapped.reshape(item.shape)  # the name is gone now, the pages are not


def _save(state: dict[Any, Any], target: str) -> None:
    try:
        with written_beside(target) as draft, open(draft, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch's, for a write that failed
        raise WriteError(f"cannot write: {error!s:.200}", path=target) from error


@contextmanager
def written_beside(target: str) -> Iterator[str]:
    """The path of a new file that gets the target's name, durably, if the block succeeds."""
    directory, name = os.path.split(os.path.abspath(target))
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


def to_checkpoint(source: str, target: str, *, trust: bool) -> int:
    """Convert a ``torch.save`` file to a checkpoint directory; returns the number of items.

    Raises:
        DamagedCheckpointError: The file is damaged, or needs ``trust``.
        ReadError: It is not a file of ``torch.save``, does not hold a state dict, or needs a module
            that cannot be imported here.
        NostallError: The checkpoint cannot be saved.
    """
    state = _load(source, trust=trust)
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise ReadError(f"it holds an object of type {kind}, not a state dict", path=source)
    if not state:
        raise ReadError("the state dict in it is empty", path=source)
    return save_checkpoint(state, target)


def save_checkpoint(state: Mapping[Any, Any], target: str) -> int:
    """Save a state dict to a new directory; returns the number of items.

    Raises:
        NostallError: It cannot be saved; nothing is left of it.
    """
    writer = FileSystemWriterAsync(target, overwrite=False)
    try:
        with warnings.catch_warnings():
            # stock's, on each save without a process group
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            saved = dcp.save(dict(state), storage_writer=writer, no_dist=True)
    except BaseException as failed:  # removed, and passed on
        _remove_unfinished(target)
        if not isinstance(failed, _torch.CheckpointException):
            raise
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, KeyboardInterrupt):
            raise error from failed
        if isinstance(error, NostallError):
            raise error from failed
        raise NostallError(f"cannot save: {error!r:.200}", path=target) from failed
    return len(saved.state_dict_metadata)


def _remove_unfinished(target: str) -> None:
    """Remove what a failed save has left, but no checkpoint of another process."""
    # The save has failed, which is an error already.
    with suppress(NostallError, OSError):
        if not may_have(storage_at(target), _torch.METADATA_NAME):
            remove_checkpoint(target)


def _load(source: str, *, trust: bool) -> Any:
    # The forms from before torch 1.6 cannot be mapped.
    mapped = zipfile.is_zipfile(source)
    if not (mapped or _is_pickle(source) or tarfile.is_tarfile(source)):
        raise ReadError("it is not a file of torch.save, or is cut off", path=source)
    if mapped:
        _require_undamaged(source)
    try:
        if mapped and not trust:
            with open(source, "rb") as stream:
                require_archive(stream)
        return torch.load(source, map_location="cpu", weights_only=not trust, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # a pickle can raise anything
        if not trust and isinstance(error, pickle.UnpicklingError):
            what = f"cannot load: {reason_of(error)}"
            raise DamagedCheckpointError(what, path=source, hint=TRUST_HINT) from error
        with open(source, "rb") as stream:
            raise unloadable("cannot load", error, stream, path=source) from error


def _require_undamaged(source: str) -> None:
    """Require that the records of a file of ``torch.save`` match their checksums, if it has some.

    Raises:
        ReadError: It is a shard file, a row of such files.
        DamagedCheckpointError: One record does not match.
    """
    if source.endswith(SHARD_SUFFIX):
        raise ReadError(
            "it is a shard file of a checkpoint",
            path=source,
            hint="pass the checkpoint's directory",
        )
    directory, name = os.path.split(os.path.abspath(source))
    with closing(PosixFiles(directory).open(name)) as file, suppress(ChecksumMissing):
        damage = damage_of_container(as_stream(file))
        if damage is not None:
            raise DamagedCheckpointError(f"the file is damaged: {damage}", path=source)


def _is_pickle(source: str) -> bool:
    """Whether it begins as pickles of protocol 2 and later do."""
    with open(source, "rb") as file:
        return file.read(1) == pickle.PROTO
