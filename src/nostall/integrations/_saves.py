"""Parts that adapters share: saves committed by polling, and removals that wait for commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner

from nostall._queue.ending import together
from nostall._ranks.group import coordination_for
from nostall.core import AsyncCallsQueue, AsyncRequest
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
        self._queue = AsyncCallsQueue()
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
            state,
            writer,
            planner=DefaultSavePlanner(),
            enable_cache=True,
            metadata_cache=self._caches[part],
        )
        if before_commit is not None:
            writer._rank_save.beside = before_commit
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize: list[Callable[[], None]] = [partial(save_state_dict_async_finalize, *planned)]
        finalize += [together(coordination_for(None))(each) for each in after_commit]
        request = AsyncRequest(save_fn, args, finalize, preload_fn=preload_fn)
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
