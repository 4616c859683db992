"""Conversions between a checkpoint directory and safetensors. Imports torch and safetensors.

To a file: as to a file of ``torch.save``, with the tensors in mapped files beside the target. To a
checkpoint: the files are mapped, and a synchronous save writes the mapped tensors directly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from nostall._cli.checkpoints.checkpoint import Item, read_checkpoint, require_undamaged
from nostall._cli.checkpoints.converting import (
    read_tensors,
    save_checkpoint,
    write_errors,
    written_beside,
)
from nostall._model.names import SAFETENSORS_SUFFIX
from nostall._model.wording import counted
from nostall._storage.posix_files import PosixFiles
from nostall._storage.reading import open_to_read, read_metadata
from nostall.errors import DamagedCheckpointError, OptionError, ReadError

_INDEX = "model.safetensors.index.json"
"""Of Hugging Face, for several files: ``weight_map`` has the file of each tensor."""
_SHARDS = "DCP_SHARDING_INFO"
"""Stock's key for the offsets of parts of tensors, in the metadata of a file."""
_NOT_THAT_JSON = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""Raised for a text that is not JSON, is nested deeply, or has other values than expected."""
_SHOWN = 3


def to_safetensors(source: str, target: str, *, prefix: str) -> int:
    """Convert tensors of a checkpoint directory to one file; returns their number.

    Args:
        source: Checkpoint directory.
        target: The new file.
        prefix: Only items whose names begin with it, and without it; empty for all.

    Raises:
        OptionError: safetensors is not installed; there is no such item; or one is no tensor, or of
            a dtype that the format does not have.
        NotThere: No checkpoint was committed in the directory.
        DamagedCheckpointError: A file is missing or damaged.
        WriteError: The file cannot be written.
    """
    package = _package()
    checkpoint = read_checkpoint(source)
    items = [item for item in checkpoint.items if item.name.startswith(prefix)]
    _require_tensors(items, prefix, source)
    require_undamaged(checkpoint)
    flat: dict[Any, Any] = {}
    try:
        with write_errors(target):
            read_tensors(checkpoint, items, flat, os.path.dirname(os.path.abspath(target)))
            named = {item.name.removeprefix(prefix): flat[item.key] for item in items}
            with written_beside(target) as draft:
                package.torch.save_file(named, draft, metadata={"format": "pt"})
    except (KeyError, package.SafetensorError) as error:
        dtypes = sorted({item.kind for item in items})
        raise OptionError(
            f"safetensors cannot hold one of the dtypes {', '.join(dtypes)}: {error!s:.200}",
            path=source,
            hint="convert to a file of torch.save, or other items with --prefix",
        ) from error
    return len(items)


def _require_tensors(items: list[Item], prefix: str, source: str) -> None:
    if not items:
        raise OptionError(
            f"no item's name begins with {prefix!r:.100}",
            path=source,
            hint="`nostall inspect` lists the names",
        )
    objects = [item.name for item in items if not item.is_tensor]
    if objects:
        raise OptionError(
            f"safetensors holds tensors only; {counted(len(objects), 'item')} of another kind:"
            f" {', '.join(objects[:_SHOWN])}",
            path=source,
            hint="choose tensors by the beginning of their names, as in --prefix model.",
        )
    names = [item.name.removeprefix(prefix) for item in items]
    if "" in names:
        raise OptionError(
            f"an item is named {prefix!r:.100}, and nothing is left of its name", path=source
        )


def from_safetensors(source: str, target: str) -> int:
    """Convert a file, or a directory of files, to a checkpoint directory.

    Args:
        source: A file; or a directory with files, all of them if it has no index of Hugging Face.
        target: The new directory.

    Returns:
        The number of tensors.

    Raises:
        OptionError: safetensors is not installed.
        ReadError: There is no such file, or one has parts of tensors.
        DamagedCheckpointError: A file is damaged or missing, or a tensor is there twice.
        NostallError: The checkpoint cannot be saved.
    """
    package = _package()
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for path in _files_of(source):
            try:
                file = opened.enter_context(package.safe_open(path, framework="pt"))
                if _SHARDS in (file.metadata() or {}):
                    _require_whole(json.loads(file.metadata()[_SHARDS]), path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            except (*_NOT_THAT_JSON, package.SafetensorError) as error:
                raise DamagedCheckpointError(f"cannot read: {error!s:.200}", path=path) from error
            twice = state.keys() & tensors.keys()
            if twice:
                raise DamagedCheckpointError(f"{min(twice)!r} is in two files", path=path)
            state |= tensors
        if not state:
            raise ReadError("there is no tensor in it", path=source)
        return save_checkpoint(state, target)


def _require_whole(parts: Any, path: str) -> None:
    """Refuse parts of tensors, which ranks have saved with stock's writer."""
    offsets = [offset for each in parts.values() for offset in each.get("saved_offsets", ())]
    if any(offsets):
        raise ReadError(
            "the file has parts of tensors",
            path=path,
            hint="torch's consolidate_safetensors_files makes whole ones of them",
        )


def _files_of(source: str) -> list[str]:
    if not os.path.isdir(source):
        return [source]
    index, files = os.path.join(source, _INDEX), PosixFiles(source)
    names: Iterable[str]
    try:
        with open_to_read(files, _INDEX) as stream:
            content = read_metadata(stream, index)
        names = set(map(str, json.loads(content)["weight_map"].values()))
    except FileNotFoundError:
        names = [name for name in os.listdir(source) if name.endswith(SAFETENSORS_SUFFIX)]
    except _NOT_THAT_JSON as error:
        raise DamagedCheckpointError(f"cannot read: {error!r:.200}", path=index) from error
    outside = [name for name in names if os.path.basename(name) != name]
    if outside:
        raise DamagedCheckpointError(f"{outside[0]!r:.100} leads out of it", path=index)
    for name in names:
        try:
            files.stat(name)  # refuses what is not a regular file
        except (FileNotFoundError, ValueError):  # the latter for a name that no file can have
            what = "a file that the index names is missing"
            raise DamagedCheckpointError(what, path=files.where(name)) from None
    if not names:
        raise ReadError("neither a checkpoint nor files of safetensors", path=source)
    return [files.where(name) for name in sorted(names)]


def _package() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise OptionError(
            "files of safetensors need the package safetensors",
            hint="pip install 'safetensors>=0.4.5'",
        ) from error
    return safetensors
