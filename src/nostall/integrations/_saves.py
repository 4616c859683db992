"""Parts that adapters share: saves committed by polling, removals that wait for commits, and
checkpoints that are directories with several saves and other files, which a rename commits.

A checkpoint ``NAME`` is written as ``_saving-NAME/NAME`` in the directory of its run. One that it
replaces is ``_saving-NAME/_replaced`` for a moment. What is to be removed is first moved to
``_removed-...``. A crash leaves such directories; :meth:`DirectorySaves.recover` removes them, and
moves back an old checkpoint whose successor does not have its name yet.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp

from nostall import _torch
from nostall._engine import default_engine
from nostall._model.threads import is_done
from nostall._queue.ending import together
from nostall._ranks.group import coordination_for
from nostall._storage.deadlines import begin, call_with_deadline
from nostall._storage.port import reason
from nostall._storage.posix import sync_directory, sync_name
from nostall.core import AsyncCallsQueue, AsyncRequest
from nostall.errors import NostallError, OptionError, WriteError
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nostall.torch_ckpt import TorchAsyncCheckpoint


def missing(package: str, error: ImportError, *, also: str = "") -> ImportError:
    """The adapter's error, in one line, if it cannot import its package; it needs ``also``, too."""
    packages = f"{package} {also}".split()
    return ModuleNotFoundError(
        f"nostall.integrations.{package} needs {' and '.join(packages)}:"
        f" pip install {' '.join(packages)} ({error})",
        name=error.name or package,
    )


