"""The command line: ``nostall`` or ``python -m nostall``. Commands import torch if they need it."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path

from nostall._cli import convert, diff, inspect, latest, ls, prune, verify
from nostall._cli.arguments import Command, NotThere, Status
from nostall._cli.output import describe, print_error
from nostall._version import __version__
from nostall.errors import NostallError, OptionError, UnknownMetadataError

__all__ = ["main"]

_COMMANDS: dict[str, Command] = {
    "ls": ls,
    "inspect": inspect,
    "latest": latest,
    "diff": diff,
    "verify": verify,
    "prune": prune,
    "convert": convert,
}
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
            name, help=command.HELP, description=command.DESCRIPTION, allow_abbrev=False
        )
        subparser.set_defaults(run=command.run, refuse=subparser.error)
        command.add_arguments(subparser)
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
    try:
        status = int(parsed.run(parsed))
        sys.stdout.flush()
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
        print_error(describe(error))
        return next((_STATUS[kind] for kind in _STATUS if isinstance(error, kind)), Status.FAILED)
    return status
