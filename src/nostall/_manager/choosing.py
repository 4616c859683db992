"""The step to restore: rank 0 chooses it, and holds it until all ranks have read it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nostall._manager.contents import About, read_about
from nostall._manager.steps import StepDirectories, held, name_of
from nostall._ranks.failures import sendable
from nostall._ranks.group import Coordination
from nostall._torch import wrap_exception
from nostall.errors import DamagedCheckpointError, NostallError, ReadError, UnknownMetadataError
from nostall.integrity import State, verify

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


def choose_verified(steps: StepDirectories, step: int | None, hold: ExitStack) -> About | None:
    """As :func:`choose_step`, in time, but of steps that :func:`nostall.verify` finds undamaged.

    Reading their files has no deadline.

    Raises:
        DamagedCheckpointError: ``step`` is damaged; or as :func:`choose_step`.
        ReadError, SaveTimeoutError: Storage does not answer while this looks for steps.
        Exception: As :func:`choose_step`.
    """
    damaged: set[int] = set()
    while True:
        about = steps.look(partial(choose_step, steps, step, hold, without=damaged))
        if about is None:
            return None
        found = _damage_of(steps, about.step)
        if found is None:
            return about
        if step is not None:
            raise found
        _log.warning("skipped %s: %s", found.path, found.message)
        damaged.add(about.step)


def _require_none(steps: StepDirectories, misnamed: Mapping[int, int]) -> None:
    """Require that no step is committed, where none can be restored.

    Args:
        steps: The directories.
        misnamed: The steps whose directories hold another one, and which.
    """
    committed = steps.committed()
    if not committed:
        return
    last = committed[-1]
    if last in misnamed:
        raise DamagedCheckpointError(
            f"all committed steps are damaged or renamed: {committed!r:.200}",
            phase="read",
            path=steps.root,
            hint=f"rename {name_of(last)} to {name_of(misnamed[last])} again, if that is not there;"
            " to train from the beginning, use another root",
        )
    commands = " and ".join(f"`nostall verify {path}`" for path in steps.checkpoints(last))
    raise DamagedCheckpointError(
        f"all committed steps are damaged: {committed!r:.200}",
        phase="read",
        path=steps.root,
        hint=f"for the damage of the last one run {commands}; restore(state, step=...) restores one"
        " whose files are all there; to train from the beginning, use another root",
    )


def _warn_of_others(steps: StepDirectories) -> None:
    """Warn of checkpoints that are not steps, where the job is about to start from scratch."""
    others = steps.under_other_names()
    if others:
        _log.warning(
            "no step to restore in %s, but it has checkpoints under other names, which this manager"
            " neither restores nor removes: %d, for example %s. It expects names such as %s. To"
            " load another one, use nostall.load or torch.distributed.checkpoint.load",
            steps.root,
            len(others),
            others[-1],
            " and ".join(steps.checkpoints(100)),
        )


def _warn_of_later(steps: StepDirectories, step: int) -> None:
    """Warn of steps that a restart would restore in place of those of this run."""
    later = [each for each in steps.listed() if each > step and steps.committed_at_s(each)]
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


def _damage_of(steps: StepDirectories, step: int) -> DamagedCheckpointError | ReadError | None:
    for checkpoint in steps.checkpoints(step):
        found = verify(checkpoint)
        if found.ok:
            continue
        what = ", ".join(map(str, found.damages)) or found.note
        if found.state is State.UNREADABLE:
            return ReadError(
                f"step {step} cannot be read: {what}",
                phase="verify",
                path=checkpoint,
                hint="try again when storage answers, or give this user the right to read it",
            )
        return DamagedCheckpointError(
            f"step {step} is damaged: {what}",
            phase="verify",
            path=checkpoint,
            hint="restore another step",
        )
    return None


def choose_step(
    steps: StepDirectories,
    step: int | None,
    hold: ExitStack,
    *,
    without: Set[int] = frozenset(),
) -> About | None:
    """The description of the step to restore.

    Args:
        steps: The directories.
        step: A step, or ``None`` for the highest complete one.
        hold: Keeps the step from removal by other processes of this machine.
        without: Steps that are not chosen by default.

    Returns:
        The description; ``None`` if ``step`` is, and no step is committed.

    Raises:
        ReadError: ``step`` has no complete checkpoint.
        UnknownMetadataError: No step is known to be complete, and one is not understood.
        OSError: No step is known to be complete, and one cannot be read at present.
        DamagedCheckpointError: Another program saved the step; or there are committed steps, and
            none is complete and in its own directory.
        OptionError: The step was saved with other parts; or there is none with these.
    """
    if step is not None:
        about = _described(steps, step, hold)
        if isinstance(about, About):
            _warn_of_later(steps, step)
            return about
        raise ReadError(
            f"step {step} has no complete checkpoint: {about.why}",
            phase="read",
            path=steps.path(step),
            hint=_next_step(steps, step, about),
        )
    unknown: UnknownMetadataError | OSError | None = None
    misnamed: dict[int, int] = {}
    for each in sorted(set(steps.listed()) - without, reverse=True):
        try:
            about = _described(steps, each, hold)
            if isinstance(about, About):
                return about
            if isinstance(about, _Misnamed):
                _log.warning("skipped %s: %s", steps.path(each), about.why)
                misnamed[each] = about.holds
            elif isinstance(about, _Damaged):
                _log.warning("skipped %s: the step is damaged: %s", steps.path(each), about.why)
        except (UnknownMetadataError, OSError) as error:
            why = error.message if isinstance(error, NostallError) else error.strerror
            _log.warning("skipped %s: %s", steps.path(each), why)
            unknown = unknown or error
    if unknown is not None:
        raise unknown
    for each in steps.listed():
        steps.require_own_parts(each)
    _require_none(steps, misnamed)
    _warn_of_others(steps)
    return None


@dataclass(frozen=True, slots=True)
class _Absent:
    """A step that is not committed."""

    why: str


@dataclass(frozen=True, slots=True)
class _Damaged:
    """A committed step that cannot be restored."""

    why: str


@dataclass(frozen=True, slots=True)
class _Misnamed:
    """A step in the directory of another one.

    It is not restored: a job would go on from the lower step that it holds, and find this
    directory again, in place of its later steps, whenever it resumes.
    """

    holds: int

    @property
    def why(self) -> str:
        return (
            f"the directory was renamed or copied: it holds step {self.holds}, whose directory is"
            f" {name_of(self.holds)}"
        )


def _next_step(steps: StepDirectories, step: int, why: _Absent | _Damaged | _Misnamed) -> str:
    """What to do if ``step`` was asked for and cannot be restored."""
    others = [each for each in steps.committed() if each != step][-5:]
    instead = f"directories of other committed steps: {others}" if others else "no other is there"
    match why:
        case _Absent():
            return instead
        case _Damaged():
            commands = " and ".join(f"`nostall verify {path}`" for path in steps.checkpoints(step))
            return f"for all damage run {commands}; {instead}"
        case _Misnamed(holds):
            return f"rename it to {name_of(holds)} if that is not there; {instead}"


def _described(
    steps: StepDirectories, step: int, hold: ExitStack
) -> About | _Absent | _Damaged | _Misnamed:
    """The description of a step, or why it cannot be restored. It is held before this looks.

    The description is of this step: ``about.step == step``.
    """
    if not hold.enter_context(held(steps.path(step))) or steps.committed_at_s(step) is None:
        is_there = step in steps.listed()
        return _Absent("it is not committed" if is_there else "there is no such step")
    why = steps.why_damaged(step)
    if why is not None:
        return _Damaged(why)
    steps.require_own_parts(step)
    parts = [_about(checkpoint) for checkpoint in steps.checkpoints(step)]
    if len({about.save for about in parts}) > 1:
        return _Damaged("its parts are of different saves")
    if parts[-1].step != step:
        return _Misnamed(parts[-1].step)
    return parts[-1]


def _about(path: str) -> About:
    about = read_about(path)
    if about is None:
        raise DamagedCheckpointError(
            "the step was not saved by a CheckpointManager",
            phase="read",
            path=path,
            hint="load it with torch.distributed.checkpoint.load",
        )
    return about
