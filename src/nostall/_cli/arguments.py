"""Exit statuses, and types of arguments that several commands share. No torch."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command's module declares itself."""


class Status(IntEnum):
    """Exit statuses; ``docs/cli.md`` lists them."""

    FINE = 0
    FAILED = 1
    """Damaged, different, or an operation failed."""
    WRONG_ARGUMENTS = 2
    NOT_THERE = 3
    NOT_UNDERSTOOD = 4
    """The metadata has parts that this nostall and this torch do not know."""
    INTERRUPTED = 130
    """As a shell reports SIGINT."""
    PIPE_CLOSED = 141
    """As a shell reports SIGPIPE."""


class NotThere(Exception):
    """There is no checkpoint, or no such directory."""


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for argparse that shows the message of a ``ValueError``."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise ValueError(f"{text} is less than 1")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    if int(text) < 0:
        raise ValueError(f"{text} is negative")
    return int(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_name_filter(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``; see :func:`matches`."""
    parser.add_argument(
        *("--name",),
        action="append",
        default=[],
        metavar="PATTERN",
        help="only items with such a name, as in 'model.*'; several add up",
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches any shell pattern, or there is none."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
