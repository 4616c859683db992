"""Wording of messages, and second names of keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 file``, ``2 files``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and the number of the others: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def also_named(**other_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let callers pass a parameter by another keyword, too: ``also_named(ours="theirs")``.

    ``inspect.signature`` shows theirs, for programs that look before they call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            for ours, theirs in other_names.items():
                if theirs in kwargs:
                    kwargs[ours] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        shown = inspect.signature(function)
        renamed = [
            each.replace(name=other_names.get(name, name))
            for name, each in shown.parameters.items()
        ]
        call.__signature__ = shown.replace(parameters=renamed)  # type: ignore[attr-defined]  # see PEP 362
        return call

    return decorate
