"""Files of frozen items that are linked instead of copied and written.

Items that a user calls frozen have files of their own. If each tensor of such a file is the memory
that the last save has seen, and torch has counted no change of it, the file of that save gets a
second name, in the new checkpoint. Nothing is copied, checksummed or written; every directory stays
complete by itself, as a file exists as long as one of its names. In object stores see ``copies``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from nostall import _torch
from nostall._engine import Engine
from nostall._model.jobs import FileReceipt, RankReport, RankWritten
from nostall._model.values import Container, FileLayout, KeptFile
from nostall._plan.layout import FROZEN
from nostall._save.copies import kept_receipt, possible_copies, start_copies
from nostall._save.session import FrozenFile, PreparedSave
from nostall._storage.deadlines import in_time
from nostall._storage.places import is_address, storage_at
from nostall._storage.port import Storage, Version
from nostall._storage.posix import link_new, remove_files


def link_unchanged(prepared: PreparedSave, engine: Engine) -> PreparedSave:
    """Link the files whose items are unchanged, or let the store copy them; write the others.

    Raises:
        SaveTimeoutError: Storage did not answer within ``save_timeout_s`` seconds.
    """
    target = prepared.target
    files = [file for file in prepared.layout.files if file.group == FROZEN]
    if not files:
        return prepared
    seen = [_seen(file, prepared.planned.sources) for file in files]
    kept = [
        _kept(prepared, number, file, of_file, engine)
        for number, (file, of_file) in enumerate(zip(files, seen, strict=True))
    ]
    if is_address(target.settings.directory):
        kept = possible_copies(prepared, kept, engine)
        to_copy = [(file, each) for file, each in zip(files, kept, strict=True) if each is not None]
        copied = start_copies(prepared, to_copy, engine) if to_copy else None
        return replace(prepared, frozen=_frozen(files, seen, kept), copied=copied)
    receipts: list[FileReceipt | None] = [None] * len(files)
    if any(kept):
        receipts = in_time(
            lambda: [_link(prepared, *each) for each in zip(files, kept, strict=True)],
            timeout_s=target.timeout_s,
            doing="linking files of the last save",
            phase="write",
            path=target.settings.directory,
            rank=prepared.rank,
        )
    linked = tuple(each for each in receipts if each is not None)
    return replace(prepared, frozen=_frozen(files, seen, receipts), linked=linked)


def _frozen(
    files: Sequence[FileLayout],
    seen: Sequence[tuple[Hashable, ...] | None],
    kept: Sequence[object | None],
) -> tuple[FrozenFile, ...]:
    return tuple(
        FrozenFile(file.name, of_file, is_kept=each is not None)
        for file, of_file, each in zip(files, seen, kept, strict=True)
    )


def _seen(file: FileLayout, sources: Sequence[torch.Tensor | bytes]) -> tuple[Hashable, ...] | None:
    """What tells whether the items of a file are unchanged; ``None`` if nothing does."""
    found: list[Hashable] = []
    for slot in file.slots:
        source = sources[slot.item]
        content = source if isinstance(source, bytes) else _torch.content_of(source)
        if content is None:
            return None
        found.append(content)
    return tuple(found)


def _kept(
    prepared: PreparedSave,
    number: int,
    file: FileLayout,
    seen: tuple[Hashable, ...] | None,
    engine: Engine,
) -> KeptFile | None:
    """The file of the last save with the same content, if there is one."""
    kept = engine.kept.get((prepared.rank, number))
    if kept is None or seen is None or kept.seen != seen or kept.slots != file.slots:
        return None
    if kept.containers != _containers(prepared, file):
        return None
    is_durable = kept.receipt.fsynced or not prepared.target.settings.options.sync_files
    return kept if is_durable else None


def _containers(prepared: PreparedSave, file: FileLayout) -> tuple[Container | None, ...]:
    return tuple(prepared.layout.shapes[slot.item].container for slot in file.slots)


def _link(prepared: PreparedSave, file: FileLayout, kept: KeptFile | None) -> FileReceipt | None:
    if kept is None:
        return None
    place = prepared.target.settings.directory
    storage, began_s = storage_at(place), time.monotonic()
    source = os.path.join(kept.place, kept.receipt.name)
    with suppress(OSError):  # the write reports it
        storage.make_place()
    path = link_new(storage.where(file.name), source)
    if path is None:
        return None
    prepared.target.progress.created.add(path)
    name = os.path.relpath(path, place)
    if _version(storage, name) != kept.version:  # another file has the name meanwhile
        remove_files([path])
        return None
    return kept_receipt(kept, name, file, began_s)


def _version(storage: Storage, name: str) -> Version | None:
    try:
        return storage.stat(name).version
    except OSError:
        return None


def with_linked(prepared: PreparedSave, report: RankReport) -> RankReport:
    """The report of a rank with the files that it has linked."""
    if not prepared.linked or not isinstance(report, RankWritten):
        return report
    return report._replace(receipts=(*report.receipts, *prepared.linked))


def keep(prepared: PreparedSave, report: RankReport, engine: Engine) -> None:
    """Remember the frozen files of a save that has written all its files.

    Args:
        prepared: The save.
        report: Its report :func:`with_linked` files.
        engine: The engine of the next save.

    Raises:
        SaveTimeoutError: Storage did not answer within ``save_timeout_s`` seconds.
    """
    if not prepared.frozen or not isinstance(report, RankWritten):
        return
    place = prepared.target.settings.directory
    receipts = {each.planned_name: each for each in report.receipts}
    files = {file.name: file for file in prepared.layout.files}
    storage = storage_at(place)
    versions = in_time(
        lambda: [_version(storage, receipts[each.name].name) for each in prepared.frozen],
        timeout_s=prepared.target.timeout_s,
        doing="looking at frozen files",
        phase="collect",
        path=place,
        rank=prepared.rank,
    )
    for number, (each, version) in enumerate(zip(prepared.frozen, versions, strict=True)):
        if version is None or each.seen is None:
            engine.kept.pop((prepared.rank, number), None)
            continue
        engine.kept[prepared.rank, number] = KeptFile(
            place=place,
            receipt=receipts[each.name],
            version=version,
            slots=files[each.name].slots,
            containers=_containers(prepared, files[each.name]),
            seen=each.seen,
        )
