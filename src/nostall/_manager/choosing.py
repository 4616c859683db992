"""The step to restore: rank 0 chooses it, and holds it until all ranks have read it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from nostall._manager.contents import About, read_about
from nostall._manager.steps import StepDirectories, held
from nostall._ranks.failures import sendable
from nostall._ranks.group import Coordination
from nostall._torch import wrap_exception
from nostall.errors import DamagedCheckpointError, ReadError, UnknownMetadataError

_log = logging.getLogger("nostall")

T = TypeVar("T")


def agreed(coordination: Coordination, decide: Callable[[], T]) -> T:
    """What ``decide`` returns or raises on rank 0, on every rank. Collective."""
    outcome: tuple[Any, BaseException | None] | None = None
    if coordination.is_coordinator:
        try:
            outcome = decide(), None
        except Exception as error:  # raised on every rank
            outcome = None, sendable(wrap_exception(error))[0]
    result, failure = coordination.broadcast(outcome)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]  # of type T


def choose_step(steps: StepDirectories, step: int | None, hold: ExitStack) -> About | None:
    """The description of the step to restore.

    Args:
        steps: The directories.
        step: A step, or ``None`` for the highest complete one.
        hold: Keeps the step from removal by other processes of this machine.

    Returns:
        The description; ``None`` if ``step`` is, and there is no complete one.

    Raises:
        ReadError: ``step`` has no complete checkpoint; or storage does not answer.
        UnknownMetadataError: No step is known to be complete, and one is not understood.
        DamagedCheckpointError: Another program saved the step.
    """
    if step is not None:
        if not _is_readable(steps, step, hold):
            raise ReadError(
                f"step {step} has no complete checkpoint",
                phase="read",
                path=steps.path(step),
                hint=f"the highest committed step is {steps.latest()}",
            )
        return _about(steps, step)
    unknown: UnknownMetadataError | None = None
    for each in reversed(steps.listed()):
        try:
            if _is_readable(steps, each, hold):
                return _about(steps, each)
        except UnknownMetadataError as error:
            _log.warning("step %d is skipped: %s", each, error.message)
            unknown = unknown or error
    if unknown is not None:
        raise unknown
    return None


def _is_readable(steps: StepDirectories, step: int, hold: ExitStack) -> bool:
    """Whether a step is complete; it is held already when this looks."""
    if not hold.enter_context(held(steps.path(step))) or steps.committed_at_s(step) is None:
        return False
    if steps.is_complete(step):
        return True
    _log.warning("step %d is skipped: it is not complete", step)
    return False


def _about(steps: StepDirectories, step: int) -> About:
    path = steps.checkpoints(step)[-1]
    about = read_about(path)
    if about is None:
        raise DamagedCheckpointError(
            "the step was not saved by a CheckpointManager",
            phase="read",
            path=path,
            hint="load it with torch.distributed.checkpoint.load",
        )
    return about
