"""A snapshot that is taken while the trainer goes on, and what keeps the trainer from spoiling it.

The trainer may compute with its tensors but must not change them until :meth:`Staging.wait` has returned. Where it changes
one all the same, the tensor's version counter tells, and the save fails instead of committing a torn snapshot. Changes
that go past the version counter (through ``.data``, NumPy, or code outside of torch) cannot be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch

from nostall import _torch
from nostall._copying import Copies
from nostall.errors import SaveTimeoutError, StagingError

T = TypeVar("T")

Marks = Mapping[torch.device, Any]
"""Per accelerator, how far its stream had been told to go when the save was asked for."""


class Staging(Generic[T]):
    """Takes a snapshot on a thread of its own.

    Args:
        sources: The live tensors.
        names: What they are called, for messages.
        begin: Makes the copies, ordered after the marks it is given, and what they are copies for.
        discard: Gives up what ``begin`` has made, if it cannot be used.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        names: Sequence[str],
        begin: Callable[[Marks], tuple[T, Copies]],
        discard: Callable[[T], None],
    ) -> None:
        self.done: Future[T] = Future()
        """What the snapshot is, once it is complete."""
        self.done.set_running_or_notify_cancel()
        self._begin = begin
        self._discard = discard
        self._names = names
        self._versions = [_torch.version_of(source) for source in sources]
        self._marks = _torch.stream_marks(sources)
        self._copies: Copies | None = None
        self._is_safe = threading.Event()
        self._is_wanted = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(sources,), name="nostall-staging", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self._is_wanted.set()
            self._run(sources)
        self._is_wanted.set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensors may be changed; at once if the snapshot has failed, which finalising reports.

        The host does not wait for an accelerator: what the current stream is told from here on happens after the copy.

        Raises:
            SaveTimeoutError: It is not safe yet after ``timeout`` seconds.
        """
        if not self._is_safe.wait(timeout):
            raise SaveTimeoutError(
                f"the snapshot is still being taken after {timeout:g} s",
                phase="stage",
                hint="wait again before changing any tensor",
            )
        if self._copies is not None:
            self._copies.precede_what_follows()

    def _run(self, sources: Sequence[torch.Tensor]) -> None:
        # Lets go of the interpreter lock at once; else the caller gets it back only after the switch interval of 5 ms.
        self._is_wanted.wait()
        try:
            made, copies = self._begin(self._marks)
            changed = self._changed(sources)  # before anybody may change them
            self._copies = copies
            self._is_safe.set()
            copies.wait()
        except BaseException as error:  # whoever waits must hear of it
            self._is_safe.set()
            self.done.set_exception(error)
            return
        if changed:
            self._discard(made)
            self.done.set_exception(
                StagingError(
                    f"{len(changed)} tensors were changed while the snapshot was taken: {changed[:3]}",
                    phase="stage",
                    hint="call wait_staged() before changing tensors, for example as a hook of the optimizer",
                )
            )
            return
        self.done.set_result(made)

    def _changed(self, sources: Sequence[torch.Tensor]) -> list[str]:
        return [
            name
            for name, source, version in zip(self._names, sources, self._versions, strict=True)
            if _torch.version_of(source) != version
        ]
