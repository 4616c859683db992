"""The command line: ``nostall`` or ``python -m nostall``.

One table has all commands. Paths are looked at before the module of a command is imported, which
may need torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from nostall._cli.listing import require_there
from nostall._cli.output import NotThere, Status, print_answer, print_error
from nostall._cli.prune import parse_policies
from nostall._storage.destination import place_of, require_possible
from nostall._storage.places import is_address
from nostall._version import __version__
from nostall.errors import NostallError, OptionError, UnknownMetadataError

__all__ = ["main"]

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


_PATHS = {
    "root": "directory of checkpoint directories",
    "path": "checkpoint directory",
    "a": "checkpoint directory",
    "b": "another one",
    "source": "checkpoint directory, or file",
    "target": "new file, or new directory",
}
_FLAGS = {
    "--deep": "read every byte, as verify does: what is damaged is not complete",
    "--values": "compare values bit by bit, too, after verifying both",
    "--delete": "remove, instead of a dry run",
    "--trust": "unpickle objects of any class, which can run code that is in SOURCE",
    "--json": "print JSON",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "--name": {
        "metavar": "PATTERN",
        "action": "append",
        "default": [],
        "help": "only items with such a name, as in 'model.*'; several add up",
    },
    "--sort": {
        "choices": ("name", "size"),
        "help": "default: the order in which they were saved",
    },
    "--prefix": {
        "metavar": "NAME",
        "default": "",
        "help": "for safetensors: only tensors whose names begin so, without this beginning",
    },
    "--keep": {
        "metavar": "POLICIES",
        "type": parse_policies,
        "action": "append",
        "required": True,
        "help": "latest=N: the N highest steps; best=N:METRIC, or best=N:METRIC:max: the N steps"
        " with the lowest or highest value of a metric saved by a CheckpointManager; every=N: steps"
        " that are multiples of N; every=6h: one in 6 hours (s, m, h, d); separated by commas, any"
        " of them keeps a checkpoint",
    },
}


class Command(NamedTuple):
    """A command; the function that runs it has its name."""

    module: str
    """Below ``nostall._cli``."""
    arguments: str
    """Their names, separated by spaces; each command has ``--json``, too."""
    help: str


_COMMANDS = {
    "ls": Command(
        "listing", "root", "list the checkpoints in a directory: step, size, age, state, metrics"
    ),
    "latest": Command(
        "listing", "root --deep", "print the path of the last committed complete checkpoint"
    ),
    "inspect": Command(
        "items",
        "path --name --sort",
        "show names, shapes, dtypes, sharding (parts along each dimension), sizes and files",
    ),
    "diff": Command(
        "items",
        "a b --values --name",
        "compare two checkpoints: - only in A, + only in B, ! other dtype or shape, ~ other values",
    ),
    "verify": Command(
        "listing",
        "path",
        "read every byte of a checkpoint, or of each in a directory, and report any damage",
    ),
    "prune": Command(
        "prune",
        "root --keep --deep --delete",
        "remove complete checkpoints that no policy keeps, except the last; a dry run by default",
    ),
    "convert": Command(
        "convert",
        "source target --trust --prefix",
        "convert a checkpoint directory to a torch.save or safetensors file, or back",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, as ``--help`` lists it; wrong arguments exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="nostall",
        allow_abbrev=False,  # of --delete, above all
        description="Look at, verify, convert and remove checkpoints of PyTorch DCP.",
        epilog=_STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"nostall {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name, help=command.help, description=command.help, epilog=_STATUSES, allow_abbrev=False
        )
        subparser.set_defaults(refuse=subparser.error)
        for argument in (*command.arguments.split(), "--json"):
            if argument in _PATHS:
                text = _PATHS[argument]
                subparser.add_argument(argument, type=place, metavar=argument.upper(), help=text)
            elif argument in _FLAGS:
                subparser.add_argument(argument, action="store_true", help=_FLAGS[argument])
            else:
                subparser.add_argument(argument, **_OPTIONS[argument])
    with ExitStack() as opened:
        opened.enter_context(warnings.catch_warnings())
        # torch says this as it is imported; no command needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:  # closed by the caller, as `>&-` does
                nowhere = opened.enter_context(Path(os.devnull).open("w"))
                opened.enter_context(redirect(nowhere))
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
        for argument in _PATHS:
            if argument in parsed and argument != "target":
                require_there(getattr(parsed, argument), directory=argument != "source")
        module = import_module(f"nostall._cli.{_COMMANDS[name].module}")
        answer = getattr(module, name)(parsed)
        # A script takes what `latest` prints for a path: bytes that are not text stay.
        print_answer(answer, as_json=parsed.json, keeps_bytes=name == "latest")
        sys.stdout.flush()
        if answer.error is not None:
            raise answer.error
    except BrokenPipeError:
        # The reader has ended, as `head` does; the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Status.PIPE_CLOSED
    except UnicodeEncodeError as error:
        print_error(f"{error.object!a:.200} cannot be printed as {error.encoding}")
        return Status.FAILED
    except KeyboardInterrupt:
        print_error("interrupted")
        return Status.INTERRUPTED
    except MemoryError as error:
        print_error(str(error) or "not enough memory")
        return Status.FAILED
    except (NotThere, NostallError, OSError) as error:
        print_error(error)
        return next((_STATUS[kind] for kind in _STATUS if isinstance(error, kind)), Status.FAILED)
    return int(answer.status)
