"""The command line: ``nostall`` or ``python -m nostall``.

Paths are looked at before the module of a command is imported, which may need torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from nostall._cli.listing import POLICIES, parse_policies, require_there
from nostall._cli.output import NotThere, Status, print_error, printable
from nostall._storage.locations import is_address, place_of, require_possible
from nostall._version import __version__
from nostall.errors import NostallError, OptionError, UnknownMetadataError

__all__ = ["main"]

_COMMANDS = {
    "ls": ("listing", "list the checkpoints in a directory: step, size, age, state, metrics"),
    "latest": ("listing", "print the path of the last committed complete checkpoint"),
    "inspect": ("items", "show names, shapes, dtypes, sharding, sizes and files"),
    "diff": ("items", "compare two checkpoints: - only in A, + only in B, ! structure, ~ values"),
    "verify": ("listing", "read every byte of a checkpoint, or of all in a directory"),
    "prune": ("listing", "remove checkpoints that no policy keeps; by default a dry run"),
    "convert": ("convert", "convert a directory to a torch.save or safetensors file, or back"),
}
"""The module below ``nostall._cli`` with the function of a command, and its help."""
_STATUS = {
    NotThere: Status.NOT_THERE,
    UnknownMetadataError: Status.NOT_UNDERSTOOD,
    OptionError: Status.WRONG_ARGUMENTS,
}
_STATUSES = (
    "exit status: 0 fine; 1 damaged, different or failed; 2 wrong arguments; 3 no checkpoint there,"
    " or no such directory; 4 metadata not understood; 130 interrupted; 141 the reader of the"
    " output has ended"
)


def place(text: str) -> str:
    """A path as it is, or what an address leads to; for argparse.

    Raises:
        ArgumentTypeError: The text is empty, or an address that cannot be used or has lost a slash.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; is a variable not set?")
    try:
        require_possible(text)
        return place_of(text) if is_address(text) else text
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nostall",
        allow_abbrev=False,  # of --delete, above all
        description="Look at, verify, convert and remove checkpoints of PyTorch DCP.",
        epilog=_STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"nostall {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    by_name = {}
    for name, (_, text) in _COMMANDS.items():
        by_name[name] = commands.add_parser(
            name, help=text, description=text, epilog=_STATUSES, allow_abbrev=False
        )
        by_name[name].set_defaults(refuse=by_name[name].error)

    def add(names: str, argument: str, text: str, **options: Any) -> None:
        for name in names.split():
            by_name[name].add_argument(argument, help=text, **options)

    def add_path(names: str, argument: str, text: str) -> None:
        add(names, argument, text, type=place, metavar=argument.upper())

    def add_flag(names: str, argument: str, text: str) -> None:
        add(names, argument, text, action="store_true")

    add_path("ls latest prune", "root", "directory of checkpoint directories")
    add_path("inspect verify", "path", "checkpoint directory")
    add_path("diff", "a", "checkpoint directory")
    add_path("diff", "b", "checkpoint directory")
    add_path("convert", "source", "checkpoint directory, or file")
    add_path("convert", "target", "new file, or new directory")
    add_flag("latest prune", "--deep", "read every byte; a damaged checkpoint is not complete")
    add_flag("diff", "--values", "compare values bit by bit, too, after verifying both")
    add_flag("prune", "--delete", "remove, instead of a dry run")
    trusting = "unpickle objects of any class, which can run code that is in SOURCE"
    add_flag("convert", "--trust", trusting)
    named = "only items whose name matches, such as 'model.*'; can be repeated"
    add("inspect diff", "--name", named, metavar="PATTERN", action="append", default=[])
    order = "default: the order in which they were saved"
    add("inspect", "--sort", order, choices=("name", "size"))
    beginning = "for safetensors: only tensors whose names begin with NAME; it is cut off"
    add("convert", "--prefix", beginning, metavar="NAME", default="")
    policies = {"metavar": "POLICIES", "type": parse_policies, "action": "append"}
    add("prune", "--keep", POLICIES, required=True, **policies)
    add_flag(" ".join(_COMMANDS), "--json", "print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, as ``--help`` lists it; wrong arguments exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(sys.stdout or nowhere),  # it is None if the caller has closed it: `>&-`
        redirect_stderr(sys.stderr or nowhere),
        warnings.catch_warnings(),
    ):
        # torch says this as it is imported, or on each save without a process group.
        needless = "Failed to initialize NumPy|torch.distributed is disabled"
        warnings.filterwarnings("ignore", message=needless)
        parser = _parser()
        if not given:
            parser.print_help(sys.stderr)
            return Status.WRONG_ARGUMENTS
        parsed, unknown = parser.parse_known_args(given)
        if unknown:
            # parse_args would show the usage of all commands, whichever this one is.
            refuse = parsed.refuse if given[0] == parsed.command else parser.error
            refuse(f"unrecognized arguments: {' '.join(unknown)}")
        return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    """Run the command; an error becomes one line and an exit status."""
    name = parsed.command
    try:
        for argument in ("root", "path", "a", "b", "source"):
            if argument in parsed:
                require_there(getattr(parsed, argument), directory=argument != "source")
        module = import_module(f"nostall._cli.{_COMMANDS[name][0]}")
        answer = getattr(module, name)(parsed)
        lines = json.dumps(answer.plain, indent=2).split("\n") if parsed.json else answer.lines
        # A script takes what `latest` prints for a path: bytes that are not text stay.
        keeps_bytes = name == "latest"
        sys.stdout.writelines(f"{printable(line, keeps_bytes=keeps_bytes)}\n" for line in lines)
        sys.stdout.flush()
        if answer.error is not None:
            raise answer.error
    except BrokenPipeError:
        # The reader has ended, as `head` does; the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.PIPE_CLOSED
    except KeyboardInterrupt:
        print_error("interrupted")
        return Status.INTERRUPTED
    except (NotThere, NostallError, OSError, MemoryError, UnicodeEncodeError) as error:
        print_error(error)
        return next((_STATUS[kind] for kind in _STATUS if isinstance(error, kind)), Status.FAILED)
    return int(answer.status)
