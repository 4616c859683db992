"""The handle of one save of a manager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nostall._tier.promotion import Promotion
from nostall.filesystem_async import FileSystemWriterAsync
from nostall.stats import SaveStats


class SaveHandle:
    """One save: committed, failed, or under way.

    A save is committed by the manager's methods, on the thread that calls them; so is the state of
    its handle.
    """

    def __init__(
        self,
        step: int,
        path: str,
        writers: Sequence[FileSystemWriterAsync],
        wait: Callable[[float | None], object],
    ) -> None:
        self.step = step
        self.path = path
        """The directory of the step."""
        self._writers = writers
        self._wait = wait
        self._left = len(writers)
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error else "committed"
        return f"<SaveHandle step={self.step} {state}>"

    @property
    def done(self) -> bool:
        """Whether the save is committed or has failed; the same on all ranks.

        It changes only in calls of the manager and in :meth:`result`.
        """
        return self._error is not None or not self._left

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when tensors may be changed; at once without overlapped staging.

        Raises:
            SaveTimeoutError: The copy is not complete after ``timeout`` seconds.
        """
        for writer in self._writers:
            writer.wait_staged(timeout)

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
        if self._error is not None:
            raise self._error
        return self.path

    @property
    def promotions(self) -> tuple[Promotion, ...]:
        """What brings the checkpoints from a local tier to the step's directory, once committed.

        On the coordinator; empty on other ranks, and if the writers have no ``local_staging_dir``.
        """
        found = (writer.promotion for writer in self._writers)
        return tuple(promotion for promotion in found if promotion is not None)

    @property
    def stats(self) -> SaveStats | None:
        """Timings on this rank, of the last part if there are several.

        ``None`` before its files are written; complete once the save is done.
        """
        return self._writers[-1].stats

    def commit_part(self) -> bool:
        """Note that one checkpoint of the step is committed; whether all of them are."""
        self._left -= 1
        return not self._left and self._error is None

    def fail(self, error: BaseException) -> None:
        """Note that the save has failed."""
        if self._error is None:
            self._error = error
