"""``nostall convert SOURCE TARGET``: a DCP directory to one ``torch.save`` file, and back."""

from __future__ import annotations

import argparse
import os

from nostall._cli.arguments import NotThere, Status
from nostall._cli.output import printable
from nostall.errors import OptionError

HELP = "convert a checkpoint directory to one torch.save file, or back"
DESCRIPTION = (
    "Convert a checkpoint directory to one torch.save file, or such a file to a"
    " checkpoint directory. Tensors are never all in memory; converting to a file needs room"
    " for them twice on the target's disk. TARGET appears when it is complete."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SOURCE", help="checkpoint directory, or file")
    parser.add_argument("target", metavar="TARGET", help="new file, or new directory")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle objects of any class, which can run code that is in SOURCE",
    )


def run(parsed: argparse.Namespace) -> int:
    """Convert in the direction that SOURCE says."""
    if not os.path.lexists(parsed.source):
        raise NotThere(f"{parsed.source}: no such file or directory")
    if os.path.lexists(parsed.target):
        raise OptionError(
            "the target exists", path=parsed.target, hint="remove it, or name another one"
        )
    from nostall._cli.checkpoints.converting import to_checkpoint, to_file

    convert = to_file if os.path.isdir(parsed.source) else to_checkpoint
    items = convert(parsed.source, parsed.target, trust=parsed.trust)
    print(printable(f"{parsed.source} -> {parsed.target}: {items} items"))
    return Status.FINE
