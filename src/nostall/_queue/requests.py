"""A request: a function for the background, and functions that follow it in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from nostall._model.threads import interruptible
from nostall._ranks.failures import failure_of, raise_everywhere
from nostall._ranks.group import are_same_ranks, coordination_for
from nostall._save.split_save import BackgroundSave
from nostall.errors import OptionError, RankMismatchError

if TYPE_CHECKING:
    from nostall._save.early_commit import EarlyCommit
    from nostall._save.rank_save import RankSave

F = TypeVar("F", bound=Callable[..., Any])


_COMMITS: list[Callable[..., Any]] = []


def commits(function: F) -> F:
    """Mark the finalize function that commits a save, given its writer and two more arguments.

    It raises on all ranks or on none, so that no rank has to ask the others.
    """
    _COMMITS.append(function)
    return function


def _committed_by(function: Callable[[], Any]) -> tuple[Any, ...] | None:
    """The arguments of a commit, if a finalize function is known to do nothing else.

    That is a partial; or a closure, such as Megatron's, that Python compiled to use no name and no
    value of its surroundings but the commit and what it is called with.
    """
    used: list[Any]
    if isinstance(function, partial):
        used = [function.func, function.args, *function.keywords]
    elif isinstance(function, FunctionType):
        code = function.__code__
        if code.co_varnames:  # an argument's default value, or a local one, may be anything
            return None
        try:
            used = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a variable that has no value yet
            return None
        used += [function.__globals__.get(name) for name in code.co_names]
        used += [each for each in code.co_consts if isinstance(each, CodeType)]
    else:
        return None
    arguments = [each for each in used if not any(each is known for known in _COMMITS)]
    if len(arguments) != 1 or len(used) != 2 or not isinstance(arguments[0], tuple | list):
        return None
    if len(arguments[0]) != _COMMIT_ARGUMENTS or not hasattr(arguments[0][0], "_rank_save"):
        return None
    return tuple(arguments[0])


_COMMIT_ARGUMENTS = 3


class AsyncRequest(NamedTuple):
    """A function for the background, and functions that follow it in the trainer."""

    async_fn: Callable[..., Any] | None
    """Runs in the background; ``None`` if this rank has nothing to do."""
    async_fn_args: tuple[Any, ...] | list[Any]
    """Its arguments; the result of ``preload_fn`` replaces index 1."""
    finalize_fns: list[Callable[[], Any]]
    """Run in the trainer, in order, once every rank is done; never after a failure."""
    async_fn_kwargs: dict[str, Any] | None = None
    """Its keyword arguments."""
    preload_fn: Callable[[], Any] | None = None
    """Runs in the trainer when the request is scheduled; its result replaces argument index 1."""
    is_frozen: bool = False
    call_idx: int = 0

    @classmethod
    def of(cls, request: object) -> AsyncRequest:
        """A request of any class, taken by its fields; all but the first three may be missing.

        Raises:
            OptionError: It lacks one of the first three.
        """
        if isinstance(request, cls):
            return request
        fields = {name: getattr(request, name) for name in cls._fields if hasattr(request, name)}
        missing = [name for name in cls._fields[:3] if name not in fields]
        if missing:
            raise OptionError(
                f"an object of type {type(request).__name__} cannot be scheduled: it has no"
                f" {missing[0]}",
                hint="pass an AsyncRequest, or an object with its fields",
            )
        return cls(**fields)

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append a finalize function.

        Raises:
            RuntimeError: The request is already scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("cannot add a finalize function to a scheduled request")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Run the whole request in the caller's thread. Collective.

        Raises:
            CheckpointException: It failed on some rank; raised on every rank, and nothing is
                finalised. In a single process, a callable that is not nostall's own raises its own
                exception instead.
        """
        native = self.async_fn if isinstance(self.async_fn, BackgroundSave) else None
        error: Exception | None = None
        try:
            if self.async_fn is not None:
                self.async_fn(*self.loaded_args(), **(self.async_fn_kwargs or {}))
        except Exception as raised:  # raised below, as the other ranks wait in a collective
            error = raised
            if native is not None:
                native.fail(raised, phase="stage")
        coordination = coordination_for(None)
        if error is not None and native is None and coordination.world_size == 1:
            raise error
        failure = failure_of(error, phase="write") if error is not None else None
        if native is not None and native.failure() is not None:
            failure = native.failure()
        if coordination.maximum([int(failure is not None)]) != [0]:
            if native is not None:
                native.discard()
            raise_everywhere(failure, coordination)
        for finalize in self.finalize_fns:
            with interruptible():
                finalize()

    def loaded_args(self) -> list[Any]:
        """The arguments after preloading."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            if len(args) < 2:
                raise OptionError(
                    f"a request with a preload_fn has {len(args)} arguments",
                    hint="pass at least two async_fn_args: the result replaces index 1",
                )
            with interruptible():
                args[1] = self.preload_fn()
        return args

    @property
    def raises_on_all_ranks(self) -> bool:
        """Whether its finalize functions are known to raise on all ranks or on none."""
        return all(_committed_by(each) is not None for each in self.finalize_fns)

    def early_commit(self, group: dist.ProcessGroup | None) -> EarlyCommit | None:
        """The early commit of its save, which is allowed now.

        ``None`` if a finalize function is to run before, or other ranks save than those of a group.
        """
        first = _committed_by(self.finalize_fns[0]) if self.finalize_fns else None
        if first is None:
            return None
        writer, _, wrapper = first
        save: RankSave = writer._rank_save
        if save.to_schedule is not self.async_fn or not are_same_ranks(wrapper.group, group):
            return None
        return save.allow_early_commit()

    def freeze(self) -> AsyncRequest:
        """The same request, closed to further finalize functions."""
        return self._replace(is_frozen=True)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Run the finalize functions and return the call index.

        With ``validate_matching_call_idx`` this is collective: ranks first compare their indices.

        Raises:
            RankMismatchError: Ranks are about to finalise different requests.
        """
        if validate_matching_call_idx:
            highest, lowest = coordination_for(None).maximum([self.call_idx, -self.call_idx])
            if highest != -lowest:
                raise RankMismatchError(
                    f"ranks finalise different requests: this one {self.call_idx}, others {-lowest}"
                    f" to {highest}",
                    phase="commit",
                    hint="schedule and finalise the same requests in the same order on every rank",
                )
        for finalize in self.finalize_fns:
            with interruptible():
                finalize()
        return self.call_idx