@contextmanager
def attribute_set(target: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value during the block."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


class Removals:
    """Removals by a framework's rotation, each delayed until the saves before it are committed.

    A framework that saves and then removes an older checkpoint expects the new one to exist. Here
    it is still being written, and the older one may be the newest committed checkpoint.
    """

    def __init__(self, remove: Callable[[str], None]) -> None:
        self._remove = remove
        self._scheduled = 0
        """Number of saves so far."""
        self._due: dict[str, int] = {}
        """By path, the number of saves that are over before it is removed."""

    def save_scheduled(self, path: str) -> None:
        """Count a save; its own path is no longer to be removed."""
        self._scheduled += 1
        self._due.pop(path, None)

    def add(self, path: str) -> None:
        """Remove a path when the saves scheduled so far are committed."""
        self._due[path] = self._scheduled

    @contextmanager
    def after_poll(self, saves: AsyncCallsQueue | TorchAsyncCheckpoint) -> Iterator[None]:
        """Around a poll of the saves: remove what is due then.

        If a save has failed, removals wait for another one in its place.
        """
        try:
            yield
        except BaseException:  # passed on; CheckpointException is not an Exception
            self._due = dict.fromkeys(self._due, self._scheduled + 1)
            raise
        are_over = self._scheduled - saves.pending
        for path in [path for path, due in self._due.items() if due <= are_over]:
            del self._due[path]
            self._remove(path)


class Saves:
    """The saves of a training loop: one after the other in the background, committed by polling.

    Plans are cached, so that from the third save of a structure on nothing is communicated before
    the commit. Every method is collective: call it on every rank, in the same order.
    :class:`nostall.FileSystemWriterAsync` gets the options; for ``remove`` see :class:`Removals`.
    """

    def __init__(self, remove: Callable[[str], None], **writer_options: Any) -> None:
        self._queue = AsyncCallsQueue(on_error="raise")
        self._caches: defaultdict[str, CheckpointMetadataCache] = defaultdict(
            CheckpointMetadataCache
        )
        self._removals = Removals(remove)
        self._writer_options = writer_options

    def save(
        self,
        state: dict[str, Any],
        path: str,
        *,
        part: str = "",
        before_commit: Callable[[], None] | None = None,
        after_commit: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Begin a save; tensors may be changed when this returns.

        ``state`` is a new dictionary for each save. ``part`` names its structure, if states of
        several structures take turns. ``before_commit`` is called on rank 0 when the files of all
        ranks are written, on any thread; if it raises, the save fails on all ranks. Each function
        of ``after_commit`` is called on every rank after the commit, by a poll, when the one before
        has returned on all ranks.

        ``CheckpointException`` if the save, or an earlier one, has failed.
        """
        self.poll()
        writer = FileSystemWriterAsync(path, **self._writer_options)
        planned = save_state_dict_async_plan(
            state, writer, enable_cache=True, metadata_cache=self._caches[part]
        )
        writer._rank_save.write_extras = before_commit
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize_fns: list[Callable[[], None]] = [partial(save_state_dict_async_finalize, *planned)]
        finalize_fns += [together(coordination_for(None))(each) for each in after_commit]
        request = AsyncRequest(save_fn, args, finalize_fns, preload_fn=preload_fn)
        self._queue.schedule_async_request(request)
        self._removals.save_scheduled(path)

    def remove(self, path: str) -> None:
        """Remove a checkpoint when the saves before this call are committed."""
        self._removals.add(path)
        self.poll()

    def poll(self, *, wait: bool = False) -> None:
        """Commit the saves that are done on all ranks; with ``wait``, all of them.

        Without ``wait``, a save that another thread is committing ends at a later poll.
        ``CheckpointException`` on every rank if a save has failed.
        """
        with self._removals.after_poll(self._queue):
            if wait:
                self._queue.maybe_finalize_async_calls(blocking=True)
            else:  # now: frameworks look right after it for what is committed
                self._queue._finalize(until_s=None, waits=False, now=True)

    def close(self, error: BaseException | None = None) -> None:
        """Commit all saves and end worker processes.

        After an ``error`` that ends training, saves are committed only if all ranks are here within
        seconds; see :class:`nostall.AsyncCallsQueue`. ``CheckpointException`` on every rank if a
        save has failed.
        """
        if error is not None:
            self._queue.__exit__(type(error), error, error.__traceback__)
            return
        try:
            self.poll(wait=True)
        finally:
            self._queue.close()  # also commits the saves after one that failed


# --- checkpoints that are directories -------------------------------------------------------------

T = TypeVar("T")

_log = logging.getLogger("nostall")

_SAVING = "_saving-"
_REMOVED = "_removed-"
_OF_ONE_RANK = re.compile(r"(?:random_states|rng_state)_(\d+)\.")
"""Files that each rank writes itself; rank 0 writes the others."""


class DirectorySaves:
    """Saves of whole directories: one after the other in the background, committed by polling.

    Every method but ``rotate`` is collective: call it on every rank, in the same order.
    :class:`nostall.FileSystemWriterAsync` gets the options.
    """

    def __init__(self, writer_options: Mapping[str, Any] | None) -> None:
        self._saves = Saves(lambda _: None, **(writer_options or {}))
        self._pending: set[str] = set()
        """Paths of checkpoints that are being written."""
        self._recovered: set[str] = set()
        self._removals: list[Future[None]] = []
        self._changes: list[Future[None]] = []
        """The last change of directories; a late one ends after its caller gave up."""

    @contextmanager
    def save(
        self,
        path: str,
        run: str,
        *,
        replaces: bool = True,
        then: Callable[[], None] = lambda: None,
    ) -> Iterator[str]:
        """Save what the block writes to the directory that it gets.

        The block's calls of ``dcp.save`` are carried out in the background; there is at least one.
        Tensors may be changed after the block. All ranks share the storage of ``path``; ``run`` is
        a directory on the same file system, for checkpoints that are being written. ``then`` is
        called on rank 0 after the commit.

        Raises as :meth:`poll`, also if the directories cannot be made; ``OptionError`` if the
        checkpoint exists, and is not to be replaced: a ``CheckpointException`` on the other ranks.
        """
        self.poll(wait=path in self._pending)
        place = _Place(path, run)
        self._on_rank_0(place.make if replaces else place.make_new, path)
        with _captured(place.new) as states:
            yield place.new
        self._pending.add(path)
        rank = coordination_for(None).rank
        synced = begin("nostall-sync", partial(_sync, place, rank, besides=map(Path, states)))
        publish = partial(self._publish, place, tuple(states), then)
        *others, last = states
        for part in others:
            self._saves.save(states[part], part, part=os.path.basename(part))
        self._saves.save(
            states[last],
            last,
            part=os.path.basename(last),
            after_commit=(
                lambda: _with_deadline(synced.result, path, doing="fsync", phase="fsync"),
                publish,
            ),
        )

    def _publish(self, place: _Place, parts: Sequence[str], then: Callable[[], None]) -> None:
        self._pending.discard(place.path)
        if not coordination_for(None).is_coordinator:
            return

        def publish() -> list[str]:
            # Without one of them its save has failed, which raises an error of its own.
            if not all(map(_is_committed, parts)):
                return []
            replaced = place.publish()
            then()
            return replaced

        self._make(publish, place.path)

    def recover(self, home: str, run: str) -> None:
        """Remove what a crash has left of saves to ``home``; once for each ``run``."""
        if run in self._recovered:
            return
        self._on_rank_0(lambda: _left_by_a_crash(home, run), run)
        self._recovered.add(run)

    def recover_one(self, path: str, run: str) -> None:
        """Remove what a crash has left of a save; it must not be pending."""
        self._on_rank_0(_Place(path, run).recover, path)

    def rotate(
        self, oldest_first: Sequence[str], run: str, *, keep: int, protected: Collection[str]
    ) -> None:
        """Remove the oldest checkpoints until ``keep`` are left. Only for ``then`` of a save.

        Protected checkpoints count, and stay.
        """
        surplus = max(0, len(oldest_first) - keep)
        kept = set(map(Path, protected))
        for path in [path for path in oldest_first if Path(path) not in kept][:surplus]:
            try:
                self._remove([_set_aside(path, run)])
            except OSError as error:  # the save that led here is committed
                _log.warning("a checkpoint could not be removed: path=%s: %s", path, error)

    def _on_rank_0(self, change: Callable[[], list[str]], path: str) -> None:
        """Make a change on rank 0; all ranks raise its error. Collective."""
        coordination = coordination_for(None)
        with together(coordination):
            if coordination.is_coordinator:
                self._make(change, path)

    def _make(self, change: Callable[[], list[str]], path: str) -> None:
        """Make a change of directories, and remove those that it leaves to nobody.

        The next change waits for a late one, with the errors of :func:`_with_deadline`.
        """
        doing = "changing a checkpoint's directory"
        _with_deadline(partial(wait_for, self._changes), path, doing=doing, phase="commit")
        changing = begin("nostall-storage", lambda: self._remove(change()))
        self._changes = [changing]
        _with_deadline(changing.result, path, doing=doing, phase="commit")

    def _remove(self, paths: Sequence[str]) -> None:
        self._removals = [removal for removal in self._removals if not is_done(removal)]
        if paths:
            self._removals.append(begin("nostall-removal", partial(_remove_trees, paths)))

    def poll(self, *, wait: bool = False) -> None:
        """Commit the saves that are done on all ranks; with ``wait``, all of them.

        ``CheckpointException`` on every rank if a save has failed; but ``SaveTimeoutError`` or
        ``WriteError`` on the rank whose storage hangs or refuses while a checkpoint gets its name.
        """
        self._saves.poll(wait=wait)

    def close(self, error: BaseException | None = None) -> None:
        """Commit all saves and end worker processes; see :meth:`Saves.close`."""
        self._saves.close(error)
        if error is None:
            wait_for(self._removals, default_engine().options.save_timeout_s)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one checkpoint is written; its methods are for one rank.

    They return directories that nobody needs, for removal.
    """

    path: str
    run: str

    @property
    def _root(self) -> str:
        return os.path.join(self.run, _SAVING + os.path.basename(self.path))

    @property
    def new(self) -> str:
        """Directory in which the checkpoint is written."""
        return os.path.join(self._root, os.path.basename(self.path))

    @property
    def _old(self) -> str:
        return os.path.join(self._root, "_replaced")

    def recover(self) -> list[str]:
        """Undo what a crash has left."""
        try:
            names = os.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # Not isdir(), which is false for every error: the only copy would be removed.
        if os.path.basename(self._old) in names and not os.path.lexists(self.path):
            os.rename(self._old, self.path)
        return [_set_aside(self._root, self.run)]

    def make(self) -> list[str]:
        """Make the directories of a new checkpoint, after :meth:`recover`."""
        left = self.recover()
        os.makedirs(self.new)
        # The Trainer looks whether the best checkpoint exists, which may be this one.
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        return left

    def make_new(self) -> list[str]:
        """Make the directories; raises ``OptionError`` if the checkpoint exists."""
        try:
            os.lstat(self.path)  # not lexists(), which is false for every error
        except FileNotFoundError:
            return self.make()
        raise OptionError(
            "the checkpoint exists, and is not to be replaced",
            path=self.path,
            hint="choose another name; Accelerate continues to count from"
            " project_configuration.iteration",
        )

    def publish(self) -> list[str]:
        """Give the written directory its name, in the place of an existing one."""
        sync_directory(self.new)  # now that all ranks have written
        if os.path.lexists(self.path):
            os.rename(self.path, self._old)
        os.rename(self.new, self.path)
        sync_directory(os.path.dirname(self.path))
        return [_set_aside(self._root, self.run)]


def _left_by_a_crash(home: str, run: str) -> list[str]:
    """Names to remove in a run's directory, after undoing what was half done."""
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return []
    left = [os.path.join(run, name) for name in names if name.startswith(_REMOVED)]
    for name in names:
        if name.startswith(_SAVING):
            left += _Place(os.path.join(home, name.removeprefix(_SAVING)), run).recover()
    return left


def _is_committed(part: str) -> bool:
    """Whether a save has published its metadata; raises ``OSError`` if storage does not tell."""
    try:
        os.stat(os.path.join(part, _torch.METADATA_NAME))
    except FileNotFoundError:
        return False
    return True


def _with_deadline(call: Callable[[], T], path: str, *, doing: str, phase: str) -> T:
    """The result of a call that waits for storage; other ranks may wait for this one.

    ``SaveTimeoutError`` after ``EngineOptions.save_timeout_s``; ``WriteError`` if storage refuses.
    """
    timeout_s, rank = default_engine().options.save_timeout_s, coordination_for(None).rank
    try:
        return call_with_deadline(
            call, timeout_s=timeout_s, doing=doing, phase=phase, path=path, rank=rank
        )
    except NostallError:
        raise
    except OSError as error:
        raise WriteError(
            f"{doing} failed: {reason(error)}",
            errno=error.errno,
            rank=rank,
            phase=phase,
            path=error.filename or path,
            hint="the next save or run undoes what was half done",
        ) from error


def _set_aside(path: str, run: str) -> str:
    """Rename what is to be removed: a crash leaves no part of it under its name."""
    aside = os.path.join(run, _REMOVED + os.urandom(4).hex())
    os.rename(path, aside)
    return aside


def _remove_trees(paths: Sequence[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)  # the next run tries again


@contextmanager
def _captured(directory: str) -> Iterator[dict[str, dict[str, Any]]]:
    """State dicts that this thread gives to ``dcp.save`` for a directory, by path; not saved."""
    states: dict[str, dict[str, Any]] = {}
    original, thread = dcp.save, threading.get_ident()

    def save(state_dict: dict[str, Any], **options: Any) -> Any:
        path = Path(getattr(options.get("storage_writer"), "path", ""))
        if threading.get_ident() != thread or path.parent != Path(directory):
            return original(state_dict, **options)
        states[str(path)] = state_dict
        return None

    with attribute_set(dcp, "save", save):
        yield states


def _sync(place: _Place, rank: int, *, besides: Iterable[Path]) -> None:
    """Fsync what this rank has written, except for directories of saves."""
    saves = set(besides)
    if rank == 0:
        sync_name(os.path.dirname(place.path))
    for folder, names, files in os.walk(place.new):
        names[:] = [name for name in names if Path(folder, name) not in saves]
        for name in files:
            match = _OF_ONE_RANK.match(name)
            if (int(match[1]) if match else 0) == rank:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
        if rank == 0:
            sync_directory(folder)
