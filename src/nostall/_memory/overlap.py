"""A snapshot taken while training goes on, and the protection of its tensors until they are copied.

Three defences; the first two need no cooperation from the trainer:

1. Tensors changed by a forward pass (running statistics, counters, averages) are small. Small
   tensors, and tensors without a version counter, are copied before the call returns.
2. All other tensors are changed by optimizers. No ``step()`` in the process begins before all
   copies are made, whatever the optimizer and its implementation (``_memory.fence``).
3. A tensor that is changed elsewhere without :meth:`SnapshotFence.wait` is detected by its version
   counter, and the save fails instead of committing a torn snapshot. Changes that bypass the
   counter (through ``.data``, NumPy, ``Tensor.apply_``, or code outside of torch) are not detected.
   Replacing a parameter's ``data`` is harmless, as the old memory is copied.

torch counts an operation when it ends, so an operation that ran during the copy may be uncounted
when the copy ends. The counters are therefore kept, without the tensors' memory, until the trainer
finalises the save: by then its operations have ended. Where the trainer does not finalise
(``dcp.async_save`` does so on its own thread), the counters are compared a second time, after as
long as the copy took and 0.1 s at most; only then may tensors change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import compress
from operator import ne
from typing import Any, TypeVar

import torch

from nostall import _torch
from nostall._memory import devices
from nostall._memory.copying import Copies, Source, detach_all
from nostall._memory.fence import SnapshotFence
from nostall._model.threads import spawn_in_torch
from nostall._model.wording import counted
from nostall.errors import StagingError

T = TypeVar("T")

Marks = Mapping[torch.device, Any]
"""Per accelerator: the position of its stream when the save was requested."""

_SECOND_LOOK_S = 0.1
"""An operation on one tensor ends within this time; waits for the snapshot include it."""

_HEAD_START_S = 0.0005
"""The caller's: this thread would keep the interpreter lock for 5 ms, and the call not return."""


def changed_too_early(names: Sequence[str]) -> StagingError:
    """The error of a save whose tensors were changed before any wait for its snapshot."""
    return StagingError(
        f"{counted(len(names), 'tensor')} changed while the snapshot was taken,"
        f" or without waiting for it: {names[:3]}",
        phase="stage",
        hint="call wait_staged() before changing a large tensor outside an optimizer's step, "
        'or use staging="blocking"',
    )


class _Changes:
    """Tensors, and torch's counts of their changes when this object was made."""

    def __init__(self, tensors: list[Any], names: list[str]) -> None:
        self.tensors = tensors
        self._names = names
        self._before = _torch.changes_of(tensors)

    def since_then(self) -> list[str]:
        """Names of the tensors that have changed."""
        now = _torch.changes_of(self.tensors)
        return (
            [] if now == self._before else list(compress(self._names, map(ne, now, self._before)))
        )


def stage_behind(
    sources: Sequence[Source],
    names: Sequence[str],
    begin: Callable[[list[Source], Marks], tuple[T, Copies]],
    discard: Callable[[T], None],
    *,
    is_watched: bool,
    timeout_s: float,
) -> tuple[Future[T], SnapshotFence]:
    """Take a snapshot on a separate thread.

    Args:
        sources: The live tensors, and bytes between them.
        names: Names of the sources, for messages.
        begin: Starts copying the sources passed to it, which replace ``sources``, ordered after the
            marks passed to it. Returns the snapshot and the copies.
        discard: Releases what ``begin`` returned, if it cannot be used.
        is_watched: Whether the trainer will call :meth:`SnapshotFence.changed_unseen`.
        timeout_s: How long an optimizer's step waits.

    Returns:
        The future snapshot, and the fence to wait for before changing tensors.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    detached, live = detach_all(sources)
    changes = _Changes([detached[at] for at in live], [names[at] for at in live])
    tensors = [each for each in detached if isinstance(each, torch.Tensor)]
    marks, current = devices.stream_marks(tensors), devices.current_devices(tensors)
    fence = SnapshotFence(timeout_s)

    def take() -> T:
        with devices.on_devices(current):
            began_s = time.monotonic()
            made, copies = begin(detached, marks)
            try:
                if not is_watched:
                    fence.wait_awaited(min(time.monotonic() - began_s, _SECOND_LOOK_S))
                changed = changes.since_then()  # before tensors may change
                fence.open(copies)
                copies.wait()
                changed = changed or fence.close(changes.since_then)
                if changed:
                    raise changed_too_early(changed)
                if is_watched:
                    _torch.empty_all(changes.tensors)
                    fence.changed = changes.since_then
            except BaseException:  # passed on; the snapshot has no other owner yet
                discard(made)
                raise
        return made

    def run() -> None:
        time.sleep(_HEAD_START_S)
        try:
            made = take()
        except BaseException as error:  # reported to the waiting threads
            fence.end(str(error))
            done.set_exception(error)
        else:
            fence.end()
            done.set_result(made)
        finally:
            fence.leave()

    fence.enter()
    try:
        spawn_in_torch("nostall-staging", run)
    except RuntimeError:  # no more threads
        run()
    return done, fence
