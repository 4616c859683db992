"""A reduction of a few integers that may still wait for some ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from nostall._model.threads import interruptible, uninterrupted

_TIMED_OUT = re.compile(r"time(d )?-?out", re.IGNORECASE)
_SHORTEST_S = 0.001
"""torch takes a shorter wait for one without a limit."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class PendingMaximum(Protocol):
    """A maximum over all ranks that may still wait for some of them."""

    def is_done(self) -> bool:
        """Whether it waits for no rank any more."""

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """The maximum. Call it once.

        Raises:
            RankLostError: Another rank has ended, or the group is unusable.
            TimeoutError: Not all ranks have begun it within ``timeout_s`` seconds; the group is no
                longer usable.
        """


@dataclass(frozen=True, slots=True)
class Known:
    """The reduction of a process alone."""

    values: list[int]

    def is_done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> list[int]:
        del timeout_s
        return self.values


class Reduction:
    """An all_reduce in progress.

    Args:
        work: That of torch.
        tensor: Its tensor of integers.
        together: A block in which the backend's untyped errors become ``RankLostError``.
    """

    def __init__(
        self,
        work: dist.Work,
        tensor: torch.Tensor,
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._together = together

    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout_s: float | None = None) -> list[int]:
        with self._together():
            if timeout_s is None:
                self._work.wait()
            else:
                self._wait(timeout_s)
            return [int(value) for value in self._tensor.tolist()]

    def _wait(self, timeout_s: float) -> None:
        """Look again and again: Python handles signals between two looks.

        Torch's own wait with a limit comes last. It handles no signals, and NCCL ends the group
        when a limit is over, counted from the beginning of the reduction.
        """
        ends_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not self._work.is_completed() and time.monotonic() < ends_s:
            with uninterrupted(patience=2), interruptible():
                time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            self._work.wait(timedelta(seconds=max(_SHORTEST_S, ends_s - time.monotonic())))
        except RuntimeError as error:
            if self._work.is_completed() and not _TIMED_OUT.search(str(error)):
                raise  # not a timeout, ours or the group's: a rank has died
            raise TimeoutError(str(error)) from error
