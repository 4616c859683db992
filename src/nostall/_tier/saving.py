"""A save with ``local_staging_dir``: an ordinary save to the local root, then its promotion."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from torch.distributed.checkpoint.planner import SavePlan

from nostall._engine import default_engine
from nostall._model.names import METADATA_NAME, counted
from nostall._model.threads import spawn_or_run
from nostall._model.values import RankFiles
from nostall._save.prepared import SaveTarget, WriterSettings
from nostall._save.rank_save import RankSave
from nostall._save.stager import Staging
from nostall._storage.deadlines import may_hold, must_stay
from nostall._storage.directories import busy_in
from nostall._tier.local import Record, committed_in, is_plain, names_in
from nostall._tier.promotions import Promotion, Root, on_disk, root_at
from nostall.errors import NostallError, OptionError, SaveTimeoutError, WriteError
from nostall.options import require_integer, require_switch
from nostall.removal import remove_checkpoint

_log = logging.getLogger("nostall")

_LOOK_AGAIN_S = 0.1

_NO_LOCAL_DISKS = {
    *("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs"),
    *("afs", "9p", "glusterfs", "wekafs", "ocfs2", "gfs2", "pvfs2", "orangefs", "virtiofs"),
}
_REMOVED = ".removed-"
_SAVES_PER_AGE, _LONG_S = 2, 600.0
"""A directory older than this many times ``save_timeout_s`` (or ``_LONG_S``, if longer) belongs to
no save in progress."""


def local_directory(root: str, place: str) -> str:
    """The directory in a local root for the checkpoint that belongs at a place.

    ``OptionError`` if the place has no plain name, or the root cannot be a local tier for it.
    """
    name, kind = os.path.basename(place), _file_system_of(root)
    is_top = os.path.dirname(place).rstrip("/") in ("", place.partition("//")[0])
    why = hint = None
    if not is_plain(name) or name.startswith(".") or is_top:
        why = "with local_staging_dir the path must end with a name without a leading dot"
        hint = "use a path like DIRECTORY/step-100"
    elif f"{place}/".startswith(f"{root}/") or f"{root}/".startswith(f"{place}/"):
        why = "the checkpoint path is in local_staging_dir, or the other way round"
        hint = "local_staging_dir is a directory on a local disk, the path is on other storage"
    elif kind in _NO_LOCAL_DISKS:
        why = f"local_staging_dir {root} is in memory or on a network: its file system is {kind}"
        hint = "use a directory on a local disk, which outlives the job"
    if why is not None:
        raise OptionError(why, path=place, hint=hint)
    return os.path.join(root, name)


def _file_system_of(path: str) -> str:
    """The kind of file system that holds a path; empty if it is not known."""
    place, found = f"{os.path.realpath(path)}/", {"": ""}
    with suppress(OSError, RuntimeError):
        for each in psutil.disk_partitions(all=True):  # a later one hides an earlier one
            if place.startswith(mounted := f"{each.mountpoint.rstrip('/')}/"):
                found[mounted] = each.fstype
    return found[max(found, key=len)]


class TieredSave(RankSave):
    """One rank's part of a save that is committed in a local root first."""

    def __init__(
        self, settings: WriterSettings, staging: Staging | None, limit: Any, shared: Any
    ) -> None:
        super().__init__(settings, staging)
        self._limit = require_integer("local_staging_limit", limit, at_least=1)
        self._shared = require_switch("local_staging_shared", shared)
        self._path, self._name = os.path.split(settings.directory)
        self._is_coordinator = False
        self.promotion: Promotion | None = None
        """On the coordinator, once the checkpoint is committed locally."""

    @property
    def _root(self) -> Root:
        return root_at(self._path, os.path.dirname(self.settings.final_path), shared=self._shared)

    def make_ready(self) -> None:
        """Make the local directory, once fewer checkpoints wait than allowed. Coordinator only.

        Promoted checkpoints but the newest are removed; in a shared root, also what was never
        committed and is old.

        ``OptionError`` if this rank saves alone, or the root has another destination;
        ``CheckpointExistsError`` if a checkpoint must not be replaced; ``SaveTimeoutError`` if too
        many still wait, or a disk does not answer; ``WriteError`` if the local disk refuses.
        """
        settings, root = self.settings, self._root
        if settings.is_alone:
            raise OptionError(
                "ranks that save alone (no_dist=True or use_collectives=False with several ranks)"
                " do not support local_staging_dir",
                path=self._path,
                hint="save together, or leave local_staging_dir out",
            )
        rank = settings.rank
        on_disk(self._path, lambda: root.start(even_if_locked=True), rank=rank)
        timeout_s = default_engine().options.save_timeout_s
        self._await_room(root, timeout_s)
        if not settings.overwrite:
            place = settings.final_path
            if may_hold(place, [METADATA_NAME], rank=rank, timeout_s=timeout_s):
                raise must_stay(place, rank)
        on_disk(self._path, lambda: self._set_old_aside(root, timeout_s), rank=rank)
        self._is_coordinator = True
        super().make_ready()

    def _await_room(self, root: Root, timeout_s: float) -> None:
        deadline_s, is_told = time.monotonic() + timeout_s, False
        while len(waiting := root.waiting()) >= self._limit:
            number = counted(len(waiting), "checkpoint")
            what = f"{number} still to be promoted: {waiting[0].status}"
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise SaveTimeoutError(
                    f"after {timeout_s:g} s, with local_staging_limit={self._limit}, {what}",
                    rank=self.settings.rank,
                    phase="plan",
                    path=waiting[0].path,
                    hint=f"they are committed in {self._path}; check the destination",
                )
            if not is_told:
                _log.warning("the save waits: %s", what)
            is_told = True
            with suppress(NostallError):  # another one may be over before the first
                waiting[0].result(min(left_s, _LOOK_AGAIN_S))

    def _set_old_aside(self, root: Root, timeout_s: float) -> None:
        """Rename what is to be removed, and remove it on a thread."""
        record, committed = Record(root.path, root.destination), committed_in(root.path)
        promoted = [name for name, version in committed.items() if record.has(name, version)]
        old = {*promoted[:-1]}
        if not self.settings.overwrite:  # the destination has it no longer
            old |= {self._name} & {*promoted}
        if self._shared:
            old_s = time.time() - _SAVES_PER_AGE * max(timeout_s, _LONG_S)
            for name in {*names_in(root.path)} - {*committed}:
                if os.lstat(os.path.join(root.path, name)).st_mtime < old_s:
                    old.add(name)
        for path in (os.path.join(root.path, name) for name in old):
            if not busy_in(path):
                os.rename(path, os.path.join(root.path, f"{_REMOVED}{os.urandom(8).hex()}"))
        left = [name for name in os.listdir(root.path) if name.startswith(_REMOVED)]

        def remove() -> None:
            for name in left:
                with suppress(NostallError):  # the next save tries again
                    remove_checkpoint(os.path.join(root.path, name))

        spawn_or_run("nostall-tier", remove)

    @contextmanager
    def _target(self, plan: SavePlan, *, replaces: bool | None = None) -> Iterator[SaveTarget]:
        if not self._shared:
            root, rank = self._root, self.settings.rank
            on_disk(self._path, lambda: root.start(even_if_locked=False), rank=rank)
        with super()._target(plan, replaces=replaces) as target:
            yield target

    def after_write(self, written: RankFiles) -> None:
        """Have this rank's files brought, if this host will not have the metadata."""
        root, files = self._root, written.files
        if files and root.lock_fd >= 0 and not self._shared and not self._is_coordinator:
            root.begin(self._name, files=[file.name for file in files])

    def before_commit(self, written: Sequence[RankFiles | None]) -> None:
        """Refuse to commit if the files of a rank are on another disk of the same path."""
        if self._shared:
            rank = self.settings.rank
            on_disk(self._path, lambda: self._require_files(written), phase="commit", rank=rank)
        super().before_commit(written)

    def _require_files(self, written: Sequence[RankFiles | None]) -> None:
        for number, each in enumerate(written):
            for file in () if each is None or each.files is None else each.files:
                path = os.path.join(self.settings.directory, file.name)
                if not os.path.exists(path):
                    raise WriteError(
                        f"a file of rank {number} is not on the disk of the coordinator",
                        rank=self.settings.rank,
                        phase="commit",
                        path=path,
                        hint="pass local_staging_shared=False if each host has its own",
                    )

    def after_commit(self) -> None:
        """Promote the checkpoint that was just committed."""
        self.promotion = self._root.begin(self._name, overwrite=self.settings.overwrite)
