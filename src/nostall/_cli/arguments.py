"""What a command is, exit statuses, and arguments that several commands share. No torch."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum
from typing import Protocol, TypeVar

from nostall._storage.destination import place_of, require_possible
from nostall._storage.places import is_address
from nostall.errors import OptionError

T = TypeVar("T")

_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?\s*", re.IGNORECASE)


class Command(Protocol):
    """A command's module."""

    HELP: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, parsed: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


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


def not_empty(text: str) -> str:
    """A path for argparse; an empty text, as of a variable that is not set, is refused.

    Raises:
        ArgumentTypeError: The text is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; is a variable not set?")
    return text


def place(text: str) -> str:
    """A type for argparse: a path as it is, or what an address leads to.

    Raises:
        ArgumentTypeError: The text is empty, or an address that cannot be used or has lost a slash.
    """
    if is_address(text):
        return checked(place_of)(text)
    checked(require_possible)(not_empty(text))
    return text


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number that is not lower."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return checked(parse)


def parse_nbytes(text: str) -> int:
    """Bytes from ``512MiB``, ``1.5G`` (binary), ``100MB`` (decimal) or a plain number.

    Raises:
        ValueError: The text is not a size, or is less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write 512MiB, 1GiB, 2TiB, 100MB or a number of bytes"
        )
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    nbytes = int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return nbytes


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_name_filter(parser: argparse.ArgumentParser) -> None:
    """Add ``--name``; see :func:`matches`."""
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only items with such a name, as in 'model.*'; several add up",
    )


def require_chosen(option: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """Require that an option chooses an item: a misspelt one must not look like no difference.

    Args:
        option: Such as ``--name``.
        patterns: What it was given; nothing chooses all.
        names: What it chooses from.

    Raises:
        OptionError: It chooses none; the hint has examples of what there is.
    """
    if patterns and names and not any(matches(name, patterns) for name in names):
        examples = ", ".join(itertools.islice(names, 3)) + (", ..." if len(names) > 3 else "")
        raise OptionError(
            f"no item matches {option} {', '.join(patterns)}", hint=f"there are: {examples}"
        )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches any shell pattern, or there is none."""
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
