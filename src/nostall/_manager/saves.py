"""One save of a manager, and the planner of a save that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from nostall.filesystem_async import FileSystemWriterAsync
from nostall.stats import SaveStats

if TYPE_CHECKING:
    from nostall.tier import Promotion


class SaveHandle:
    """One save: committed, failed, or in progress.

    A save is committed by the manager's methods, on the thread that calls them; so is the state of
    its handle.
    """

    def __init__(
        self, step: int, writer: FileSystemWriterAsync, path: str, wait: Callable[[Any], object]
    ) -> None:
        self.step = step
        self.path = path
        """The directory of the step."""
        self._writer = writer
        self._wait = wait
        self._outcome: Literal["committed"] | BaseException | None = None

    def __repr__(self) -> str:
        outcome = "failed" if isinstance(self._outcome, BaseException) else self._outcome
        return f"<SaveHandle step={self.step} {outcome or 'in progress'}>"

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed; the same on all ranks.

        It changes only in calls of the manager and in :meth:`result`.
        """
        return self._outcome is not None

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        self._writer.wait_staged(timeout)

    def result(self, timeout: float | None = None) -> str:
        """Wait until the save is committed; returns the directory of the step.

        Collective until the save is done: call it on every rank. Earlier and later saves of the
        manager are waited for, too.

        Args:
            timeout: As for :meth:`nostall.CheckpointManager.wait`.

        Raises:
            CheckpointException: This save failed on some rank; or, if it was not done before the
                call, another save.
            SaveTimeoutError: Some rank was not done within ``timeout`` seconds.
        """
        if not self.done:
            self._wait(timeout)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self.path

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """Promotions of the checkpoint from a local tier to the step's directory, once committed.

        On the coordinator; empty on other ranks, and if the writer has no ``local_staging_dir``.
        """
        return () if self._writer.promotion is None else (self._writer.promotion,)

    @property
    def stats(self) -> SaveStats | None:
        """Timings on this rank.

        ``None`` before its files are written; complete once the save is done.
        """
        return self._writer.stats


class FailingPlanner(DefaultSavePlanner):
    """Raises an error of this rank where all ranks learn of it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        raise self._error
