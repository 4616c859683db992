"""Refusals that are shown at the caller's line.

A state or an option that is refused is the caller's to change: frames of private modules say
nothing about it, and the message has the text of the cause.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from types import TracebackType
from typing import ParamSpec, TypeVar

from nostall.errors import OptionError, StagingError

P = ParamSpec("P")
T = TypeVar("T")

_PRIVATE = f"{os.sep}nostall{os.sep}_"


def is_refusal(error: object) -> bool:
    """Whether an error refuses a state or an option."""
    return isinstance(error, OptionError | StagingError)


def is_private(file_name: str) -> bool:
    """Whether a frame of this file is of a private module of nostall."""
    return _PRIVATE in file_name


def refusing(function: Callable[P, T]) -> Callable[P, T]:
    """Let a public function raise refusals without private frames, their cause as an attribute."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _shorten(error)
            if isinstance(error, OptionError | StagingError):
                error.cause, error.__cause__ = error.__cause__ or error.cause, None
            raise

    return call


def refusing_in_dcp(function: Callable[P, T]) -> Callable[P, T]:
    """The same for a method that DCP calls, which sends causes on and does not print them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _shorten(error)
            raise

    return call


def _shorten(error: BaseException) -> None:
    # DCP's CheckpointException has the errors of ranks; this module does without torch.
    failures = dict(getattr(error, "failures", None) or {}).values()
    if is_refusal(error) or (failures and all(is_refusal(each) for each, _ in failures)):
        error.__traceback__ = _public(error.__traceback__)


def _public(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if not is_private(trace.tb_frame.f_code.co_filename):
            kept.append(trace)
        trace = trace.tb_next
    for each, following in pairwise([*kept, None]):
        each.tb_next = following  # type: ignore[union-attr]  # only the last one is None
    return kept[0] if kept else None
