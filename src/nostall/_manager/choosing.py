"""The step to restore: rank 0 chooses it, and holds it until all ranks have read it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from nostall._manager.contents import About, read_about
from nostall._manager.steps import StepDirectories, held, name_of
from nostall._ranks.failures import sendable
from nostall._ranks.group import Coordination
from nostall._torch import wrap_exception
from nostall.errors import DamagedCheckpointError, NostallError, ReadError, UnknownMetadataError
from nostall.integrity import why_damaged

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


def choose_step(
    steps: StepDirectories, step: int | None, hold: ExitStack, *, deep: bool
) -> About | None:
    """The description of a step, or of the highest one that can be restored.

    ``None`` if no step is committed. If steps are and none can be restored, this is an error.

    Args:
        steps: The directories.
        step: The step; ``None`` for the highest one.
        hold: Keeps the step from removal by other processes of this machine.
        deep: Whether to compare every byte with its checksum, for which there is no deadline.
    """
    if step is not None:
        about = _restorable(steps, step, hold, deep=deep)
        if about is None:
            raise ReadError(
                f"step {step} is not committed",
                phase="read",
                path=steps.path(step),
                hint=f"committed steps: {steps.look(steps.committed)[-5:]}",
            )
        steps.look(partial(_warn_of_later, steps, step))
        return about
    refused: dict[int, NostallError] = {}
    for each in reversed(steps.look(steps.listed)):
        try:
            about = _restorable(steps, each, hold, deep=deep)
        except (DamagedCheckpointError, ReadError, UnknownMetadataError) as error:
            _log.warning("skipped %s: %s", steps.path(each), error.message)
            refused[each] = error
            continue
        if about is not None:
            return about
    for refusal in refused.values():
        if not isinstance(refusal, DamagedCheckpointError):
            raise refusal
    if refused:
        newest, refusal = next(iter(refused.items()))
        raise DamagedCheckpointError(
            f"no committed step of {sorted(refused)!r:.200} can be restored; {newest}:"
            f" {refusal.message}",
            phase="read",
            path=steps.root,
            hint=f"{refusal.hint}; to train from the beginning, use another root",
        ) from refusal
    return None


def _restorable(steps: StepDirectories, step: int, hold: ExitStack, *, deep: bool) -> About | None:
    """The description of a step; ``None`` if it is not committed. It is held before this looks."""
    about = steps.look(partial(_described, steps, step, hold))
    if about is not None and deep:
        _require_undamaged(steps.path(step), deep=True)
    return about


def _described(steps: StepDirectories, step: int, hold: ExitStack) -> About | None:
    path = steps.path(step)
    if not hold.enter_context(held(path)) or steps.committed_at_s(step) is None:
        return None
    _require_undamaged(path)
    about = read_about(path)
    if about is None:
        raise DamagedCheckpointError(
            "the step was not saved by a CheckpointManager",
            phase="read",
            path=path,
            hint="load it with torch.distributed.checkpoint.load",
        )
    if about.step != step:  # a job would go on from there, and find this directory at each resume
        raise DamagedCheckpointError(
            f"the directory was renamed or copied: it holds step {about.step}",
            phase="read",
            path=path,
            hint=f"rename it to {name_of(about.step)}, unless that exists",
        )
    return about


def _require_undamaged(path: str, *, deep: bool = False) -> None:
    why = why_damaged(path, deep=deep)
    if why is not None:
        raise DamagedCheckpointError(
            f"the step is damaged: {why}",
            phase="read",
            path=path,
            hint=f"`nostall verify {path}` lists all damage; restore another step",
        )


def _warn_of_later(steps: StepDirectories, step: int) -> None:
    """Warn of steps that a restart would restore in place of those of this run."""
    higher = (each for each in steps.listed() if each > step)
    later = [each for each in higher if steps.committed_at_s(each) is not None]
    if later:
        _log.warning(
            "step %d is restored, and %s has later steps: %s. A restart resumes from step %d. To"
            " remove them, call discard_after(%d) of the manager",
            step,
            steps.root,
            f"{later!r:.200}",
            later[-1],
            step,
        )
